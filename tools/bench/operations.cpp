#include "bench/operations.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "bench/wrong_result.hpp"

namespace ferry::tools {

Operations::Operations(const BenchPlan& plan, RankContext& context)
    : plan_(plan),
      context_(context),
      pattern_(plan.seed, plan.combine_row_bytes()),
      table_(plan.routing_of(context.rank())),
      rows_per_token_(ferry::tools::rows_per_token(table_, plan.layout, plan.num_ranks)),
      placement_(plan.placement()) {}

Status Operations::set_up() {
  auto device = RankDevice::open(plan_.backend, context_.rank());
  if (!device) return device.status();
  device_ = std::move(*device);
  GroupOptions options;
  options.backend = plan_.backend;
  options.timeout_ns = plan_.timeout_ns;
  options.arena_bytes = plan_.arena_bytes;
  options.device = device_.ordinal();
  options.ranks_per_node = plan_.ranks_per_node();
  options.transport = plan_.transport;
  options.net_devices = plan_.net_devices;
  options.ring_memory = plan_.ring_memory;
  options.verify = plan_.verify;
  options.tuning_file = plan_.tuning_file;
  if (plan_.latency()) {
    auto latency_bytes = latency_bytes_required(latency_shape());
    if (!latency_bytes) return latency_bytes.status();
    options.latency_bytes = *latency_bytes;
    options.mask_lost_ranks = plan_.masks_lost_ranks;
  }
  auto group = Group::create(context_.bootstrap(), options);
  if (!group) return group.status();
  group_ = std::move(*group);
  if (Status status = place_ids(); !status) return status;
  if (Status status = place_counters(); !status) return status;
  // Allocations and copies may have waited for an idle GPU. From here on, ranks that share a GPU wait for each other.
  if (Status status = context_.barrier(); !status) return status;
  if (plan_.layout == Layout::kSlab) {
    if (Status status = find_slab_capacity(); !status) return status;
  }
  wire_.names = wire_names(*group_);
  if (Status status = metered(&wire_.route, 0, &Operations::route); !status) return status;
  if (Status status = wait(); !status) return status;
  if (Status status = check_routing(); !status) return status;
  if (plan_.op == BenchOp::kRoute) return {};
  Status status = buffers_.allocate(plan_, device_, *group_, routing_.num_recv_rows(), rows().num_sent);
  if (!status || !plan_.needs_dispatch_buffers()) return status;
  return fill_inputs();
}

/// Copies ids and weights to the GPU, from which a CUDA group reads them.
Status Operations::place_ids() {
  if (!device_.on_gpu()) return {};
  const std::size_t id_bytes = table_.topk_idx.size() * sizeof(std::int64_t);
  const std::size_t weight_bytes = table_.topk_weights.size() * sizeof(float);
  const auto take = [&](BenchBlock& block, const void* from, std::size_t num_bytes) {
    Status status = block.allocate(device_, *group_, BenchMemory::kPlain, static_cast<std::int64_t>(num_bytes));
    return status ? device_.copy(block.data(), from, num_bytes) : status;
  };
  if (Status status = take(buffers_.ids, table_.topk_idx.data(), id_bytes); !status) return status;
  return take(buffers_.weights, table_.topk_weights.data(), weight_bytes);
}

/// Allocates the counters; those of received tokens for as many experts as a rank may have.
Status Operations::place_counters() {
  if (!plan_.counts_load) return {};
  const std::vector<std::int64_t> zeros(static_cast<std::size_t>(plan_.num_experts + 2 * plan_.num_physical_experts()));
  const std::size_t num_bytes = zeros.size() * sizeof(std::int64_t);
  Status status =
      buffers_.counters.allocate(device_, *group_, BenchMemory::kPlain, static_cast<std::int64_t>(num_bytes));
  return status ? device_.copy(buffers_.counters.data(), zeros.data(), num_bytes) : status;
}

LoadCounters Operations::counters() const {
  if (!plan_.counts_load) return {};
  const std::int64_t num_physical = plan_.num_physical_experts();
  const auto rank = static_cast<std::int64_t>(context_.rank());
  const std::int64_t num_local = (rank + 1) * num_physical / plan_.num_ranks - rank * num_physical / plan_.num_ranks;
  auto* const first = reinterpret_cast<std::int64_t*>(buffers_.counters.data());
  return {.logical = {first, DType::kInt64, {plan_.num_experts}},
          .physical = {first + plan_.num_experts, DType::kInt64, {num_physical}},
          .received = {first + plan_.num_experts + num_physical, DType::kInt64, {num_local}}};
}

Status Operations::fill_inputs() {
  const auto fill = [&](const BenchBlock& block, std::int64_t row_bytes) {
    return write_rows(device_, {block.data(), plan_.num_tokens, row_bytes}, [&](std::int64_t token, std::byte* to) {
      std::memcpy(to, pattern_.row(context_.rank(), token), static_cast<std::size_t>(row_bytes));
    });
  };
  if (Status status = fill(buffers_.x, plan_.input_bytes()); !status) return status;
  return fill(buffers_.scales, plan_.input_scale_bytes());
}

RouteInput Operations::route_input() const {
  const void* ids = device_.on_gpu() ? static_cast<const void*>(buffers_.ids.data()) : table_.topk_idx.data();
  const void* weights = device_.on_gpu() ? static_cast<const void*>(buffers_.weights.data())
                                         : static_cast<const void*>(table_.topk_weights.data());
  RouteInput in;
  in.topk_idx = {ids, DType::kInt64, {plan_.num_tokens, plan_.num_topk}};
  in.topk_weights = {weights, DType::kFloat32, {plan_.num_tokens, plan_.num_topk}};
  return in;
}

RouteOptions Operations::route_options() const {
  RouteOptions options;
  options.num_experts = plan_.num_experts;
  options.layout = plan_.layout;
  options.slab_capacity = slab_capacity_;
  options.placement = placement_;
  options.counters = counters();
  return options;
}

/// Largest number of rows for any expert of any rank: capacity of a slab of exactly the size that the batch needs.
Status Operations::find_slab_capacity() {
  RouteOptions options = route_options();
  options.layout = Layout::kExperts;
  options.counters = {};
  auto routing = group_->route({route_input().topk_idx, {}}, options, device_.stream());
  if (!routing) return routing.status();
  std::int64_t most = 1;
  for (std::int32_t count : routing->num_rows_per_local_expert()) most = std::max<std::int64_t>(most, count);
  auto capacity = context_.largest(most);
  if (!capacity) return capacity.status();
  slab_capacity_ = *capacity;
  return {};
}

Status Operations::route() {
  auto routing = group_->route(route_input(), route_options(), device_.stream());
  if (!routing) return routing.status();
  retire(std::exchange(routing_, std::move(*routing)));
  return {};
}

Status Operations::metered(WireFigures* figures, std::int64_t formula_bytes, Status (Operations::*call)()) {
  const WireMeter meter(*group_);
  Status status = (this->*call)();
  if (status && device_.on_gpu()) status = wait();  // the call may have returned before anything was sent
  *figures = meter.sent();
  figures->formula_bytes = formula_bytes;
  return status;
}

/// Keeps a Routing alive: a GPU may still use it, and its destruction would be timed.
void Operations::retire(Routing routing) {
  if (device_.on_gpu()) retired_.push_back(std::move(routing));
}

Status Operations::wait() {
  Status status = group_->wait(device_.stream());
  retired_.clear();
  return status;
}

Status Operations::dispatch() {
  if (!plan_.cached) {
    if (Status status = route(); !status) return status;
  }
  const std::int64_t num_rows = routing_.num_recv_rows();
  DispatchInput in;
  DispatchOutput out;
  in.x = {buffers_.x.data(), input_dtype(), {plan_.num_tokens, plan_.hidden}};
  out.x = {buffers_.received, plan_.received_dtype(), {num_rows, plan_.hidden}};
  if (plan_.input_scale_bytes() > 0) {
    in.scales = {buffers_.scales.data(), plan_.scale_dtype(), {plan_.num_tokens, plan_.num_scales()}};
  }
  if (plan_.num_scales() > 0) {
    out.scales = {buffers_.recv_scales.data(), plan_.scale_dtype(), {num_rows, plan_.num_scales()}};
  }
  if (plan_.layout == Layout::kTokens) {
    out.topk_idx = {buffers_.recv_idx.data(), DType::kInt64, {num_rows, plan_.num_topk}};
    out.topk_weights = {buffers_.recv_weights.data(), DType::kFloat32, {num_rows, plan_.num_topk}};
  } else if (plan_.metadata_bytes() > 0) {
    out.topk_weights = {buffers_.recv_weights.data(), DType::kFloat32, {num_rows}};
  }
  DispatchOptions options;
  options.kernel = kernel_;
  options.quantize = plan_.quantize;
  return group_->dispatch(routing_, in, out, device_.stream(), options);
}

DType Operations::input_dtype() const {
  return plan_.dtype == BenchDType::kFp8 ? DType::kFloat8E4M3 : DType::kBfloat16;
}

Status Operations::combine() {
  CombineInput in;
  CombineOutput out;
  in.x = {buffers_.y.data(), DType::kBfloat16, {routing_.num_recv_rows(), plan_.hidden}};
  out.x = {buffers_.out.data(), DType::kBfloat16, {plan_.num_tokens, plan_.hidden}};
  if (plan_.returns_weights) {
    in.weights = {buffers_.y_weights.data(), DType::kFloat32, {routing_.num_recv_rows(), plan_.num_topk}};
    out.weights = {buffers_.out_weights.data(), DType::kFloat32, {plan_.num_tokens, plan_.num_topk}};
  }
  CombineOptions options;
  options.weighted = plan_.combine_is_weighted();
  // The reference of latency mode combines rows as given, over several nodes too.
  if (!plan_.latency()) options.wire_format = plan_.wire_format;
  options.kernel = kernel_;
  return group_->combine(routing_, in, out, device_.stream(), options);
}

RankRows Operations::rows() const {
  const auto rank = static_cast<std::size_t>(context_.rank());
  const auto sent = routing_.num_rows_to_rank();
  const auto received = routing_.num_rows_from_rank();
  RankRows rows{};
  rows.num_sent = std::accumulate(sent.begin(), sent.end(), std::int64_t{0});
  rows.num_sent_remote = rows.num_sent - sent[rank];
  rows.num_received = std::accumulate(received.begin(), received.end(), std::int64_t{0});
  rows.num_received_remote = rows.num_received - received[rank];
  return rows;
}

Status Operations::check_routing() const {
  const Result<RoutingTable> picked = plan_.picked(table_, context_.rank());
  if (!picked) return picked.status();
  const std::vector<int> rows_of = ferry::tools::rows_per_token(*picked, plan_.layout, plan_.num_ranks);
  const std::int64_t expected = std::accumulate(rows_of.begin(), rows_of.end(), std::int64_t{0});
  if (rows().num_sent != expected) {
    return wrong_result(fmt::format("route: {} rows leave this rank, its ids say {}", rows().num_sent, expected));
  }
  return plan_.counts_load ? check_counters(*picked) : Status();
}

Status Operations::check_counters(const RoutingTable& picked) const {
  std::vector<std::int64_t> expected = tokens_per_expert(table_);
  const std::vector<std::int64_t> physical = tokens_per_expert(picked);
  expected.insert(expected.end(), physical.begin(), physical.end());
  const auto received = routing_.num_rows_per_local_expert();
  expected.insert(expected.end(), received.begin(), received.end());
  std::vector<std::int64_t> counted(expected.size());
  Status status = device_.copy(counted.data(), buffers_.counters.data(), counted.size() * sizeof(std::int64_t));
  if (!status) return status;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (counted[i] == expected[i]) continue;
    return wrong_result(fmt::format("route: counter {} of this rank has {} after one call, its ids say {}", i,
                                    counted[i], expected[i]));
  }
  return {};
}

}  // namespace ferry::tools
