#include "cuda/driver/cuda_call.hpp"

#include <fmt/format.h>

#include <string>

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

Status runtime_status(cudaError_t error, std::string_view operation, std::string_view hint) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  std::string message =
      fmt::format("{} failed: {} ({})", operation, cudaGetErrorName(error), cudaGetErrorString(error));
  if (!hint.empty()) message.append("; ").append(hint);
  return Status(code_of(error), std::move(message));
}

RelaxedCapture::RelaxedCapture() {
  // Exchanges the modes: afterwards `former_` holds the previous one.
  if (cudaThreadExchangeStreamCaptureMode(&former_) != cudaSuccess) former_ = cudaStreamCaptureModeGlobal;
}

RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&former_); }

}  // namespace ferry::cuda
