#include "cuda/driver/launch.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/driver.hpp"

namespace ferry::cuda {
namespace {

/// The driver's function of each kernel in each context. The key is the id of the context, which CUDA never reuses: a
/// context that is made after a reset of its device has other functions, and may have the same address. Never
/// destroyed, because programs may make calls while their statics are destroyed.
class Functions {
 public:
  /// Null: the runtime launches the kernel, which is slower.
  CUfunction of(const void* kernel, std::uint64_t context_id) {
    const std::size_t first = hash(kernel, context_id);
    for (std::size_t i = 0; i < kMostProbes; ++i) {
      const Slot& slot = slots_[(first + i) % kNumSlots];
      const void* const found = slot.kernel.load(std::memory_order_acquire);
      if (found == kernel && slot.context_id == context_id) return slot.function;
      if (found == nullptr) break;
    }
    return add(kernel, context_id, first);
  }

 private:
  /// Several times the number of kernels that a process with a context on each of eight GPUs launches.
  static constexpr std::size_t kNumSlots = 4096;
  static constexpr std::size_t kMostProbes = 16;
  /// Written once, before `kernel`, whose store publishes the other fields.
  struct Slot {
    std::atomic<const void*> kernel{nullptr};
    std::uint64_t context_id = 0;
    CUfunction function = nullptr;
  };

  static std::size_t hash(const void* kernel, std::uint64_t context_id) {
    constexpr std::uint64_t kMultiplier = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio: Knuth's multiplicative hashing
    constexpr int kShift = 52;                                 // as many values as there are slots
    return ((reinterpret_cast<std::uintptr_t>(kernel) ^ (context_id << 48)) * kMultiplier) >> kShift;
  }

  CUfunction add(const void* kernel, std::uint64_t context_id, std::size_t first) {
    const RelaxedCapture relaxed;  // the search for a function may load it
    cudaFunction_t function = nullptr;
    if (cudaGetFuncBySymbol(&function, kernel) != cudaSuccess) {
      cudaGetLastError();  // the runtime's launch reports the error
      return nullptr;
    }
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < kMostProbes; ++i) {
      Slot& slot = slots_[(first + i) % kNumSlots];
      const void* const found = slot.kernel.load(std::memory_order_relaxed);
      if (found == kernel && slot.context_id == context_id) break;  // another thread was faster
      if (found != nullptr) continue;
      slot.context_id = context_id;
      slot.function = function;
      slot.kernel.store(kernel, std::memory_order_release);
      break;
    }
    return function;
  }

  std::mutex mutex_;
  std::array<Slot, kNumSlots> slots_;
};

/// Null if the runtime must launch the kernel: no group has loaded the driver yet, or the thread has no context.
CUfunction function_of(const Driver* driver, const void* kernel) {
  static Functions& functions = *new Functions;
  unsigned long long context_id = 0;
  if (driver == nullptr || driver->ctx_get_id(nullptr, &context_id) != CUDA_SUCCESS) return nullptr;
  return functions.of(kernel, context_id);
}

cudaError_t launch_by_runtime(const void* kernel, const LaunchShape& shape, void** arguments, cudaStream_t stream) {
  if (!shape.overlaps) {
    return cudaLaunchKernel(kernel, dim3(shape.num_blocks), dim3(shape.num_threads), arguments, shape.shared_bytes,
                            stream);
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.num_blocks);
  config.blockDim = dim3(shape.num_threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace

cudaError_t launch_function(const void* kernel, const LaunchShape& shape, void** arguments, cudaStream_t stream) {
  note_launch(shape);
  const Driver* const driver = loaded_driver();
  const CUfunction function = function_of(driver, kernel);
  if (function == nullptr) return launch_by_runtime(kernel, shape, arguments, stream);
  CUlaunchAttribute overlap;
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  const CUlaunchConfig config{.gridDimX = shape.num_blocks,
                              .gridDimY = 1,
                              .gridDimZ = 1,
                              .blockDimX = shape.num_threads,
                              .blockDimY = 1,
                              .blockDimZ = 1,
                              .sharedMemBytes = static_cast<unsigned>(shape.shared_bytes),
                              .hStream = stream,
                              .attrs = &overlap,
                              .numAttrs = shape.overlaps ? 1U : 0U};
  return as_runtime_error(driver->launch_kernel_ex(&config, function, arguments, nullptr));
}

}  // namespace ferry::cuda
