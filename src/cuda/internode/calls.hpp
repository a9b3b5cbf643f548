#ifndef FERRY_CUDA_INTERNODE_CALLS_HPP
#define FERRY_CUDA_INTERNODE_CALLS_HPP

/// The calls of a group of GPU ranks on several nodes. Dispatch and combine run in kernels. An exact route is made by
/// the hosts, which wait for its counts in any case, once kernels have found that all ranks make it.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>

#include "call/route_nodes.hpp"
#include "core/backend.hpp"
#include "cuda/context/context.hpp"
#include "cuda/internode/node_route_steps.hpp"
#include "cuda/internode/side_stream.hpp"
#include "cuda/internode/steps.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda::internode {

/// In the host arena: two blocks of each kind, in turn (see call::RouteMemory).
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

/// What the calls of a group use again and again.
class CallScratch {
 public:
  /// Of the pinned block through which tables pass between host and GPU.
  static constexpr std::size_t kWindowBytes = std::size_t{1} << 20;
  /// Of the kernels that copy to and from it.
  static constexpr int kWindowBlocks = 4;

  static Result<std::unique_ptr<CallScratch>> create(const Parts& parts);
  CallScratch(node::Arena& arena, PinnedBlock block, SideStream stream)
      : tables(arena), window(std::move(block)), side(std::move(stream)) {}

  HostTables tables;
  PinnedBlock window;
  SideStream side;
};

NodePlace place_of(const Parts& parts);
CallIdentity identity_of(const Context& context, const CallRecord& record, const Launch& launch);
/// As Context::refuse: all ranks of the group learn of it. `routing`: that the call is made on; of one that turns out
/// to have been refused none does.
Status refuse(Context& context, const CallRecord& record, Stream stream, const Status& status,
              const RoutingState* routing = nullptr);
StepBlocks blocks_of(const Parts& parts, const KernelOptions& kernel);

/// The part of a dispatch that follows its checks: of tokens that are routed, or that kernels route in the same call.
struct DispatchRun {
  const DispatchCall& call;
  const RoutedTokens& routed;
  bool exact_rows = false;
  bool captured = false;
  const NodeRouteInput* route = nullptr;
  std::int64_t* wait_times_ns = nullptr;  ///< [R], what the call waits for is added; null: nobody asks
};
Status make_dispatch(Context& context, const DispatchRun& run);
/// The same of a combine.
Status make_combine(Context& context, const CombineCall& call, const RoutedTokens& routed, bool captured,
                    std::int64_t* wait_times_ns);

/// A route whose rows and tokens are bounded, once it is checked.
Result<std::shared_ptr<RoutingState>> bounded_route(Context& context, Placements& placements, const RouteCall& call,
                                                    bool captured);
Result<std::shared_ptr<RoutingState>> route(Context& context, Placements& placements, CallScratch& scratch,
                                            const RouteCall& call);
Status dispatch(Context& context, const DispatchCall& call);
Status combine(Context& context, const CombineCall& call);
Status channel_tables(Context& context, const ChannelTablesCall& call);

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_CALLS_HPP
