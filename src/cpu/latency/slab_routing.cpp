#include "cpu/latency/slab_routing.hpp"

#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

/// Values of one SourceRange.
constexpr std::size_t kRangeValues = sizeof(SourceRange) / sizeof(std::int32_t);

}  // namespace

std::shared_ptr<CpuRouting> begin_slab_routing(const LatencyDispatchCall& call, const Topology& topology,
                                               const std::shared_ptr<SpareTables>& spare_tables) {
  auto routing = std::make_shared<CpuRouting>(spare_tables);
  copy_inputs(call.route, topology.rank, *routing);
  // Route gives these vectors the same sizes, so their memory stays in place.
  const std::int64_t num_local = call.num_local_experts;
  const std::int64_t capacity = call.route.options.slab_capacity;
  const std::vector<std::int32_t>& owners = call.route.placement->expert_to_rank;
  for (std::size_t expert = 0; expert < owners.size(); ++expert) {
    if (owners[expert] != topology.rank) continue;
    routing->local_expert_ids.push_back(static_cast<std::int32_t>(expert));
  }
  routing->expert_rows.assign(owners.size(), 0);
  routing->num_rows_per_local_expert.assign(to_size(num_local), 0);
  for (std::int64_t local = 0; local <= num_local; ++local) routing->expert_row_offsets.push_back(local * capacity);
  routing->num_used_rows = num_local * capacity;
  routing->slab_capacity = capacity;
  routing->source_table.assign(to_size(routing->num_used_rows) * 2, -1);
  routing->tokens.slots.assign(routing->ids.size(), -1);
  routing->source_ranges_table.assign(to_size(num_local) * to_size(topology.num_ranks) * kRangeValues, 0);
  set_views(call.route, *routing);
  routing->source_ranges = ConstTensorView(routing->source_ranges_table.data(), DType::kInt32,
                                           {num_local, topology.num_ranks, static_cast<std::int64_t>(kRangeValues)});
  return routing;
}

void write_source_ranges(CpuRouting& routing) {
  const std::size_t num_ranks = routing.num_rows_from_rank.size();
  std::int32_t* range = routing.source_ranges_table.data();
  for (std::size_t local = 0; local < routing.num_rows_per_local_expert.size(); ++local) {
    const std::int32_t* source = routing.source_table.data() + routing.expert_row_offsets[local] * 2;
    std::int32_t row = 0;
    for (std::size_t rank = 0; rank < num_ranks; ++rank, range += kRangeValues) {
      const std::int32_t first = row;
      while (row < routing.num_rows_per_local_expert[local] && source[2 * row] == static_cast<std::int32_t>(rank)) {
        ++row;
      }
      range[0] = row - first;
      range[1] = first;
    }
  }
}

}  // namespace ferry::cpu
