#ifndef FERRY_CUDA_INTERNODE_RUNS_HPP
#define FERRY_CUDA_INTERNODE_RUNS_HPP

/// Dispatch and combine over several nodes once the stream is checked: the steps prepare and launch of
/// cuda/call/group_call.hpp.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/backend.hpp"
#include "core/quantized_dispatch.hpp"
#include "cuda/context/context.hpp"
#include "cuda/internode/steps.hpp"

namespace ferry::cuda::internode {

/// Dispatches tokens that are routed.
class DispatchRun {
 public:
  struct Input {
    const DispatchCall& call;
    const RoutedTokens& routed;
    bool exact_rows = false;
  };
  DispatchRun(Context& context, const Input& input) : context_(context), input_(input) {}

  /// Errors name the operation of the call's record.
  Status prepare(bool captured);
  cudaError_t launch(const Launch& launch);

 private:
  Status take_room(bool captured);
  const DispatchCall& call() const { return steps_ ? steps_->send : input_.call; }

  Context& context_;
  Input input_;
  std::optional<QuantizedDispatch> steps_;
  DispatchTensors tensors_;
  DispatchStaging staging_;
  StepBlocks blocks_;
};

/// Copies of memory that the ranks of the node cannot reach; null where they reach the caller's, or no rank but this
/// one reads it.
struct CombineCopies {
  std::byte* x = nullptr;
  std::byte* weights = nullptr;
  std::size_t size_bytes = 0;

  static bool copies_x(const CombineCall& call, const DeviceArena& arena);
  static CombineCopies at(std::byte* base, const CombineCall& call, const DeviceArena& arena);
  cudaError_t launch(const CombineCall& call, int max_blocks, cudaStream_t stream) const;
};

class CombineRun {
 public:
  struct Input {
    const CombineCall& call;
    const RoutedTokens& routed;
  };
  CombineRun(Context& context, const Input& input) : context_(context), input_(input) {}

  /// Errors name the operation of the call's record.
  Status prepare(bool captured);
  cudaError_t launch(const Launch& launch);

 private:
  Status take_room(bool captured);

  Context& context_;
  Input input_;
  CombineCopies copies_;
  CombineTensors tensors_;
  CombineStaging staging_;
  StepBlocks blocks_;
};

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_RUNS_HPP
