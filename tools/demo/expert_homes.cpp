#include "demo/expert_homes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/timing.hpp"
#include "ferry/balance.hpp"

namespace ferry::tools {

namespace {

Placement spread_in_order(const DemoPlan& plan) {
  const std::int64_t num_experts = plan.shape.num_experts;
  const std::int64_t places_per_rank = plan.num_places / plan.num_ranks;
  std::vector<std::int32_t> placement(static_cast<std::size_t>(plan.num_places), -1);
  for (std::int64_t rank = 0; rank < plan.num_ranks; ++rank) {
    auto place = static_cast<std::size_t>(rank * places_per_rank);
    const std::int64_t end = (rank + 1) * num_experts / plan.num_ranks;
    for (std::int64_t expert = rank * num_experts / plan.num_ranks; expert < end; ++expert) {
      placement[place++] = static_cast<std::int32_t>(expert);
    }
  }
  // Replicas serve to even out load, not to save bytes.
  return {.physical_to_logical = std::move(placement), .choice = ReplicaChoice::kRoundRobin};
}

ConstTensorView one_layer(const std::vector<std::int32_t>& physical_to_logical) {
  return {physical_to_logical.data(), DType::kInt32, {1, static_cast<std::int64_t>(physical_to_logical.size())}};
}

}  // namespace

ExpertHomes::ExpertHomes(const DemoPlan& plan, int rank)
    : plan_(plan), rank_(rank), first_placement_(spread_in_order(plan)), placement_(first_placement_) {}

Result<std::vector<std::int64_t>> ExpertHomes::places_of(std::span<const std::int64_t> topk_idx,
                                                         const Placement& placement) const {
  std::vector<std::int64_t> places(topk_idx.begin(), topk_idx.end());
  const std::int64_t num_topk = plan_.shape.num_topk();
  const TensorView view(places.data(), DType::kInt64, {static_cast<std::int64_t>(places.size()) / num_topk, num_topk});
  Status status =
      pick_replicas(view, plan_.shape.num_experts, placement, {rank_, plan_.num_ranks, plan_.ranks_per_node()}, view);
  if (!status) return status;
  return places;
}

Status ExpertHomes::load(std::int64_t expert_idx, Expert* expert) const {
  const auto arrived = arrived_.find(expert_idx);
  if (arrived != arrived_.end()) {
    expert->load(arrived->second);
    return {};
  }
  const std::int64_t places_per_rank = plan_.num_places / plan_.num_ranks;
  const auto first = first_placement_.physical_to_logical.begin() + rank_ * places_per_rank;
  if (std::find(first, first + places_per_rank, expert_idx) == first + places_per_rank) {
    return {ErrorCode::kInternal, fmt::format("the weights of expert {} did not arrive at rank {}", expert_idx, rank_)};
  }
  expert->load(LayerSeeds(plan_.seed).experts, expert_idx);
  return {};
}

Status ExpertHomes::move(std::span<const std::int64_t> load, Group& group, const RankDevice& device,
                         MoveFigures* figures) {
  std::int64_t start_ns = now_ns();
  BalanceOptions options;
  options.num_replicas = plan_.num_places;
  options.num_groups = plan_.num_groups();
  options.num_nodes = plan_.num_nodes;
  options.num_ranks = plan_.num_ranks;
  options.previous = one_layer(placement_.physical_to_logical);
  auto placed = balance({load.data(), DType::kInt64, {1, plan_.shape.num_experts}}, options);
  if (!placed) return placed.status();
  auto moves = plan_moves(one_layer(placement_.physical_to_logical), one_layer(placed->physical_to_logical),
                          {plan_.shape.num_experts, plan_.num_ranks, plan_.num_nodes});
  if (!moves) return moves.status();
  figures->balance_ns = now_ns() - start_ns;
  start_ns = now_ns();
  if (Status status = carry(moves->copies, group, device); !status) return status;
  figures->move_ns = now_ns() - start_ns;
  figures->num_moved = moves->num_remote;
  figures->num_between_nodes = moves->num_between_nodes;
  placement_.physical_to_logical = std::move(placed->physical_to_logical);
  return {};
}

/// Every place receives into separate memory, so no copy can overwrite the source of another.
Status ExpertHomes::carry(std::span<const ExpertCopy> copies, Group& group, const RankDevice& device) {
  const std::int64_t hidden = plan_.shape.hidden;
  const std::int64_t rows_per_expert = Expert::num_weights(plan_.shape) / hidden;
  std::vector<float> sent;
  std::vector<std::int64_t> places;
  Expert expert(plan_.shape);
  for (const ExpertCopy& copy : copies) {
    // A copy that a plan of waves puts aside is sent from its place: nothing is overwritten before all copies have
    // arrived.
    if (copy.to_staging || copy.local() || copy.from_rank != rank_) continue;
    if (Status status = load(copy.expert, &expert); !status) return status;
    const auto weights = expert.weights();
    sent.insert(sent.end(), weights.begin(), weights.end());
    places.insert(places.end(), static_cast<std::size_t>(rows_per_expert), copy.to);
  }
  const auto num_rows = static_cast<std::int64_t>(places.size());
  MirroredBlock rows;
  MirroredBlock ids;
  MirroredBlock received;
  Status status = rows.mirror(device, sent.data(), sent.size() * sizeof(float));
  if (status) status = ids.mirror(device, places.data(), places.size() * sizeof(std::int64_t));
  if (!status) return status;
  RouteOptions options;
  options.num_experts = plan_.num_places;
  options.layout = Layout::kExperts;
  auto routing = group.route({{ids.data(), DType::kInt64, {num_rows, 1}}, {}}, options, device.stream());
  if (!routing) return routing.status();
  const std::int64_t num_received = routing->num_recv_rows();
  status = received.allocate(device, group, static_cast<std::size_t>(num_received * hidden) * sizeof(float));
  if (!status) return status;
  DispatchInput in;
  in.x = {rows.data(), DType::kFloat32, {num_rows, hidden}};
  DispatchOutput out;
  out.x = {received.data(), DType::kFloat32, {num_received, hidden}};
  status = group.dispatch(*routing, in, out, device.stream());
  if (status) status = group.wait(device.stream());
  if (status) status = received.to_host(device);
  if (!status) return status;
  const auto* values = reinterpret_cast<const float*>(received.host());
  const auto local_places = routing->local_expert_ids();
  const auto offsets = routing->expert_row_offsets();
  const auto counts = routing->num_rows_per_local_expert();
  for (const ExpertCopy& copy : copies) {
    if (copy.to_staging || copy.local() || copy.to_rank != rank_) continue;
    const auto local = static_cast<std::size_t>(copy.to - local_places.front());
    const float* first = values + offsets[local] * hidden;
    arrived_[copy.expert].assign(first, first + counts[local] * hidden);
  }
  return {};
}

}  // namespace ferry::tools
