#include "host_calls/counted_cuda.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

namespace ferry::test {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr int kNumSms = 132;
constexpr int kSharedBytes = 232448;
constexpr std::size_t kMemoryBytes = std::size_t{1} << 36;

/// Ranks may be threads.
std::mutex calls_mutex;

CudaCalls& calls() {
  static auto* const all = new CudaCalls;
  return *all;
}

cudaError_t counted(const char* name) {
  const std::lock_guard lock(calls_mutex);
  ++calls()[name];
  return cudaSuccess;
}

/// Names of the kernels by their addresses. Kernels register themselves before main().
std::map<const void*, std::string>& kernel_names() {
  static auto* const names = new std::map<const void*, std::string>;
  return *names;
}

std::vector<std::string>& launched_kernels() {
  static auto* const launched = new std::vector<std::string>;
  return *launched;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                        std::free);
  return status == 0 ? readable.get() : name;
}

/// Number of launches since the program began.
std::atomic<int> num_launches = 0;
std::atomic<int> num_behind = 0;

std::atomic<unsigned long long> context_id = 1;
std::atomic<bool> functions_hidden = false;

struct Event {
  int recorded_at = 0;
};

cudaError_t launch(const void* kernel) {
  ++num_launches;
  {
    const std::lock_guard lock(calls_mutex);
    launched_kernels().push_back(kernel_names().at(kernel));
  }
  return counted("launch");
}

CUcontext the_context() {
  static int context = 0;
  return reinterpret_cast<CUcontext>(&context);
}

cudaError_t take_memory(void** data, std::size_t bytes) {
  *data = std::aligned_alloc(kPageBytes, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult init(unsigned /*flags*/) { return CUDA_SUCCESS; }
CUresult name_error(CUresult /*error*/, const char** name) {
  *name = "error of a test";
  return CUDA_SUCCESS;
}
CUresult get_device(CUdevice* device, int /*ordinal*/) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult get_attribute(int* value, CUdevice_attribute /*attribute*/, CUdevice /*device*/) {
  *value = 1;
  return CUDA_SUCCESS;
}
CUresult get_uuid(CUuuid* uuid, CUdevice /*device*/) {
  std::memset(uuid, 1, sizeof(*uuid));
  return CUDA_SUCCESS;
}
CUresult retain_context(CUcontext* context, CUdevice /*device*/) {
  *context = the_context();
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = the_context();
  return CUDA_SUCCESS;
}
CUresult identify(CUcontext /*context*/, unsigned long long* id) {
  *id = context_id;
  return CUDA_SUCCESS;
}
CUresult push(CUcontext /*context*/) { return CUDA_SUCCESS; }
CUresult record_event(CUevent event, CUstream /*stream*/) {
  reinterpret_cast<Event*>(event)->recorded_at = num_launches;
  counted("cuEventRecord");
  return CUDA_SUCCESS;
}
CUresult identify_stream(CUstream stream, unsigned long long* id) {
  *id = reinterpret_cast<std::uintptr_t>(stream);
  counted("cuStreamGetId");
  return CUDA_SUCCESS;
}
CUresult ask_for_capture(CUstream /*stream*/, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  counted("cuStreamIsCapturing");
  return CUDA_SUCCESS;
}
CUresult launch_function(const CUlaunchConfig* /*config*/, CUfunction function, void** /*arguments*/,
                         void** /*extra*/) {
  launch(function);
  return CUDA_SUCCESS;
}
CUresult query_event(CUevent event) {
  counted("cuEventQuery");
  const Event& recorded = *reinterpret_cast<const Event*>(event);
  return recorded.recorded_at <= num_launches - num_behind ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
/// Reports each page as an allocation.
CUresult describe_pointer(unsigned /*count*/, const CUpointer_attribute* /*wanted*/, void** values, CUdeviceptr data) {
  counted("cuPointerGetAttributes");
  *static_cast<unsigned*>(values[0]) = CU_MEMORYTYPE_DEVICE;
  *static_cast<unsigned*>(values[1]) = 0;
  *static_cast<int*>(values[2]) = 0;
  *static_cast<CUdeviceptr*>(values[3]) = data / kPageBytes * kPageBytes;
  *static_cast<std::size_t*>(values[4]) = kPageBytes;
  return CUDA_SUCCESS;
}
CUresult find_range(CUdeviceptr* begin, std::size_t* bytes, CUdeviceptr data) {
  *begin = data;
  *bytes = kPageBytes;
  return CUDA_SUCCESS;
}

void* driver_function(const std::string& name) {
  static const std::map<std::string, void*> functions = {
      {"cuInit", reinterpret_cast<void*>(init)},
      {"cuGetErrorName", reinterpret_cast<void*>(name_error)},
      {"cuGetErrorString", reinterpret_cast<void*>(name_error)},
      {"cuDeviceGet", reinterpret_cast<void*>(get_device)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(get_attribute)},
      {"cuDeviceGetUuid", reinterpret_cast<void*>(get_uuid)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain_context)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(get_current)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(push)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(get_current)},
      {"cuCtxGetId", reinterpret_cast<void*>(identify)},
      {"cuEventQuery", reinterpret_cast<void*>(query_event)},
      {"cuEventRecord", reinterpret_cast<void*>(record_event)},
      {"cuLaunchKernelEx", reinterpret_cast<void*>(launch_function)},
      {"cuStreamGetId", reinterpret_cast<void*>(identify_stream)},
      {"cuStreamIsCapturing", reinterpret_cast<void*>(ask_for_capture)},
      {"cuPointerGetAttributes", reinterpret_cast<void*>(describe_pointer)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(find_range)}};
  const auto found = functions.find(name);
  return found == functions.end() ? reinterpret_cast<void*>(unsupported) : found->second;
}

}  // namespace

CudaCalls take_cuda_calls() {
  const std::lock_guard lock(calls_mutex);
  return std::exchange(calls(), {});
}

std::vector<std::string> take_launched_kernels() {
  const std::lock_guard lock(calls_mutex);
  return std::exchange(launched_kernels(), {});
}

std::vector<std::string> all_kernels() {
  std::vector<std::string> names;
  for (const auto& [address, name] : kernel_names()) names.push_back(name);
  return names;
}

void reset_context() { ++context_id; }

void hide_functions(bool hidden) { functions_hidden = hidden; }

void stay_behind(int num_launches_behind) { num_behind = num_launches_behind; }

}  // namespace ferry::test

using ferry::test::counted;

// The names are CUDA's.
// NOLINTBEGIN(readability-identifier-naming, bugprone-reserved-identifier)
extern "C" {

// Functions that every call may use.
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t /*stream*/) {
  reinterpret_cast<ferry::test::Event*>(event)->recorded_at = ferry::test::num_launches;
  return counted("cudaEventRecord");
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 /*grid*/, dim3 /*block*/, void** /*arguments*/,
                             std::size_t /*shared*/, cudaStream_t /*stream*/) {
  return ferry::test::launch(kernel);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* /*config*/, const void* kernel, void** /*arguments*/) {
  return ferry::test::launch(kernel);
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<std::uintptr_t>(stream);
  return counted("cudaStreamGetId");
}
cudaError_t cudaStreamGetDevice(cudaStream_t /*stream*/, int* device) {
  *device = 0;
  return counted("cudaStreamGetDevice");
}
cudaError_t cudaStreamIsCapturing(cudaStream_t /*stream*/, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return counted("cudaStreamIsCapturing");
}
cudaError_t cudaStreamWaitEvent(cudaStream_t /*stream*/, cudaEvent_t /*event*/, unsigned /*flags*/) {
  return counted("cudaStreamWaitEvent");
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t /*stream*/) {
  std::memcpy(to, from, bytes);
  return counted("cudaMemcpyAsync");
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t /*stream*/) {
  std::memset(data, value, bytes);
  return counted("cudaMemsetAsync");
}
cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return counted("cudaStreamSynchronize"); }
cudaError_t cudaEventSynchronize(cudaEvent_t /*event*/) { return counted("cudaEventSynchronize"); }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return counted("cudaGetDevice");
}

// Functions used to create groups.
cudaError_t cudaDeviceCanAccessPeer(int* can, int /*device*/, int /*peer*/) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = 1;
  if (attribute == cudaDevAttrMultiProcessorCount) *value = ferry::test::kNumSms;
  if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = ferry::test::kSharedBytes;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* address, int size, int /*device*/) {
  std::strncpy(address, "0000:01:00.0", static_cast<std::size_t>(size));
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = reinterpret_cast<cudaEvent_t>(new ferry::test::Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<ferry::test::Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, std::size_t bytes) { return ferry::test::take_memory(data, bytes); }
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*kernel*/) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
/// Returns the kernel's address, which suffices because no kernel is launched.
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel) {
  counted("cudaGetFuncBySymbol");
  if (ferry::test::functions_hidden) return cudaErrorNotSupported;
  *function = static_cast<cudaFunction_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* /*kernel*/, cudaFuncAttribute /*attribute*/, int /*value*/) {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = {};
  properties->major = 9;
  properties->multiProcessorCount = ferry::test::kNumSms;
  properties->sharedMemPerBlockOptin = ferry::test::kSharedBytes;
  properties->totalGlobalMem = ferry::test::kMemoryBytes;
  properties->canMapHostMemory = properties->unifiedAddressing = 1;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t /*error*/) { return "error of a test"; }
const char* cudaGetErrorString(cudaError_t /*error*/) { return "error of a test"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned /*flags*/) {
  return ferry::test::take_memory(data, bytes);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned /*flags*/) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* /*data*/, std::size_t /*bytes*/, unsigned /*flags*/) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void* /*data*/) { return cudaSuccess; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* /*data*/) {
  *handle = {};
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** /*data*/, cudaIpcMemHandle_t /*handle*/, unsigned /*flags*/) {
  return cudaErrorNotSupported;
}
cudaError_t cudaIpcCloseMemHandle(void* /*data*/) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* bytes) {
  *free_bytes = *bytes = ferry::test::kMemoryBytes;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = static_cast<cudaStream_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::free(stream);
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* /*mode*/) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/, cudaDriverEntryPointQueryResult* found) {
  *function = ferry::test::driver_function(name);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Functions with which compiled kernels register themselves.
void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}
void __cudaUnregisterFatBinary(void** /*handle*/) {}
void __cudaRegisterFunction(void** /*handle*/, const char* host, char* /*device*/, const char* name, int /*threads*/,
                            uint3* /*tid*/, uint3* /*bid*/, dim3* /*block*/, dim3* /*grid*/, int* /*size*/) {
  ferry::test::kernel_names()[host] = ferry::test::demangled(name);
}
/// As cudaGetFuncBySymbol.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 /*grid*/, dim3 /*block*/, void** /*arguments*/,
                               std::size_t /*shared*/, cudaStream_t /*stream*/) {
  return ferry::test::launch(kernel);
}
cudaError_t __cudaPopCallConfiguration(dim3* /*grid*/, dim3* /*block*/, std::size_t* /*shared*/, void* /*stream*/) {
  return cudaSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming, bugprone-reserved-identifier)
