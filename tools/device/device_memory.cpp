#include "device/device_memory.hpp"

#include <cstring>
#include <utility>

#include "device/cuda_status.hpp"

namespace ferry::tools {

static_assert(kIpcHandleBytes == sizeof(cudaIpcMemHandle_t));

namespace {

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

bool built_with_cuda() { return true; }

Result<int> count_devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    static_cast<void>(cudaGetLastError());
    return Status(ErrorCode::kUnsupported, "no GPU that CUDA can use; see CUDA_VISIBLE_DEVICES and nvidia-smi");
  }
  if (error == cudaErrorInsufficientDriver) {
    static_cast<void>(cudaGetLastError());
    return Status(ErrorCode::kUnsupported, "no NVIDIA driver, or one too old for this build; install a newer driver");
  }
  if (Status status = cuda_status("cudaGetDeviceCount", error); !status) return status;
  return count;
}

Status select_device(int device) { return cuda_status("cudaSetDevice", cudaSetDevice(device)); }

// Freeing after a failed run may fail too; no one could handle that error.
void FreeDeviceMemory::operator()(std::byte* data) const { static_cast<void>(cudaFree(data)); }
void DestroyDeviceStream::operator()(void* handle) const {
  static_cast<void>(cudaStreamDestroy(static_cast<cudaStream_t>(handle)));
}
void DestroyDeviceEvent::operator()(void* handle) const {
  static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(handle)));
}
void CloseIpcMemory::operator()(std::byte* data) const { static_cast<void>(cudaIpcCloseMemHandle(data)); }

Result<DeviceMemory> allocate_device_memory(std::size_t num_bytes) {
  void* data = nullptr;
  if (Status status = cuda_status("cudaMalloc", cudaMalloc(&data, num_bytes)); !status) return status;
  return DeviceMemory(static_cast<std::byte*>(data));
}

Status copy_device_bytes(void* to, const void* from, std::size_t num_bytes, Stream stream) {
  if (num_bytes == 0) return {};
  Status status =
      cuda_status("cudaMemcpyAsync", cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream_of(stream)));
  if (!status) return status;
  return cuda_status("cudaStreamSynchronize", cudaStreamSynchronize(stream_of(stream)));
}

Status fill_device_bytes(void* to, int value, std::size_t num_bytes, Stream stream) {
  if (num_bytes == 0) return {};
  return cuda_status("cudaMemsetAsync", cudaMemsetAsync(to, value, num_bytes, stream_of(stream)));
}

Result<DeviceStream> DeviceStream::create() {
  cudaStream_t handle = nullptr;
  Status status = cuda_status("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
  if (!status) return status;
  DeviceStream stream;
  stream.handle_.reset(handle);
  return stream;
}

Status DeviceStream::wait() const {
  return cuda_status("cudaStreamSynchronize", cudaStreamSynchronize(stream_of(get())));
}

Result<DeviceEvent> DeviceEvent::create() {
  cudaEvent_t handle = nullptr;
  if (Status status = cuda_status("cudaEventCreate", cudaEventCreate(&handle)); !status) return status;
  DeviceEvent event;
  event.handle_.reset(handle);
  return event;
}

Status DeviceEvent::record(Stream stream) const {
  return cuda_status("cudaEventRecord", cudaEventRecord(static_cast<cudaEvent_t>(handle_.get()), stream_of(stream)));
}

Result<std::int64_t> DeviceEvent::elapsed_ns_since(const DeviceEvent& start) const {
  constexpr double kNsPerMs = 1e6;
  auto* const end_event = static_cast<cudaEvent_t>(handle_.get());
  Status status = cuda_status("cudaEventSynchronize", cudaEventSynchronize(end_event));
  if (!status) return status;
  float milliseconds = 0.0F;
  status = cuda_status("cudaEventElapsedTime",
                       cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(start.handle_.get()), end_event));
  if (!status) return status;
  return static_cast<std::int64_t>(static_cast<double>(milliseconds) * kNsPerMs);
}

Result<IpcHandle> export_device_memory(const DeviceMemory& memory) {
  cudaIpcMemHandle_t native{};
  Status status = cuda_status("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&native, memory.get()));
  if (!status) return status;
  IpcHandle handle{};
  std::memcpy(handle.data(), &native, handle.size());
  return handle;
}

Result<IpcMemory> open_device_memory(const IpcHandle& handle) {
  cudaIpcMemHandle_t native{};
  std::memcpy(&native, handle.data(), handle.size());
  void* data = nullptr;
  Status status =
      cuda_status("cudaIpcOpenMemHandle", cudaIpcOpenMemHandle(&data, native, cudaIpcMemLazyEnablePeerAccess));
  if (!status) return status;
  return IpcMemory(static_cast<std::byte*>(data));
}

Status reach_device(int ordinal) {
  int current = 0;
  if (Status status = cuda_status("cudaGetDevice", cudaGetDevice(&current)); !status) return status;
  if (current == ordinal) return {};
  const cudaError_t error = cudaDeviceEnablePeerAccess(ordinal, 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) return cuda_status("cudaDeviceEnablePeerAccess", error);
  cudaGetLastError();
  return {};
}

}  // namespace ferry::tools
