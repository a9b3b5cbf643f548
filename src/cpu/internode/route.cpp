#include <utility>

#include "call/route_nodes.hpp"
#include "cpu/context/routing.hpp"
#include "cpu/internode/calls.hpp"

namespace ferry::cpu::internode {
namespace {

class StagingTables final : public call::RouteMemory {
 public:
  explicit StagingTables(Staging& staging) : staging_(staging) {}
  Result<std::byte*> counts(std::size_t bytes) override { return staging_.route_tables(bytes); }
  Result<std::byte*> forward_tables(std::size_t bytes) override { return staging_.forward_tables(bytes); }

 private:
  Staging& staging_;
};

void adopt(plan::NodeRoute route, CpuRouting& routing) {
  routing.tokens = std::move(route.tokens);
  routing.num_rows_to_rank = routing.tokens.num_rows_to_rank;
  routing.num_rows_on_rank = std::move(route.num_rows_on_rank);
  routing.num_tokens_of_rank = std::move(route.num_tokens_of_rank);
  routing.num_rows_from_rank = std::move(route.num_rows_from_rank);
  routing.rank_counts = std::move(route.rank_counts);
  routing.num_used_rows = route.num_used_rows;
  routing.source_table = std::move(route.source_table);
  routing.outgoing = std::move(route.outgoing);
  routing.incoming = std::move(route.incoming);
  routing.num_items_from_rank = std::move(route.num_items_from_rank);
  routing.item_of_row = std::move(route.item_of_row);
}

}  // namespace

Status route(const RouteCall& call, const Context& context, CpuRouting& routing) {
  if (!context.sync.broken().ok()) return context.sync.broken();
  call::NodesRouteCall nodes_call{call.record, route_shape(call, context.topology()), {}, call.options.max_recv_rows};
  if (call.record.code == ErrorCode::kOk) {
    copy_inputs(call, context.topology().rank, routing);
    nodes_call.ids = routing.ids;
  }
  StagingTables memory(context.staging);
  plan::NodeRoute route;
  route.tokens = std::move(routing.tokens);
  route.source_table = std::move(routing.source_table);
  if (Status status = call::route_nodes(context.sync, nodes_call, memory, route); !status.ok()) return status;
  const plan::ExpertGroups groups = std::move(route.groups);
  const std::vector<std::int32_t> own_counts = std::move(route.own_expert_counts);
  adopt(std::move(route), routing);
  finish(call, nodes_call.shape, groups, to_size(context.topology().rank), own_counts.data(), routing);
  return {};
}

}  // namespace ferry::cpu::internode
