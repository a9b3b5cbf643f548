#ifndef FERRY_CUDA_DRIVER_DRIVER_HPP
#define FERRY_CUDA_DRIVER_DRIVER_HPP

/// Functions of the CUDA driver without a counterpart in the runtime, and functions that every call needs, because the
/// runtime's take longer on the host. They are looked up at first use: a library linked against libcuda would not load
/// on a machine without a GPU.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <driver_types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::cuda {

struct Driver {
  PFN_cuInit_v2000 init = nullptr;
  PFN_cuGetErrorName_v6000 get_error_name = nullptr;
  PFN_cuGetErrorString_v6000 get_error_string = nullptr;
  PFN_cuDeviceGet_v2000 device_get = nullptr;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute = nullptr;
  PFN_cuDeviceGetUuid_v11040 device_get_uuid = nullptr;
  PFN_cuDevicePrimaryCtxRetain_v7000 device_primary_ctx_retain = nullptr;
  PFN_cuCtxGetCurrent_v4000 ctx_get_current = nullptr;
  PFN_cuCtxGetId_v12000 ctx_get_id = nullptr;
  PFN_cuCtxPushCurrent_v4000 ctx_push_current = nullptr;
  PFN_cuCtxPopCurrent_v4000 ctx_pop_current = nullptr;
  PFN_cuEventQuery_v2000 event_query = nullptr;
  PFN_cuEventRecord_v2000 event_record = nullptr;
  PFN_cuLaunchKernelEx_v11060 launch_kernel_ex = nullptr;
  PFN_cuStreamGetId_v12000 stream_get_id = nullptr;
  PFN_cuStreamIsCapturing_v10000 stream_is_capturing = nullptr;
  PFN_cuStreamQuery_v2000 stream_query = nullptr;
  PFN_cuPointerGetAttributes_v7000 pointer_get_attributes = nullptr;
  PFN_cuMemGetAddressRange_v3020 mem_get_address_range = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 mem_get_allocation_granularity = nullptr;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve = nullptr;
  PFN_cuMemAddressFree_v10020 mem_address_free = nullptr;
  PFN_cuMemCreate_v10020 mem_create = nullptr;
  PFN_cuMemRelease_v10020 mem_release = nullptr;
  PFN_cuMemMap_v10020 mem_map = nullptr;
  PFN_cuMemUnmap_v10020 mem_unmap = nullptr;
  PFN_cuMemSetAccess_v10020 mem_set_access = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 mem_export_to_shareable_handle = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import_from_shareable_handle = nullptr;
};

/// The driver, loaded and initialized by the first call. Safe from any thread; never unloaded.
/// @errors kUnsupported: no driver, no GPU, or a driver that lacks one of these functions
Result<const Driver*> driver();

/// Variant without a Result, for code that runs in every call; null before driver() has succeeded once.
inline std::atomic<const Driver*> loaded_driver_table{nullptr};
inline const Driver* loaded_driver() { return loaded_driver_table.load(std::memory_order_acquire); }

/// Counterpart of runtime_status for the driver's codes.
Status driver_status(CUresult result, std::string_view operation, std::string_view hint = {});

/// The runtime's code for a driver's code: since CUDA 10.1 both have the same numbers.
constexpr cudaError_t as_runtime_error(CUresult result) { return static_cast<cudaError_t>(result); }
static_assert(as_runtime_error(CUDA_ERROR_OUT_OF_MEMORY) == cudaErrorMemoryAllocation);
static_assert(as_runtime_error(CUDA_ERROR_LAUNCH_FAILED) == cudaErrorLaunchFailure);
static_assert(as_runtime_error(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) == cudaErrorStreamCaptureInvalidated);

/// Whether all work before the event, or on the stream, is done. Unlike the runtime's queries these do not set the
/// thread's last error to cudaErrorNotReady, which would overwrite an error that the program may look for.
/// @errors kCuda: work failed
Result<bool> is_done(CUevent event);
Result<bool> is_idle(CUstream stream);

/// The context that the CUDA runtime uses on `device`, kept for the life of the process.
Result<CUcontext> primary_context(int device);
/// The same context if primary_context has been called for it, else null.
CUcontext known_primary_context(int device);

inline CUdeviceptr device_address(const void* data) {
  return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(data));
}

/// Properties of memory of `device` that other processes can map through a file descriptor.
CUmemAllocationProp shareable_memory(int device);

/// Unit of the sizes and offsets of such memory.
Result<std::size_t> allocation_granularity(int device);

/// Descriptor of read and write access from `device`.
CUmemAccessDesc access_from(int device);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_DRIVER_HPP
