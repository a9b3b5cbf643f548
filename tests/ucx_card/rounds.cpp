#include "ucx_card/rounds.hpp"

namespace ferry::test {

PreparedCase exchange_between(int num_hosts) {
  ExchangeCase spec;
  spec.name = "between hosts";
  spec.world = {.num_ranks = num_hosts, .ranks_per_node = 1, .num_topk = 2, .num_experts = 6, .max_tokens = 64};
  spec.dispatches = {{.hidden = 512}};
  spec.combines = {{.hidden = 512}};
  return prepare(spec);
}

Status exchange_rounds(RankContext& context, Group& group, const PreparedCase& prepared, int num_rounds) {
  const Stream stream = stream_of(group);
  Status status;
  for (int round = 0; round < num_rounds && status.ok(); ++round) {
    const RouteArguments arguments(context, group, prepared);
    const DispatchTensors dispatch(context, group, prepared, 0);
    const CombineTensors combine(context, group, prepared, 0);
    const Result<Routing> routing = group.route(arguments.input(), arguments.options(), stream);
    status = routing.status();
    if (status.ok()) status = group.dispatch(*routing, dispatch.in, dispatch.out, stream, dispatch.options);
    if (status.ok()) status = group.wait(stream);
    if (status.ok()) dispatch.expect_received(context, "a dispatch that succeeded: ");
    if (status.ok()) status = group.combine(*routing, combine.in, combine.out, stream, combine.options);
    if (status.ok()) status = group.wait(stream);
    if (status.ok()) combine.expect_received(context, "a combine that succeeded: ");
  }
  return status;
}

}  // namespace ferry::test
