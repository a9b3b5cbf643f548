#include "cpu/intranode/calls.hpp"
#include "cpu/intranode/route_steps.hpp"

namespace ferry::cpu::intranode {

Status route(const RouteCall& call, const Context& context, CpuRouting& routing) {
  if (!context.sync.broken().ok()) return context.sync.broken();
  const plan::RouteShape shape = route_shape(call, context.topology());
  node::CallDescriptor descriptor;
  descriptor.record = call.record;
  if (call.record.code == ErrorCode::kOk) {
    copy_inputs(call, context.sync.rank(), routing);
    if (Status status = publish_tables(call, shape, routing, context, descriptor); !status.ok()) {
      descriptor.record.set_status(status);
    }
  }
  if (Status status = context.sync.begin(descriptor); !status.ok()) return status;
  PeerTables tables;
  node::Peers& peers = context.peers();
  for (int rank = 0; rank < peers.num_ranks(); ++rank) {
    const Result<RankTables> found = find_tables(shape, peers, rank, peers.descriptor_of(rank));
    if (!found.ok()) return context.sync.fail(found.status().code(), rank, found.status().message());
    tables.add(*found);
  }
  return plan_from_tables(call, shape, tables, to_size(context.sync.rank()), routing.ids, routing);
}

}  // namespace ferry::cpu::intranode
