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
  GroupOptions options;
  options.backend = plan_.backend;
  options.timeout_ns = plan_.timeout_ns;
  auto group = Group::create(context_.bootstrap(), options);
  if (!group) return group.status();
  group_ = std::move(*group);
  if (plan_.layout == Layout::kSlab) {
    if (Status status = find_slab_capacity(); !status) return status;
  }
  if (Status status = route(); !status) return status;
  if (Status status = check_routing(); !status) return status;
  if (plan_.op == BenchOp::kRoute) return {};
  if (Status status = buffers_.allocate(plan_, *group_, routing_.num_recv_rows(), rows().num_sent); !status) {
    return status;
  }
  if (!plan_.measures_dispatch()) return {};
  for (std::int64_t token = 0; token < plan_.num_tokens; ++token) {
    const std::byte* row = pattern_.row(context_.rank(), token);
    std::memcpy(buffers_.x.row(token, plan_.payload_bytes()), row, static_cast<std::size_t>(plan_.payload_bytes()));
    std::memcpy(buffers_.scales.row(token, plan_.scale_bytes()), row, static_cast<std::size_t>(plan_.scale_bytes()));
  }
  return {};
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
  auto routing =
      group_->route({{table_.topk_idx.data(), DType::kInt64, {plan_.num_tokens, plan_.num_topk}}, {}}, options);
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
  RouteInput in;
  in.topk_idx = {table_.topk_idx.data(), DType::kInt64, {plan_.num_tokens, plan_.num_topk}};
  in.topk_weights = {table_.topk_weights.data(), DType::kFloat32, {plan_.num_tokens, plan_.num_topk}};
  auto routing = group_->route(in, route_options());
  if (!routing) return routing.status();
  routing_ = std::move(*routing);
  return {};
}

Status Operations::dispatch() {
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
  return group_->dispatch(routing_, in, out);
}

Status Operations::combine() {
  CombineInput in;
  CombineOutput out;
  in.x = {buffers_.y.data(), DType::kBfloat16, {routing_.num_recv_rows(), plan_.hidden}};
  out.x = {buffers_.out.data(), DType::kBfloat16, {plan_.num_tokens, plan_.hidden}};
  CombineOptions options;
  options.weighted = plan_.layout != Layout::kTokens;
  return group_->combine(routing_, in, out, {}, options);
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

Status Operations::check() {
  if (plan_.measures_dispatch()) {
    if (Status status = dispatch(); !status) return status;
    if (Status status = check_dispatch(); !status) return status;
  }
  if (!plan_.measures_combine()) return {};
  const auto* source = static_cast<const std::int32_t*>(routing_.source().data);
  for (std::int64_t row = 0; row < routing_.num_used_rows(); ++row) {
    const std::int32_t* from = source + row * kSourceColumns;
    if (from[0] < 0) continue;
    std::memcpy(buffers_.y.row(row, plan_.combine_row_bytes()), pattern_.row(from[0], from[1]),
                static_cast<std::size_t>(plan_.combine_row_bytes()));
  }
  if (Status status = combine(); !status) return status;
  return check_combine();
}

Status Operations::check_dispatch() {
  const auto* source = static_cast<const std::int32_t*>(routing_.source().data);
  std::int64_t num_rows = 0;
  for (std::int64_t row = 0; row < routing_.num_used_rows(); ++row) {
    const std::int32_t* from = source + row * kSourceColumns;
    if (from[0] < 0) continue;
    ++num_rows;
    const std::byte* expected = pattern_.row(from[0], from[1]);
    const std::byte* got = buffers_.received + row * plan_.payload_bytes();
    const std::byte* got_scales = buffers_.recv_scales.row(row, plan_.scale_bytes());
    if (std::memcmp(got, expected, static_cast<std::size_t>(plan_.payload_bytes())) != 0 ||
        std::memcmp(got_scales, expected, static_cast<std::size_t>(plan_.scale_bytes())) != 0) {
      return wrong_result(fmt::format("dispatch: row {} is not what rank {} sent as token {}", row, from[0], from[1]));
    }
  }
  if (num_rows != rows().num_received) {
    return wrong_result(
        fmt::format("dispatch: {} rows hold tokens, route announced {}", num_rows, rows().num_received));
  }
  return {};
}

float Operations::combined_factor(std::int64_t token) const {
  if (plan_.layout == Layout::kTokens) return static_cast<float>(rows_per_token_[static_cast<std::size_t>(token)]);
  float factor = 0.0F;
  for (std::int64_t k = 0; k < plan_.num_topk; ++k) {
    const auto entry = static_cast<std::size_t>(token * plan_.num_topk + k);
    if (table_.topk_idx[entry] >= 0) factor += table_.topk_weights[entry];
  }
  return factor;
}

/// Every row came back as it went out, so that a token's sum is itself times a small factor: products and sums of these
/// are exact in f32, whatever the order, and only the last rounding is left.
Status Operations::check_combine() {
  for (std::int64_t token = 0; token < plan_.num_tokens; ++token) {
    const auto* sent = reinterpret_cast<const std::uint16_t*>(pattern_.row(context_.rank(), token));
    const auto* got = reinterpret_cast<const std::uint16_t*>(buffers_.out.row(token, plan_.combine_row_bytes()));
    const float factor = combined_factor(token);
    for (std::int64_t h = 0; h < plan_.hidden; ++h) {
      const float expected = float_from_bfloat16(bfloat16_from_float(factor * float_from_bfloat16(sent[h])));
      const float value = float_from_bfloat16(got[h]);
      if (!(value == expected)) {
        return wrong_result(
            fmt::format("combine: token {}, channel {}: expected {}, got {}", token, h, expected, value));
      }
    }
  }
  return {};
}

}  // namespace ferry::tools
