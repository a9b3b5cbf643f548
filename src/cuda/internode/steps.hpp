#ifndef FERRY_CUDA_INTERNODE_STEPS_HPP
#define FERRY_CUDA_INTERNODE_STEPS_HPP

/// Kernels of a dispatch and a combine over several nodes in order, with the data that each takes from the others.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/internode/dispatch_params.hpp"
#include "cuda/internode/exchange_params.hpp"
#include "cuda/internode/node_tables.hpp"

namespace ferry::cuda {

/// Position of this rank in the group. `ranks` numbers ranks in the node.
struct NodePlace {
  RankParams ranks;
  RailParams rails;
  int group_rank = 0;
  int ranks_per_node = 1;
};

/// Data that identifies a call to the other ranks.
struct CallIdentity {
  std::uint64_t agreement = 0;
  std::int64_t record_number = 0;
  CallRecord record;
  FaultReport* fault = nullptr;
  FoundRecord* found = nullptr;
};

/// Most multiprocessors of a call over nodes if the caller sets no number, for all concurrent kernels together. Kernels
/// that serve rings hold multiprocessors for as long as the network takes and do not run faster with more. Kernels that
/// wait for no other rank would end sooner with the whole GPU, but the network takes most of a call's time, and a
/// program that computes during the call relies on having the rest of the GPU.
constexpr int kMostCallSms = 24;

/// Multiprocessors of a call over nodes, of the `device_sms` that a rank has of its GPU. `asked`:
/// KernelOptions::num_sms.
constexpr int call_sms(int asked, int device_sms) {
  const int most = asked > 0 ? asked : kMostCallSms;
  return most < device_sms ? most : device_sms;
}

/// Blocks of a call's kernels. The blocks of an exchange run at the same time: at least two for each rail peer and one
/// more.
struct StepBlocks {
  int per_ring = 1;   ///< blocks of an exchange per ring
  int num_own = 1;    ///< blocks of an exchange for items that stay in the node
  int num_other = 1;  ///< most blocks of every other kernel
  int num_sums = 1;   ///< blocks of an exchange that make the sums of a combine
  int num_all = 1;    ///< blocks of kernels that wait for no other rank
  /// KernelOptions::chunk_tokens: most items of a chunk with rows that this rank sends; 0: as the exchange's bytes say.
  int chunk_items = 0;

  struct Limits {
    int num_nodes = 2;
    int num_sms = 1;
    int num_copy_sms = 0;  ///< of these, the ones for items that stay in the node; 0: the default
    /// More blocks at each end of a ring: for chunks in GPU memory, where the other blocks have little to do.
    bool wide_rings = false;
    /// Blocks for items that stay in the node also take rows from the node's ranks, so that more of them are of use.
    bool takes_rows = false;
  };
  /// Blocks within the limits, if they suffice for an exchange.
  static StepBlocks of(const Limits& limits);
};

/// First exchange of a call, without items; agreement 0 refuses the call.
ExchangeParams agreement_only(const NodePlace& place, const CallIdentity& call);

/// The Routing in the form that kernels use.
struct RoutedTokens {
  NodeTables tables;
  std::int64_t num_tokens = 0;
  int num_topk = 0;
  std::int64_t num_items_back = 0;  ///< items that combine returns to this rank
  std::int64_t num_items_in = 0;
  std::int64_t num_used_rows = 0;
  bool by_token = true;  ///< kTokens
  int num_experts = 0;
  const std::int32_t* owner = nullptr;         ///< [E]
  const std::int32_t* local_expert = nullptr;  ///< [E]
  bool by_kernels = false;                     ///< the counts are upper bounds, and kernels decide whether the Routing
                                               ///< is valid
};

struct DispatchTensors {
  const std::byte* x = nullptr;
  std::int64_t x_stride = 0;
  std::int64_t row_bytes = 0;
  ScaleTable scales;
  const float* weights = nullptr;  ///< [T, K]
  plan::TokenRecord format;
  DispatchOutputs out;
};

/// Memory that a dispatch uses, in the arena.
struct DispatchStaging {
  std::byte* rows = nullptr;
  std::byte* records = nullptr;
  std::size_t size_bytes = 0;

  static DispatchStaging at(std::byte* base, const RoutedTokens& routed, const DispatchTensors& tensors);
};

struct DispatchSteps {
  ExchangeParams exchange;
};
DispatchSteps dispatch_steps(const NodePlace& place, const CallIdentity& call, const RoutedTokens& routed,
                             const DispatchTensors& tensors, const DispatchStaging& staging, const StepBlocks& blocks);
inline cudaError_t launch(const DispatchSteps& steps, cudaStream_t stream) {
  const cudaError_t error = launch_rail_exchange(steps.exchange, stream);
  if (error != cudaSuccess || steps.exchange.takes_rows() || steps.exchange.lands) return error;
  return launch_pull(steps.exchange.pull, stream);
}

/// `x` and `weights` are in the arena, unless the combine makes no sums of its node.
struct CombineTensors {
  const std::byte* x = nullptr;
  std::int64_t x_stride = 0;
  std::int64_t row_bytes = 0;
  bool float32 = false;
  bool weighted = false;
  const float* topk_weights = nullptr;  ///< [T, K]
  bool returns_weights = false;
  const float* weights = nullptr;  ///< weights of this rank's rows
  BiasRows bias[2];
  std::byte* out_x = nullptr;
  std::int64_t out_stride = 0;
  float* out_weights = nullptr;
};

/// Memory that a combine uses.
struct CombineStaging {
  float* topk_weights = nullptr;
  std::byte* sums = nullptr;
  float* sum_weights = nullptr;
  std::byte* returned = nullptr;
  float* returned_weights = nullptr;
  std::size_t size_bytes = 0;

  static CombineStaging at(std::byte* base, const NodePlace& place, const RoutedTokens& routed,
                           const CombineTensors& tensors);
};

struct CombineSteps {
  /// Only if the combine is weighted; otherwise `give_back` is the whole call.
  std::optional<ExchangeParams> begin;
  ExchangeParams give_back;
};
/// Whether a combine makes sums of its node; otherwise the rows are these sums. A rank alone in its node has one row of
/// each token of kTokens.
bool sums_nodes(const NodePlace& place, const RoutedTokens& routed, const CombineTensors& tensors);
CombineSteps combine_steps(const NodePlace& place, const CallIdentity& call, const RoutedTokens& routed,
                           const CombineTensors& tensors, const CombineStaging& staging, const StepBlocks& blocks);
cudaError_t launch(const CombineSteps& steps, cudaStream_t stream);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_STEPS_HPP
