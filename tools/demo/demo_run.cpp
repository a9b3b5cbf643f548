#include "demo/demo_run.hpp"

#include "ferry/fp8.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

namespace {

struct AreaOffsets {
  explicit AreaOffsets(const DemoPlan& plan)
      : waits_ns(sizeof(RankFigures)),
        num_ranks(static_cast<std::size_t>(plan.num_ranks)),
        expert_rows(waits_ns + num_ranks * sizeof(std::int64_t)),
        num_expert_rows(static_cast<std::size_t>(plan.shape.num_experts)),
        rows_to_rank(expert_rows + num_expert_rows * sizeof(std::int32_t)),
        placement(rows_to_rank + num_ranks * sizeof(std::int32_t)),
        num_places(static_cast<std::size_t>(plan.num_places)),
        output(placement + num_places * sizeof(std::int32_t)),
        num_output_values(static_cast<std::size_t>(plan.max_tokens_per_rank() * plan.shape.hidden)) {}
  std::size_t total_bytes() const { return output + num_output_values * sizeof(std::uint16_t); }

  std::size_t waits_ns;
  std::size_t num_ranks;
  std::size_t expert_rows;
  std::size_t num_expert_rows;
  std::size_t rows_to_rank;
  std::size_t placement;
  std::size_t num_places;
  std::size_t output;
  std::size_t num_output_values;
};

std::int64_t bfloat16_row_bytes(const LayerShape& shape) {
  return shape.hidden * static_cast<std::int64_t>(sizeof(std::uint16_t));
}

std::int64_t scale_bytes(const LayerShape& shape) {
  return (shape.hidden + kFp8BlockSize - 1) / kFp8BlockSize * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace

std::int64_t DemoPlan::row_bytes() const {
  return payload == PayloadType::kBfloat16 ? bfloat16_row_bytes(shape) : shape.hidden + scale_bytes(shape);
}

std::int64_t DemoPlan::dispatch_wire_row_bytes() const {
  // No rank asks for ids and weights with the rows: records contain only scales.
  if (payload == PayloadType::kBfloat16) return bfloat16_row_bytes(shape);
  return shape.hidden + dispatch_record_bytes(scale_bytes(shape), shape.num_topk(), false);
}

std::int64_t DemoPlan::combine_wire_row_bytes() const {
  return bfloat16_row_bytes(shape) + combine_record_bytes(shape.num_topk(), true);
}

std::size_t RankArea::size_bytes(const DemoPlan& plan) { return AreaOffsets(plan).total_bytes(); }

std::span<const std::int64_t> RankArea::waits_ns() const {
  const AreaOffsets at(plan_);
  return {reinterpret_cast<const std::int64_t*>(bytes_.data() + at.waits_ns), at.num_ranks};
}

std::span<const std::int32_t> RankArea::expert_rows() const {
  const AreaOffsets at(plan_);
  return {reinterpret_cast<const std::int32_t*>(bytes_.data() + at.expert_rows), at.num_expert_rows};
}

std::span<const std::int32_t> RankArea::rows_to_rank() const {
  const AreaOffsets at(plan_);
  return {reinterpret_cast<const std::int32_t*>(bytes_.data() + at.rows_to_rank), at.num_ranks};
}

std::span<const std::int32_t> RankArea::placement() const {
  const AreaOffsets at(plan_);
  return {reinterpret_cast<const std::int32_t*>(bytes_.data() + at.placement), at.num_places};
}

std::span<const std::uint16_t> RankArea::output() const {
  const AreaOffsets at(plan_);
  const auto* values = reinterpret_cast<const std::uint16_t*>(bytes_.data() + at.output);
  return {values, static_cast<std::size_t>(figures().num_tokens * plan_.shape.hidden)};
}

std::span<std::int64_t> MutableRankArea::waits_ns() {
  const AreaOffsets at(plan_);
  return {reinterpret_cast<std::int64_t*>(bytes_.data() + at.waits_ns), at.num_ranks};
}

std::span<std::int32_t> MutableRankArea::expert_rows() {
  const AreaOffsets at(plan_);
  return {reinterpret_cast<std::int32_t*>(bytes_.data() + at.expert_rows), at.num_expert_rows};
}

std::span<std::int32_t> MutableRankArea::rows_to_rank() {
  const AreaOffsets at(plan_);
  return {reinterpret_cast<std::int32_t*>(bytes_.data() + at.rows_to_rank), at.num_ranks};
}

std::span<std::int32_t> MutableRankArea::placement() {
  const AreaOffsets at(plan_);
  return {reinterpret_cast<std::int32_t*>(bytes_.data() + at.placement), at.num_places};
}

std::span<std::uint16_t> MutableRankArea::output() {
  const AreaOffsets at(plan_);
  auto* values = reinterpret_cast<std::uint16_t*>(bytes_.data() + at.output);
  return {values, static_cast<std::size_t>(figures().num_tokens * plan_.shape.hidden)};
}

RoutingTable order_by_half(const DemoPlan& plan, const RoutingTable& table) {
  std::array<std::vector<RoutingTable>, kNumHalves> parts;  // by rank
  std::int64_t next = 0;
  for (std::size_t half = 0; half < kNumHalves; ++half) {
    for (int rank = 0; rank < plan.num_ranks; ++rank) {
      const auto step = static_cast<int>(half);
      const std::int64_t count = plan.first_of_step(rank, step + 1) - plan.first_of_step(rank, step);
      parts[half].push_back(slice_routing(table, next, count));
      next += count;
    }
  }
  RoutingTable ordered = slice_routing(table, 0, 0);
  ordered.num_tokens = next;
  for (std::size_t rank = 0; rank < parts.front().size(); ++rank) {
    for (const auto& half : parts) {
      const RoutingTable& part = half[rank];
      ordered.topk_idx.insert(ordered.topk_idx.end(), part.topk_idx.begin(), part.topk_idx.end());
      ordered.topk_weights.insert(ordered.topk_weights.end(), part.topk_weights.begin(), part.topk_weights.end());
    }
  }
  return ordered;
}

std::vector<std::uint16_t> embed_run_tokens(const DemoPlan& plan, std::int64_t first, std::int64_t count) {
  return embed_tokens(plan.text.bytes, first, count, {plan.shape.hidden, LayerSeeds(plan.seed).embedding});
}

Result<Choice> choose_run_experts(const DemoPlan& plan, std::span<const std::uint16_t> x, std::int64_t first,
                                  std::int64_t count) {
  if (!plan.trace) return choose_experts(x, plan.shape, LayerSeeds(plan.seed).router);
  RoutingTable slice = slice_routing(plan.trace->table, first, count);
  return Choice{std::move(slice.topk_idx), std::move(slice.topk_weights)};
}

}  // namespace ferry::tools
