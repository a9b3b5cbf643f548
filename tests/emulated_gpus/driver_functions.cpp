#include "emulated_gpus/driver_functions.hpp"

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "emulated_gpus/host.hpp"
#include "emulated_gpus/memory.hpp"

namespace ferry::emulated {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

/// Memory that mappings share. Its address is the handle.
struct Physical {
  int fd = -1;
};

void* at(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }
Physical* physical_of(CUmemGenericAllocationHandle handle) {
  return reinterpret_cast<Physical*>(static_cast<std::uintptr_t>(handle));
}

CUresult init(unsigned /*flags*/) { return CUDA_SUCCESS; }
CUresult name_error(CUresult /*error*/, const char** name) {
  *name = "an error of emulated GPUs";
  return CUDA_SUCCESS;
}
CUresult get_device(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult get_attribute(int* value, CUdevice_attribute attribute, CUdevice /*device*/) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING ? writes_ordering() : 1;
  return CUDA_SUCCESS;
}
CUresult get_uuid(CUuuid* uuid, CUdevice device) {
  *uuid = uuid_of(device);
  return CUDA_SUCCESS;
}

/// A context for each device; its address is the handle.
CUcontext context_of(int device) {
  static std::vector<char> contexts(64);
  return reinterpret_cast<CUcontext>(&contexts[static_cast<std::size_t>(device)]);
}
int device_of(CUcontext context) {
  return static_cast<int>(reinterpret_cast<char*>(context) - reinterpret_cast<char*>(context_of(0)));
}
thread_local std::vector<int> pushed_from;

CUresult retain_context(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
  pushed_from.push_back(current_device());
  set_device(device_of(context));
  return CUDA_SUCCESS;
}
CUresult pop(CUcontext* context) {
  get_current(context);
  if (pushed_from.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  set_device(pushed_from.back());
  pushed_from.pop_back();
  return CUDA_SUCCESS;
}

CUresult identify(CUcontext context, unsigned long long* id) {
  const int device = context == nullptr ? current_device() : device_of(context);
  *id = static_cast<unsigned long long>(device) + 1;
  return CUDA_SUCCESS;
}

/// The runtime's functions, whose errors have the same numbers.
CUresult record_event(CUevent event, CUstream stream) { return static_cast<CUresult>(cudaEventRecord(event, stream)); }
CUresult identify_stream(CUstream stream, unsigned long long* id) {
  return static_cast<CUresult>(cudaStreamGetId(stream, id));
}
CUresult ask_for_capture(CUstream stream, CUstreamCaptureStatus* status) {
  cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
  const auto result = static_cast<CUresult>(cudaStreamIsCapturing(stream, &found));
  *status = static_cast<CUstreamCaptureStatus>(found);
  return result;
}
/// Emulated kernels are launched by their host code.
CUresult refuse_launch(const CUlaunchConfig* /*config*/, CUfunction /*function*/, void** /*arguments*/,
                       void** /*extra*/) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult query_event(CUevent event) {
  const auto& of = *reinterpret_cast<const Event*>(event);
  if (of.capture) return CUDA_ERROR_CAPTURED_EVENT;
  return machine().is_over(of.mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult query_stream(CUstream stream) {
  const Stream& of = stream_of(stream);
  if (of.capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return machine().is_over(machine().mark(of.queue)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/// Returns a CUmemorytype; 0 for memory that CUDA did not allocate.
unsigned type_of(const std::optional<Range>& range) {
  if (!range) return 0;
  return range->kind == MemoryKind::kDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
}
CUresult describe_pointer(unsigned count, const CUpointer_attribute* wanted, void** values, CUdeviceptr data) {
  const std::optional<Range> range = range_around(at(data));
  for (unsigned i = 0; i < count; ++i) {
    switch (wanted[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned*>(values[i]) = type_of(range);
        break;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *static_cast<unsigned*>(values[i]) = 0;
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int*>(values[i]) = range ? range->device : -1;
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *static_cast<CUdeviceptr*>(values[i]) = range ? range->begin : 0;
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *static_cast<std::size_t*>(values[i]) = range ? range->num_bytes : 0;
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}
CUresult find_range(CUdeviceptr* begin, std::size_t* num_bytes, CUdeviceptr data) {
  const std::optional<Range> range = range_around(at(data));
  if (!range) return CUDA_ERROR_NOT_FOUND;
  *begin = range->begin;
  *num_bytes = range->num_bytes;
  return CUDA_SUCCESS;
}

CUresult get_granularity(std::size_t* granularity, const CUmemAllocationProp* /*properties*/,
                         CUmemAllocationGranularity_flags /*flags*/) {
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* address, std::size_t num_bytes, std::size_t alignment, CUdeviceptr /*hint*/,
                 unsigned long long /*flags*/) {
  const std::size_t step = alignment == 0 ? kGranularity : alignment;
  void* const data = mmap(nullptr, num_bytes + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (first + step - 1) / step * step;
  if (begin != first) munmap(data, begin - first);
  if (begin - first != step) munmap(at(begin + num_bytes), step - (begin - first));
  add_range({begin, num_bytes, MemoryKind::kDevice, current_device(), -1});
  *address = begin;
  return CUDA_SUCCESS;
}
CUresult free_reserved(CUdeviceptr address, std::size_t num_bytes) {
  if (!remove_range(at(address))) return CUDA_ERROR_INVALID_VALUE;
  munmap(at(address), num_bytes);
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, std::size_t num_bytes, const CUmemAllocationProp* /*properties*/,
                unsigned long long /*flags*/) {
  const int fd = make_file(num_bytes);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<std::uintptr_t>(new Physical{fd});
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  Physical* const memory = physical_of(handle);
  close(memory->fd);
  delete memory;
  return CUDA_SUCCESS;
}
/// Maps without access, as the driver does.
CUresult map(CUdeviceptr address, std::size_t num_bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long /*flags*/) {
  void* const data = mmap(at(address), num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical_of(handle)->fd,
                          static_cast<off_t>(offset));
  return data == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, std::size_t num_bytes) {
  void* const data =
      mmap(at(address), num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return data == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr address, std::size_t num_bytes, const CUmemAccessDesc* /*access*/,
                    std::size_t /*count*/) {
  return mprotect(at(address), num_bytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult export_handle(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType /*type*/,
                       unsigned long long /*flags*/) {
  const int fd = fcntl(physical_of(handle)->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(to) = fd;
  return CUDA_SUCCESS;
}
CUresult import_handle(CUmemGenericAllocationHandle* handle, void* from, CUmemAllocationHandleType /*type*/) {
  const int fd = fcntl(static_cast<int>(reinterpret_cast<std::uintptr_t>(from)), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = reinterpret_cast<std::uintptr_t>(new Physical{fd});
  return CUDA_SUCCESS;
}
/// Object behind a CUgreenCtx.
struct GreenContext {
  unsigned num_sms;
  int device;
};

CUresult get_resource(CUdevice /*device*/, CUdevResource* resource, CUdevResourceType type) {
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  resource->type = type;
  resource->sm.smCount = static_cast<unsigned>(num_sms());
  return CUDA_SUCCESS;
}
CUresult split_resource(CUdevResource* parts, unsigned* num_parts, const CUdevResource* whole,
                        CUdevResource* /*remaining*/, unsigned /*flags*/, unsigned least) {
  const unsigned most_parts = whole->sm.smCount / (least == 0 ? 1 : least);
  *num_parts = parts == nullptr ? most_parts : std::min(*num_parts, most_parts);
  for (unsigned i = 0; parts != nullptr && i < *num_parts; ++i) {
    parts[i] = *whole;
    parts[i].sm.smCount = least;
  }
  return CUDA_SUCCESS;
}
/// The description of a resource is its number of multiprocessors.
CUresult describe_resource(CUdevResourceDesc* description, CUdevResource* resources, unsigned /*num_resources*/) {
  *description = reinterpret_cast<CUdevResourceDesc>(static_cast<std::uintptr_t>(resources->sm.smCount));
  return CUDA_SUCCESS;
}
CUresult create_green(CUgreenCtx* context, CUdevResourceDesc description, CUdevice device, unsigned /*flags*/) {
  const auto num_sms = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(description));
  *context = reinterpret_cast<CUgreenCtx>(new GreenContext{num_sms, device});
  return CUDA_SUCCESS;
}
CUresult destroy_green(CUgreenCtx context) {
  delete reinterpret_cast<GreenContext*>(context);
  return CUDA_SUCCESS;
}
CUresult create_green_stream(CUstream* handle, CUgreenCtx context, unsigned /*flags*/, int /*priority*/) {
  const GreenContext& green = *reinterpret_cast<GreenContext*>(context);
  Stream* const stream = make_stream(false);
  stream->device = green.device;
  machine().limit_blocks(stream->queue, green.num_sms);
  *handle = reinterpret_cast<CUstream>(stream);
  return CUDA_SUCCESS;
}

template <typename Function>
void* address_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

void* driver_function(std::string_view name) {
  static const auto* const functions =
      new std::map<std::string, void*, std::less<>>{{"cuInit", address_of(init)},
                                                    {"cuGetErrorName", address_of(name_error)},
                                                    {"cuGetErrorString", address_of(name_error)},
                                                    {"cuDeviceGet", address_of(get_device)},
                                                    {"cuDeviceGetAttribute", address_of(get_attribute)},
                                                    {"cuDeviceGetUuid", address_of(get_uuid)},
                                                    {"cuDevicePrimaryCtxRetain", address_of(retain_context)},
                                                    {"cuCtxGetCurrent", address_of(get_current)},
                                                    {"cuCtxPushCurrent", address_of(push)},
                                                    {"cuCtxPopCurrent", address_of(pop)},
                                                    {"cuCtxGetId", address_of(identify)},
                                                    {"cuEventRecord", address_of(record_event)},
                                                    {"cuLaunchKernelEx", address_of(refuse_launch)},
                                                    {"cuStreamGetId", address_of(identify_stream)},
                                                    {"cuStreamIsCapturing", address_of(ask_for_capture)},
                                                    {"cuEventQuery", address_of(query_event)},
                                                    {"cuStreamQuery", address_of(query_stream)},
                                                    {"cuPointerGetAttributes", address_of(describe_pointer)},
                                                    {"cuMemGetAddressRange", address_of(find_range)},
                                                    {"cuMemGetAllocationGranularity", address_of(get_granularity)},
                                                    {"cuMemAddressReserve", address_of(reserve)},
                                                    {"cuMemAddressFree", address_of(free_reserved)},
                                                    {"cuMemCreate", address_of(create)},
                                                    {"cuMemRelease", address_of(release)},
                                                    {"cuMemMap", address_of(map)},
                                                    {"cuMemUnmap", address_of(unmap)},
                                                    {"cuMemSetAccess", address_of(set_access)},
                                                    {"cuMemExportToShareableHandle", address_of(export_handle)},
                                                    {"cuMemImportFromShareableHandle", address_of(import_handle)},
                                                    {"cuDeviceGetDevResource", address_of(get_resource)},
                                                    {"cuDevSmResourceSplitByCount", address_of(split_resource)},
                                                    {"cuDevResourceGenerateDesc", address_of(describe_resource)},
                                                    {"cuGreenCtxCreate", address_of(create_green)},
                                                    {"cuGreenCtxDestroy", address_of(destroy_green)},
                                                    {"cuGreenCtxStreamCreate", address_of(create_green_stream)}};
  const auto found = functions->find(name);
  return found == functions->end() ? nullptr : found->second;
}

cudaUUID_t uuid_of(int device) {
  cudaUUID_t uuid{};
  std::memset(&uuid, 1 + device, sizeof(uuid));
  return uuid;
}

}  // namespace ferry::emulated
