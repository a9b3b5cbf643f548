#ifndef FERRY_CUDA_INTERNODE_CALLS_HPP
#define FERRY_CUDA_INTERNODE_CALLS_HPP

/// Calls of a group of GPU ranks on several nodes. Dispatch and combine run in kernels. Hosts make an exact route,
/// whose counts they wait for in any case, after kernels have found that all ranks make it.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>

#include "call/route_nodes.hpp"
#include "core/backend.hpp"
#include "cuda/context/context.hpp"
#include "cuda/internode/node_route_steps.hpp"
#include "cuda/internode/steps.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda::internode {

/// Memory for tables in the host arena: two blocks of each kind, used in turn (see call::RouteMemory).
class HostTables final : public call::RouteMemory {
 public:
  explicit HostTables(node::Arena& arena) : arena_(arena) {}
  Result<std::byte*> counts(std::size_t bytes) override;
  Result<std::byte*> forward_tables(std::size_t bytes) override;

 private:
  struct Block {
    std::byte* data = nullptr;
    std::size_t size_bytes = 0;
  };
  Result<std::byte*> ensure(Block& block, std::size_t bytes);

  node::Arena& arena_;
  std::array<Block, 2> counts_;
  std::array<Block, 2> forward_tables_;
  std::size_t turn_ = 0;
};

/// Resources that the calls of a group reuse.
class CallScratch {
 public:
  /// Size of the pinned block through which tables pass between host and GPU.
  static constexpr std::size_t kWindowBytes = std::size_t{1} << 20;
  /// Blocks of the kernels that copy to and from the pinned block.
  static constexpr int kWindowBlocks = 4;

  static Result<std::unique_ptr<CallScratch>> create(const Parts& parts);
  CallScratch(node::Arena& arena, PinnedBlock block) : tables(arena), window(std::move(block)) {}

  HostTables tables;
  PinnedBlock window;
};

NodePlace place_of(const Parts& parts);
CallIdentity identity_of(const Context& context, const CallRecord& record, const Launch& launch);
/// Launches the kernel by which all ranks of the group learn that this one refuses the call. `routing`: the Routing of
/// dispatch or combine; if its route was refused, no rank makes the call, and the kernel informs none.
cudaError_t launch_refusal_of(Context& context, const Launch& launch, const CallRecord& refused,
                              const RoutingState* routing = nullptr);
/// Blocks of a route's kernels. `num_sms`: RouteOptions::num_sms.
StepBlocks blocks_of_route(const Parts& parts, int num_sms);
/// Blocks of the kernels of a dispatch or combine. The group's tuning file decides for such a `call` where its `kernel`
/// leaves it open.
StepBlocks blocks_of(const Parts& parts, const KernelOptions& kernel, const TunedCall& call);

/// Makes a route whose rows and tokens are bounded.
Result<std::shared_ptr<RoutingState>> bounded_route(Context& context, Placements& placements, const RouteCall& call);
Result<std::shared_ptr<RoutingState>> route(Context& context, Placements& placements, CallScratch& scratch,
                                            const RouteCall& call);
Status dispatch(Context& context, const DispatchCall& call);
Status combine(Context& context, const CombineCall& call);
Status channel_tables(Context& context, const ChannelTablesCall& call);

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_CALLS_HPP
