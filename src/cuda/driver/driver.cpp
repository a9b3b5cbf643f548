#include "cuda/driver/driver.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>
#include <atomic>
#include <string>

#include "cuda/driver/cuda_call.hpp"

namespace ferry::cuda {
namespace {

constexpr std::string_view kDriverHint = "install an NVIDIA driver that supports this build's CUDA version";

/// GPUs whose contexts are cached: more than any machine has.
constexpr std::size_t kMaxDevices = 64;

/// `version`: the CUDA version that has the wanted signature of the function, 1000 * major + 10 * minor.
template <typename Function>
Status look_up(const char* name, unsigned int version, Function* function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found);
  if (error != cudaSuccess) {
    const Status reason = runtime_status(error, fmt::format("CUDA driver: looking up {}", name), kDriverHint);
    return Status(ErrorCode::kUnsupported, std::string(reason.message()));
  }
  if (found != cudaDriverEntryPointSuccess || address == nullptr) {
    return Status(ErrorCode::kUnsupported, fmt::format("CUDA driver: it has no {} as of CUDA {}.{}; {}", name,
                                                       version / 1000, version % 1000 / 10, kDriverHint));
  }
  *function = reinterpret_cast<Function>(address);
  return {};
}

struct LoadedDriver {
  Driver table;
  Status status;
};

LoadedDriver load_driver() {
  LoadedDriver loaded;
  Driver& table = loaded.table;
  Status& status = loaded.status;
  const auto need = [&status](const char* name, unsigned int version, auto* function) {
    if (status.ok()) status = look_up(name, version, function);
  };
  need("cuInit", 2000, &table.init);
  need("cuGetErrorName", 6000, &table.get_error_name);
  need("cuGetErrorString", 6000, &table.get_error_string);
  need("cuDeviceGet", 2000, &table.device_get);
  need("cuDeviceGetAttribute", 2000, &table.device_get_attribute);
  need("cuDeviceGetUuid", 11040, &table.device_get_uuid);
  need("cuDevicePrimaryCtxRetain", 7000, &table.device_primary_ctx_retain);
  need("cuCtxGetCurrent", 4000, &table.ctx_get_current);
  need("cuCtxGetId", 12000, &table.ctx_get_id);
  need("cuCtxPushCurrent", 4000, &table.ctx_push_current);
  need("cuCtxPopCurrent", 4000, &table.ctx_pop_current);
  need("cuEventQuery", 2000, &table.event_query);
  need("cuEventRecord", 2000, &table.event_record);
  need("cuLaunchKernelEx", 11060, &table.launch_kernel_ex);
  need("cuStreamGetId", 12000, &table.stream_get_id);
  need("cuStreamIsCapturing", 10000, &table.stream_is_capturing);
  need("cuStreamQuery", 2000, &table.stream_query);
  need("cuPointerGetAttributes", 7000, &table.pointer_get_attributes);
  need("cuMemGetAddressRange", 3020, &table.mem_get_address_range);
  need("cuMemGetAllocationGranularity", 10020, &table.mem_get_allocation_granularity);
  need("cuMemAddressReserve", 10020, &table.mem_address_reserve);
  need("cuMemAddressFree", 10020, &table.mem_address_free);
  need("cuMemCreate", 10020, &table.mem_create);
  need("cuMemRelease", 10020, &table.mem_release);
  need("cuMemMap", 10020, &table.mem_map);
  need("cuMemUnmap", 10020, &table.mem_unmap);
  need("cuMemSetAccess", 10020, &table.mem_set_access);
  need("cuMemExportToShareableHandle", 10020, &table.mem_export_to_shareable_handle);
  need("cuMemImportFromShareableHandle", 10020, &table.mem_import_from_shareable_handle);
  if (!status.ok()) return loaded;
  if (const CUresult result = table.init(0); result != CUDA_SUCCESS) {
    const char* name = nullptr;
    table.get_error_name(result, &name);
    status = Status(ErrorCode::kUnsupported,
                    fmt::format("CUDA driver: cuInit failed: {}; check that nvidia-smi sees a GPU and that "
                                "CUDA_VISIBLE_DEVICES names one",
                                name != nullptr ? name : "unknown error"));
  }
  return loaded;
}

const LoadedDriver& driver_of_process() {
  // Never destroyed: memory may be given back while the process's own statics already are.
  static const LoadedDriver& loaded = *new LoadedDriver(load_driver());
  return loaded;
}

/// Null until the functions are loaded.
std::array<std::atomic<CUcontext>, kMaxDevices> primary_contexts{};

ErrorCode code_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return ErrorCode::kSystem;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
      return ErrorCode::kUnsupported;
    default:
      return ErrorCode::kCuda;
  }
}

}  // namespace

Result<const Driver*> driver() {
  const LoadedDriver& loaded = driver_of_process();
  if (!loaded.status.ok()) return loaded.status;
  loaded_driver_table.store(&loaded.table, std::memory_order_release);
  return &loaded.table;
}

Status driver_status(CUresult result, std::string_view operation, std::string_view hint) {
  if (result == CUDA_SUCCESS) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  if (Result<const Driver*> table = driver(); table.ok()) {
    (*table)->get_error_name(result, &name);
    (*table)->get_error_string(result, &text);
  }
  std::string message = fmt::format("{} failed: {} ({})", operation, name != nullptr ? name : "unknown error",
                                    text != nullptr ? text : fmt::format("code {}", static_cast<int>(result)).c_str());
  if (!hint.empty()) message.append("; ").append(hint);
  return Status(code_of(result), std::move(message));
}

Result<bool> is_done(CUevent event) {
  Result<const Driver*> table = driver();
  if (!table.ok()) return table.status();
  const CUresult result = (*table)->event_query(event);
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY) return result == CUDA_SUCCESS;
  return driver_status(result, "asking whether a call is done", "a kernel on this GPU failed");
}

Result<bool> is_idle(CUstream stream) {
  Result<const Driver*> table = driver();
  if (!table.ok()) return table.status();
  const CUresult result = (*table)->stream_query(stream);
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY) return result == CUDA_SUCCESS;
  return driver_status(result, "asking whether the stream is idle", "a kernel on this GPU failed");
}

Result<CUcontext> primary_context(int device) {
  Result<const Driver*> table = driver();
  if (!table.ok()) return table.status();
  if (device < 0 || static_cast<std::size_t>(device) >= kMaxDevices) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("CUDA driver: GPU {}, expected an ordinal of 0 to {}; set GroupOptions::device", device,
                              kMaxDevices - 1));
  }
  std::atomic<CUcontext>& known = primary_contexts[static_cast<std::size_t>(device)];
  if (CUcontext context = known.load(std::memory_order_acquire); context != nullptr) return context;
  CUdevice handle = 0;
  const std::string operation = fmt::format("CUDA driver: opening GPU {}", device);
  constexpr std::string_view kHint = "GroupOptions::device must be the ordinal of a visible GPU";
  if (Status status = driver_status((*table)->device_get(&handle, device), operation, kHint); !status.ok()) {
    return status;
  }
  CUcontext context = nullptr;
  if (Status status = driver_status((*table)->device_primary_ctx_retain(&context, handle), operation); !status.ok()) {
    return status;
  }
  // Threads that race get the same context; retaining it twice is harmless, as it is never released.
  known.store(context, std::memory_order_release);
  return context;
}

CUcontext known_primary_context(int device) {
  if (device < 0 || static_cast<std::size_t>(device) >= kMaxDevices) return nullptr;
  return primary_contexts[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
}

CUmemAllocationProp shareable_memory(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

Result<std::size_t> allocation_granularity(int device) {
  Result<const Driver*> table = driver();
  if (!table.ok()) return table.status();
  const CUmemAllocationProp properties = shareable_memory(device);
  std::size_t granularity = 0;
  if (Status status = driver_status(
          (*table)->mem_get_allocation_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
          fmt::format("asking for the allocation granularity of GPU {}", device));
      !status.ok()) {
    return status;
  }
  return granularity;
}

CUmemAccessDesc access_from(int device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

}  // namespace ferry::cuda
