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
#include "cuda/internode/side_stream.hpp"
#include "cuda/internode/steps.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/memory/pinned_memory.hpp"

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
  CallScratch(node::Arena& arena, PinnedBlock block, SideStream stream)
      : tables(arena), window(std::move(block)), side(std::move(stream)) {}

  HostTables tables;
  PinnedBlock window;
  SideStream side;
};

NodePlace place_of(const Parts& parts);
CallIdentity identity_of(const Context& context, const CallRecord& record, const Launch& launch);
/// Counterpart of Context::refuse: all ranks of the group learn of the refusal. `routing`: the Routing that the call is
/// made on. If that Routing turns out to have been refused, no other rank is informed.
Status refuse(Context& context, const CallRecord& record, Stream stream, const Status& status,
              const RoutingState* routing = nullptr);
StepBlocks blocks_of(const Parts& parts, const KernelOptions& kernel);

/// The part of a dispatch after its checks. Its tokens are already routed, or kernels route them in the same call.
struct DispatchRun {
  const DispatchCall& call;
  const RoutedTokens& routed;
  bool exact_rows = false;
  bool captured = false;
  const NodeRouteInput* route = nullptr;
  std::int64_t* wait_times_ns = nullptr;  ///< [R], to which the call's waits are added; null: not measured
};
Status make_dispatch(Context& context, const DispatchRun& run);
/// The same part of a combine.
Status make_combine(Context& context, const CombineCall& call, const RoutedTokens& routed, bool captured,
                    std::int64_t* wait_times_ns);

/// Makes a route whose rows and tokens are bounded, after its checks.
Result<std::shared_ptr<RoutingState>> bounded_route(Context& context, Placements& placements, const RouteCall& call,
                                                    bool captured);
Result<std::shared_ptr<RoutingState>> route(Context& context, Placements& placements, CallScratch& scratch,
                                            const RouteCall& call);
Status dispatch(Context& context, const DispatchCall& call);
Status combine(Context& context, const CombineCall& call);
Status channel_tables(Context& context, const ChannelTablesCall& call);

}  // namespace ferry::cuda::internode

#endif  // FERRY_CUDA_INTERNODE_CALLS_HPP
