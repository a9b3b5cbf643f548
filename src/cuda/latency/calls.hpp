#ifndef FERRY_CUDA_LATENCY_CALLS_HPP
#define FERRY_CUDA_LATENCY_CALLS_HPP

/// Latency mode on GPUs, inside a node and between nodes. core/backend.hpp states the contract of each call.

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/backend.hpp"
#include "cuda/context/context.hpp"
#include "cuda/far/link.hpp"
#include "cuda/latency/mask.hpp"
#include "cuda/latency/routing.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda {

/// Blocks of a call's kernels.
struct BlockLimits {
  int most = 2;          ///< at least 2
  int most_waiting = 2;  ///< most of these that wait for other ranks at the same time, at least 2
};

/// Memory that rows of a combine leave from, to other nodes.
struct Returns {
  PinnedBlock block;
  std::int64_t num_rows = 0;
  std::int64_t stride = 0;
};

class LatencyMode {
 public:
  /// All must outlive it. `far`: in groups of several nodes that have memory for latency mode, else null.
  LatencyMode(Context& context, Placements& placements, FarLink* far);

  Result<std::shared_ptr<RoutingState>> dispatch(const LatencyDispatchCall& call);
  Status combine(const LatencyCombineCall& call);
  Status receive(const LatencyReceiveCall& call, bool& made);
  Status update_mask(int rank, bool masked, Stream stream);
  Status query_mask(std::int32_t* out, Stream stream);
  /// Masks all ranks, so that none waits for this one. Returns ranks that are silent: those that it masked before and
  /// that do not mask it; in groups that do not mask, or are broken, GroupState::silent_ranks(). Waits for the GPU.
  Result<std::vector<int>> suspend();
  /// The group was renewed: nothing that was sent before can be received, in graphs neither.
  Status forget_calls();

 private:
  Result<std::shared_ptr<RoutingState>> make_dispatch(const LatencyDispatchCall& call);
  Status make_combine(const LatencyCombineCall& call);
  Status make_receive(const LatencyReceiveCall& call, bool& made);

  Result<std::vector<int>> masked_ranks(cudaStream_t stream) const;
  /// Parameters of a kernel that only reads or changes masks.
  Result<LatencyParams> mask_call(std::string_view operation) const;

  bool masks() const { return mask_.present(); }
  bool over_nodes() const { return far_ != nullptr; }
  /// Calls are two kernels, one for each half, whether they are split or not.
  bool in_halves() const { return masks() || over_nodes(); }
  const RankParams& ranks() const { return context_.parts().latency_ranks; }
  bool has_memory() const { return layout_.set_bytes > 0; }
  /// kCapacity unless the group has memory for this.
  Status check_room(std::string_view operation, const SetNeed& need) const;
  /// The kernel by which the peers learn that this rank refuses a call.
  cudaError_t launch_refusal(LatencyKind kind, const Launch& launch) const;
  Status check_dispatch(const LatencyDispatchCall& call) const;
  /// Makes the Routing of a call, with memory for its tables.
  Result<std::shared_ptr<LatencyRouting>> begin_routing(const LatencyDispatchCall& call, bool captured);
  /// The group's tuning file decides for such a call where `options` leave it open.
  BlockLimits block_limits(const KernelOptions& options, const TunedCall& call) const;
  LatencyParams params_of(const LatencyRouting& routing) const;

  Context& context_;
  Placements& placements_;
  /// Memory that the rows of a combine of this Routing leave from to other nodes. The dispatch takes it, for rows as
  /// long as its own, or bf16 rows where its own are quantised; a combine takes more if its rows are longer.
  Result<Returns> returns_of(std::string_view operation, const LatencyRouting& routing, const CombineRows& rows);
  cudaError_t launch_send(const LatencyDispatchParams& params, cudaStream_t stream);
  /// `returns`: see returns_of.
  cudaError_t launch_send(const CombineSendParams& params, const Returns& returns, cudaStream_t stream);
  cudaError_t launch_receive(const DispatchReceiveParams& params, cudaStream_t stream) const;
  cudaError_t launch_receive(const CombineReceiveParams& params, cudaStream_t stream) const;

  FarLink* far_;
  LatencyLayout layout_;
  MaskParams mask_;                                             // present in groups that mask lost ranks
  std::vector<std::shared_ptr<const RoutingState>> in_flight_;  // Routings of calls that are sent and not received
  std::vector<std::weak_ptr<LatencyRouting>> captured_;         // Routings of captured calls
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_CALLS_HPP
