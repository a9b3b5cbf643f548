#ifndef FERRY_DISPATCH_LAYOUT_HPP
#define FERRY_DISPATCH_LAYOUT_HPP

/// Counts of one rank's tokens by rank, node and expert, from its expert ids alone, without a group and without other
/// ranks. `Group::route` needs none of them; they are for callers that want the numbers beforehand, and for interfaces
/// whose dispatch takes them.

#include <cstdint>
#include <string_view>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

struct DispatchLayoutOptions {
  std::int64_t num_experts = 0;  ///< E
  int num_ranks = 1;             ///< R
  /// Ranks of a node; the last node may have fewer. 0: all ranks are one node.
  int ranks_per_node = 0;
  /// [E] i32, contiguous, in the same memory as the ids: the rank that owns each expert, from 0 to R - 1. Absent: the
  /// default placement, as for route. An expert whose entry is out of range counts for no rank.
  ConstTensorView expert_to_rank{};
  /// "cpu": host memory, done on return. "cuda": memory of `device`, in stream order.
  std::string_view backend = "cpu";
  int device = -1;  ///< backend "cuda": ordinal of the GPU; -1: the calling thread's current one
};

/// Outputs; contiguous, any may be absent.
struct DispatchLayout {
  TensorView num_tokens_per_rank{};    ///< [R] i32: tokens with an expert on the rank
  TensorView num_tokens_per_node{};    ///< [R / ranks_per_node, rounded up] i32: tokens with an expert in the node
  TensorView num_tokens_per_expert{};  ///< [E] i32: entries that name the expert; duplicates in a token count
  TensorView is_token_in_rank{};       ///< [T, R] u8: 1 where the token has an expert on the rank, else 0
};

/// Count. Local: no other rank takes part.
/// @shape  topk_idx [T, K] i32|i64, contiguous, K from 1 to 32. Ids outside [0, E) count for nothing.
/// @sync   "cpu": done on return. "cuda": puts one kernel on `stream`, never blocks, may be captured in a graph
/// @errors kInvalidArgument: shape, dtype, pointer (host memory with "cuda", say), option (nothing is written);
///         kUnsupported: this build has no such backend, or more ranks than it counts (CUDA: 128); kCuda: the launch
///         failed
FERRY_API Status dispatch_layout(const ConstTensorView& topk_idx, const DispatchLayoutOptions& options,
                                 const DispatchLayout& out, Stream stream = {});

}  // namespace ferry

#endif  // FERRY_DISPATCH_LAYOUT_HPP
