#include "demo/rank_steps.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "common/bfloat16.hpp"
#include "ferry/fp8.hpp"

namespace ferry::tools {

namespace {

/// Largest calls of latency mode that the demonstration makes.
LatencyShape latency_shape(const DemoPlan& plan) {
  LatencyShape shape;
  shape.backend = plan.backend;
  shape.num_ranks = plan.num_ranks;
  shape.max_tokens = plan.max_tokens_per_step();
  shape.num_topk = plan.shape.num_topk();
  shape.dispatch_row_bytes = plan.row_bytes();
  shape.combine_row_bytes = plan.shape.hidden * static_cast<std::int64_t>(sizeof(std::uint16_t));
  return shape;
}

}  // namespace

std::int64_t num_scales(const LayerShape& shape) { return (shape.hidden + kFp8BlockSize - 1) / kFp8BlockSize; }

Result<std::shared_ptr<Group>> create_group(const DemoPlan& plan, RankContext& context, const RankDevice& device) {
  GroupOptions options;
  options.backend = plan.backend;
  options.timeout_ns = plan.timeout_ns;
  options.arena_bytes = plan.arena_bytes;
  options.device = device.ordinal();
  options.ranks_per_node = plan.ranks_per_node();
  options.transport = plan.transport;
  options.net_devices = plan.net_devices;
  options.ring_memory = plan.ring_memory;
  options.verify = plan.verify;
  if (plan.latency()) {
    auto latency_bytes = latency_bytes_required(latency_shape(plan));
    if (!latency_bytes) return latency_bytes.status();
    options.latency_bytes = *latency_bytes;
  }
  return Group::create(context.bootstrap(), options);
}

Status run_experts(const DemoPlan& plan, const Routing& routing, const ExpertHomes* homes, const std::uint16_t* x,
                   std::uint16_t* y) {
  const auto hidden = static_cast<std::size_t>(plan.shape.hidden);
  std::vector<float> x_rows(Expert::kChunkRows * hidden);
  std::vector<float> y_rows(Expert::kChunkRows * hidden);
  const auto ids = routing.local_expert_ids();
  const auto counts = routing.num_rows_per_local_expert();
  const auto offsets = routing.expert_row_offsets();
  Expert expert(plan.shape);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (counts[i] == 0) continue;
    if (homes != nullptr) {
      if (Status status = homes->load(homes->expert_in(ids[i]), &expert); !status) return status;
    } else {
      expert.load(LayerSeeds(plan.seed).experts, ids[i]);
    }
    const auto end = static_cast<std::size_t>(offsets[i] + counts[i]);
    for (auto first = static_cast<std::size_t>(offsets[i]); first < end; first += Expert::kChunkRows) {
      const std::size_t num_rows = std::min(Expert::kChunkRows, end - first);
      std::transform(x + first * hidden, x + (first + num_rows) * hidden, x_rows.begin(), float_from_bfloat16);
      expert.forward(x_rows.data(), num_rows, y_rows.data());
      std::transform(y_rows.data(), y_rows.data() + num_rows * hidden, y + first * hidden, bfloat16_from_float);
    }
  }
  return {};
}

void add_routing(const Routing& routing, int rank, const ExpertHomes* homes, MutableRankArea* area) {
  const auto sent = routing.num_rows_to_rank();
  const auto received = routing.num_rows_from_rank();
  RankFigures& figures = area->figures();
  figures.num_sent_rows += std::accumulate(sent.begin(), sent.end(), std::int64_t{0});
  figures.num_received_rows += std::accumulate(received.begin(), received.end(), std::int64_t{0});
  figures.num_own_rows += sent[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < sent.size(); ++i) area->rows_to_rank()[i] += static_cast<std::int32_t>(sent[i]);
  figures.num_experts = routing.num_local_experts();
  const auto expert_ids = routing.local_expert_ids();
  const auto counts = routing.num_rows_per_local_expert();
  for (std::size_t i = 0; i < expert_ids.size(); ++i) {
    const std::int64_t expert = homes != nullptr ? homes->expert_in(expert_ids[i]) : expert_ids[i];
    if (expert >= 0) area->expert_rows()[static_cast<std::size_t>(expert)] += counts[i];
  }
}

std::int64_t count_wire_rows(const DemoPlan& plan, int rank, std::span<const std::int64_t> topk_idx,
                             std::int64_t num_experts) {
  return count_rows_to_other_nodes(topk_idx,
                                   {plan.num_ranks, plan.ranks_per_node(), num_experts, plan.shape.num_topk()}, rank);
}

void add_formulas(const DemoPlan& plan, std::int64_t num_wire_rows, MutableRankArea* area) {
  auto& wire = area->figures().wire;
  wire[static_cast<std::size_t>(Phase::kDispatch)].formula_bytes += num_wire_rows * plan.dispatch_wire_row_bytes();
  wire[static_cast<std::size_t>(Phase::kCombine)].formula_bytes += num_wire_rows * plan.combine_wire_row_bytes();
}

void keep_waits(const Group& group, MutableRankArea* area) {
  const std::vector<std::int64_t> waits_ns = group.wait_times_ns();
  std::copy(waits_ns.begin(), waits_ns.end(), area->waits_ns().begin());
}

void spoil(const DemoPlan& plan, int rank, MutableRankArea* area) {
  const std::int64_t token = plan.spoiled_token - plan.first_token(rank);
  if (plan.spoiled_token < 0 || token < 0 || token >= plan.num_tokens_of(rank)) return;
  constexpr float kSpoil = 100.0F;  // far outside any bound: results are of the order of 1
  std::uint16_t& value = area->output()[static_cast<std::size_t>(token * plan.shape.hidden)];
  value = bfloat16_from_float(float_from_bfloat16(value) + kSpoil);
}

}  // namespace ferry::tools
