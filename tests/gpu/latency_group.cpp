#include "gpu/latency_group.hpp"

#include <fmt/format.h>

#include <utility>

namespace ferry::test {

std::vector<PreparedCase> latency_cases_of_equal_shapes(int num_ranks, int num_cases, bool idle_tail,
                                                        int ranks_per_node, std::int64_t hidden) {
  std::vector<PreparedCase> cases;
  for (int i = 0; i < num_cases; ++i) {
    ExchangeCase one;
    one.name = fmt::format("case {}", i);
    one.world = {.num_ranks = num_ranks, .num_topk = 4, .num_experts = 10, .max_tokens = 20};
    one.world.ranks_per_node = ranks_per_node;
    one.world.layout = Layout::kSlab;
    one.world.fixed_rows = 20 * num_ranks;
    one.world.pattern = static_cast<RoutingPattern>(i * 3 % 5);
    one.world.idle_tail = idle_tail;
    if (num_ranks == 2) one.world.num_replicas = 6;  // in the same memory too
    one.table_on_device = true;
    one.world.seed = static_cast<std::uint64_t>(700 + i);
    one.dispatches = {{.hidden = hidden, .quantize = Quantization::kFp8, .zero_padding = true}};
    one.combines = {{.hidden = hidden, .weighted = true}};
    cases.push_back(prepare(one));
  }
  return cases;
}

GroupOptions latency_group_options(const std::vector<PreparedCase>& cases, std::int64_t timeout_ns) {
  GroupOptions options = gpu_group_options();
  options.latency_bytes = latency_bytes_of("cuda", cases);
  if (timeout_ns > 0) options.timeout_ns = timeout_ns;
  return options;
}

void run_latency_group(const LatencyGroup& run, const std::vector<PreparedCase>& cases,
                       const std::function<void(RankContext&, Group&)>& body) {
  run_gpu_ranks({.kind = run.kind, .num_ranks = run.num_ranks}, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), latency_group_options(cases, run.timeout_ns));
    if (context.expect_ok(group.status(), "Group::create")) body(context, **group);
  });
}

LatencyPair::LatencyPair(RankContext& context, Group& group, const PreparedCase& prepared)
    : prepared_(&prepared), dispatch_(context, group, prepared, 0), combine_(context, group, prepared, 0) {}

Status LatencyPair::start(Group& group, Stream stream, bool split) {
  dispatch_.options.split = combine_.options.split = split;
  Result<Routing> routing = group.latency_dispatch(dispatch_.in, dispatch_.out, dispatch_.options, stream);
  if (!routing.ok()) return routing.status();
  routing_ = std::move(*routing);
  Status status = split ? group.latency_receive(routing_, stream) : Status();
  if (status.ok()) status = group.latency_combine(routing_, combine_.in, combine_.out, stream, combine_.options);
  if (status.ok() && split) status = group.latency_receive(routing_, stream);
  return status;
}

Status LatencyPair::send(Group& group, Stream stream) {
  dispatch_.options.split = combine_.options.split = true;
  Result<Routing> routing = group.latency_dispatch(dispatch_.in, dispatch_.out, dispatch_.options, stream);
  if (routing.ok()) routing_ = std::move(*routing);
  return routing.status();
}

Status LatencyPair::finish(Group& group, Stream stream) {
  Status status = group.latency_receive(routing_, stream);
  if (status.ok()) status = group.latency_combine(routing_, combine_.in, combine_.out, stream, combine_.options);
  if (status.ok()) status = group.latency_receive(routing_, stream);
  return status;
}

void LatencyPair::expect_received(RankContext& context) const {
  dispatch_.expect_received(context, prepared_->spec.name + ": dispatch: ");
  combine_.expect_received(context, prepared_->spec.name + ": combine: ");
}

void LatencyPair::refill(const RankContext& context, const PreparedCase& prepared) {
  prepared_ = &prepared;
  dispatch_.refill(context, prepared, 0);
  combine_.refill(context, prepared, 0);
}

}  // namespace ferry::test
