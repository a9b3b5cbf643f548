#include "bench/operations.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "common/bfloat16.hpp"

namespace ferry::tools {

namespace {

constexpr std::int64_t kSourceColumns = 2;

Status wrong_result(const std::string& what) {
  return {ErrorCode::kInternal, what + "; the timings of a wrong result would mean nothing"};
}

}  // namespace

Operations::Operations(const BenchPlan& plan, RankContext& context)
    : plan_(plan),
      context_(context),
      pattern_(plan.seed, plan.combine_row_bytes()),
      table_(plan.routing_of(context.rank())),
      rows_per_token_(ferry::tools::rows_per_token(table_, plan.layout, plan.num_ranks)) {}

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
  options.tuning_file = plan_.tuning_file;
  auto group = Group::create(context_.bootstrap(), options);
  if (!group) return group.status();
  group_ = std::move(*group);
  if (Status status = place_ids(); !status) return status;
  if (plan_.layout == Layout::kSlab) {
    if (Status status = find_slab_capacity(); !status) return status;
  }
  wire_.names = wire_names(*group_);
  if (Status status = metered(&wire_.route, 0, &Operations::route); !status) return status;
  if (Status status = wait(); !status) return status;
  if (Status status = check_routing(); !status) return status;
  if (plan_.op == BenchOp::kRoute) return {};
  Status status = buffers_.allocate(plan_, device_, *group_, routing_.num_recv_rows(), rows().num_sent);
  if (!status || !plan_.measures_dispatch()) return status;
  return fill_inputs();
}

/// A CUDA group reads ids and weights from its GPU.
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

Status Operations::fill_inputs() {
  const auto fill = [&](const BenchBlock& block, std::int64_t row_bytes) {
    return write_rows(device_, {block.data(), plan_.num_tokens, row_bytes}, [&](std::int64_t token, std::byte* to) {
      std::memcpy(to, pattern_.row(context_.rank(), token), static_cast<std::size_t>(row_bytes));
    });
  };
  if (Status status = fill(buffers_.x, plan_.payload_bytes()); !status) return status;
  return fill(buffers_.scales, plan_.scale_bytes());
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
  return options;
}

/// The most rows that any expert of any rank gets: a slab of exactly the size that the batch needs.
Status Operations::find_slab_capacity() {
  RouteOptions options = route_options();
  options.layout = Layout::kExperts;
  auto routing = group_->route({route_input().topk_idx, {}}, options, device_.stream());
  if (!routing) return routing.status();
  std::int64_t most = 1;
  for (std::int32_t count : routing->num_rows_per_local_expert()) most = std::max<std::int64_t>(most, count);
  auto all = context_.bootstrap()->all_gather(std::as_bytes(std::span(&most, 1)), context_.timeout_ns());
  if (!all) return all.status();
  for (const auto& bytes : *all) {
    std::int64_t value = 0;
    std::memcpy(&value, bytes.data(), std::min(sizeof value, bytes.size()));
    slab_capacity_ = std::max(slab_capacity_, value);
  }
  return {};
}

Status Operations::route() {
  auto routing = group_->route(route_input(), route_options(), device_.stream());
  if (!routing) return routing.status();
  retired_ = std::exchange(routing_, std::move(*routing));
  return {};
}

Status Operations::metered(WireFigures* figures, std::int64_t formula_bytes, Status (Operations::*call)()) {
  const WireMeter meter(*group_);
  Status status = (this->*call)();
  *figures = meter.sent();
  figures->formula_bytes = formula_bytes;
  return status;
}

Status Operations::wait() {
  Status status = group_->wait(device_.stream());
  retired_ = {};
  return status;
}

Status Operations::dispatch() {
  if (!plan_.cached) {
    if (Status status = route(); !status) return status;
  }
  const std::int64_t num_rows = routing_.num_recv_rows();
  const DType dtype = plan_.dtype == BenchDType::kFp8 ? DType::kFloat8E4M3 : DType::kBfloat16;
  DispatchInput in;
  DispatchOutput out;
  in.x = {buffers_.x.data(), dtype, {plan_.num_tokens, plan_.hidden}};
  out.x = {buffers_.received, dtype, {num_rows, plan_.hidden}};
  if (plan_.num_scales() > 0) {
    in.scales = {buffers_.scales.data(), DType::kFloat32, {plan_.num_tokens, plan_.num_scales()}};
    out.scales = {buffers_.recv_scales.data(), DType::kFloat32, {num_rows, plan_.num_scales()}};
  }
  if (plan_.layout == Layout::kTokens) {
    out.topk_idx = {buffers_.recv_idx.data(), DType::kInt64, {num_rows, plan_.num_topk}};
    out.topk_weights = {buffers_.recv_weights.data(), DType::kFloat32, {num_rows, plan_.num_topk}};
  } else {
    out.topk_weights = {buffers_.recv_weights.data(), DType::kFloat32, {num_rows}};
  }
  DispatchOptions options;
  options.kernel = kernel_;
  return group_->dispatch(routing_, in, out, device_.stream(), options);
}

Status Operations::combine() {
  CombineInput in;
  CombineOutput out;
  in.x = {buffers_.y.data(), DType::kBfloat16, {routing_.num_recv_rows(), plan_.hidden}};
  out.x = {buffers_.out.data(), DType::kBfloat16, {plan_.num_tokens, plan_.hidden}};
  CombineOptions options;
  options.weighted = plan_.combine_is_weighted();
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
  const std::int64_t expected = std::accumulate(rows_per_token_.begin(), rows_per_token_.end(), std::int64_t{0});
  if (rows().num_sent != expected) {
    return wrong_result(fmt::format("route: {} rows leave this rank, its ids say {}", rows().num_sent, expected));
  }
  return {};
}

Result<std::vector<std::int32_t>> Operations::read_source() const {
  const ConstTensorView source = routing_.source();
  std::vector<std::int32_t> host(static_cast<std::size_t>(source.num_elements()));
  if (Status status = device_.copy(host.data(), source.data, host.size() * sizeof(std::int32_t)); !status) {
    return status;
  }
  return host;
}

Status Operations::check() {
  const std::int64_t num_rows_out = count_rows_to_other_nodes(
      table_.topk_idx, {plan_.num_ranks, plan_.ranks_per_node(), plan_.num_experts, plan_.num_topk}, context_.rank());
  if (plan_.measures_dispatch()) {
    Status status = metered(&wire_.dispatch, num_rows_out * plan_.dispatch_wire_row_bytes(), &Operations::dispatch);
    if (status) status = wait();
    if (status) status = check_dispatch();
    if (!status) return status;
  }
  if (!plan_.measures_combine()) return {};
  if (Status status = fill_combine_input(); !status) return status;
  Status status = metered(&wire_.combine, num_rows_out * plan_.combine_wire_row_bytes(), &Operations::combine);
  if (!status) return status;
  if (status = wait(); !status) return status;
  return check_combine();
}

Status Operations::check_dispatch() {
  auto source = read_source();
  if (!source) return source.status();
  const std::int64_t row_bytes = plan_.payload_bytes();
  std::int64_t num_rows = 0;
  const auto check_row = [&](std::int64_t row, const std::byte* got) -> Status {
    const std::int32_t* from = source->data() + row * kSourceColumns;
    if (from[0] < 0) return {};
    ++num_rows;
    if (std::memcmp(got, pattern_.row(from[0], from[1]), static_cast<std::size_t>(row_bytes)) == 0) return {};
    return wrong_result(fmt::format("dispatch: row {} is not what rank {} sent as token {}", row, from[0], from[1]));
  };
  Status status = read_rows(device_, {buffers_.received, routing_.num_used_rows(), row_bytes}, check_row);
  if (!status) return status;
  if (num_rows != rows().num_received) {
    return wrong_result(
        fmt::format("dispatch: {} rows hold tokens, route announced {}", num_rows, rows().num_received));
  }
  return check_scales(*source);
}

Status Operations::check_scales(const std::vector<std::int32_t>& source) {
  const std::int64_t row_bytes = plan_.scale_bytes();
  const auto check_row = [&](std::int64_t row, const std::byte* got) -> Status {
    const std::int32_t* from = source.data() + row * kSourceColumns;
    if (from[0] < 0) return {};
    if (std::memcmp(got, pattern_.row(from[0], from[1]), static_cast<std::size_t>(row_bytes)) == 0) return {};
    return wrong_result(
        fmt::format("dispatch: the scales of row {} are not those of rank {}, token {}", row, from[0], from[1]));
  };
  if (row_bytes == 0) return {};
  return read_rows(device_, {buffers_.recv_scales.data(), routing_.num_used_rows(), row_bytes}, check_row);
}

/// Experts that give back what they were sent.
Status Operations::fill_combine_input() {
  auto source = read_source();
  if (!source) return source.status();
  const std::int64_t row_bytes = plan_.combine_row_bytes();
  return write_rows(device_, {buffers_.y.data(), routing_.num_used_rows(), row_bytes},
                    [&](std::int64_t row, std::byte* to) {
                      const std::int32_t* from = source->data() + row * kSourceColumns;
                      if (from[0] < 0) return;
                      std::memcpy(to, pattern_.row(from[0], from[1]), static_cast<std::size_t>(row_bytes));
                    });
}

std::vector<float> Operations::factors_by_node(std::int64_t token) const {
  std::vector<float> factors(static_cast<std::size_t>(plan_.num_nodes), 0.0F);
  std::vector<std::int64_t> owners;  // of rows that count: each of a token's ranks once where experts share a row
  for (std::int64_t k = 0; k < plan_.num_topk; ++k) {
    const auto entry = static_cast<std::size_t>(token * plan_.num_topk + k);
    if (table_.topk_idx[entry] < 0) continue;
    const std::int64_t owner = owner_of(table_.topk_idx[entry], plan_.num_experts, plan_.num_ranks);
    const bool shares_row =
        plan_.layout == Layout::kTokens && std::find(owners.begin(), owners.end(), owner) != owners.end();
    if (shares_row) continue;
    owners.push_back(owner);
    factors[static_cast<std::size_t>(owner / plan_.ranks_per_node())] +=
        plan_.combine_is_weighted() ? table_.topk_weights[entry] : 1.0F;
  }
  return factors;
}

/// Every row came back as it went out, so that a node's sum of a token is the token times a small factor: products and
/// sums of these are exact in f32, whatever the order, and only the rounding of each node's sum and of their sum is
/// left.
Status Operations::check_combine() {
  const auto check_row = [&](std::int64_t token, const std::byte* bytes) -> Status {
    const auto* sent = reinterpret_cast<const std::uint16_t*>(pattern_.row(context_.rank(), token));
    const auto* got = reinterpret_cast<const std::uint16_t*>(bytes);
    const std::vector<float> factors = factors_by_node(token);
    for (std::int64_t h = 0; h < plan_.hidden; ++h) {
      const float x = float_from_bfloat16(sent[h]);
      float sum = 0.0F;
      for (const float factor : factors) sum += float_from_bfloat16(bfloat16_from_float(factor * x));
      const float expected = float_from_bfloat16(bfloat16_from_float(sum));
      const float value = float_from_bfloat16(got[h]);
      if (!(value == expected)) {
        return wrong_result(
            fmt::format("combine: token {}, channel {}: expected {}, got {}", token, h, expected, value));
      }
    }
    return {};
  };
  return read_rows(device_, {buffers_.out.data(), plan_.num_tokens, plan_.combine_row_bytes()}, check_row);
}

}  // namespace ferry::tools
