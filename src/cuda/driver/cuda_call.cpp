#include "cuda/driver/cuda_call.hpp"

#include <fmt/format.h>

#include <string>

#include "cuda/driver/driver.hpp"

namespace ferry::cuda {
namespace {

ErrorCode code_of(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return ErrorCode::kSystem;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      return ErrorCode::kUnsupported;
    default:
      return ErrorCode::kCuda;
  }
}

}  // namespace

Status cuda_status(cudaError_t error, std::string_view operation, std::string_view hint) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  std::string message =
      fmt::format("{} failed: {} ({})", operation, cudaGetErrorName(error), cudaGetErrorString(error));
  if (!hint.empty()) message.append("; ").append(hint);
  return Status(code_of(error), std::move(message));
}

// Not cudaSetDevice: giving back a device that the thread never used would create a context there, which takes hundreds
// of megabytes of that device's memory.
DeviceGuard::DeviceGuard(int device) {
  Result<const Driver*> table = driver();
  Result<CUcontext> context = primary_context(device);
  if (!table.ok() || !context.ok()) {
    status_ = table.ok() ? context.status() : table.status();
    return;
  }
  CUcontext current = nullptr;
  if ((*table)->ctx_get_current(&current) == CUDA_SUCCESS && current == *context) return;
  status_ = driver_status((*table)->ctx_push_current(*context), fmt::format("making GPU {} current", device));
  pushed_ = status_.ok();
}

DeviceGuard::~DeviceGuard() {
  if (!pushed_) return;
  CUcontext popped = nullptr;
  if (Result<const Driver*> table = driver(); table.ok()) (*table)->ctx_pop_current(&popped);
}

RelaxedCapture::RelaxedCapture() {
  // Exchanges: afterwards `former_` holds what was set before.
  if (cudaThreadExchangeStreamCaptureMode(&former_) != cudaSuccess) former_ = cudaStreamCaptureModeGlobal;
}

RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&former_); }

}  // namespace ferry::cuda
