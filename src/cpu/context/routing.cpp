#include "cpu/context/routing.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace ferry::cpu {
namespace {

template <typename Id>
void copy_ids(const RouteCall& call, std::int64_t num_counted, std::vector<std::int64_t>& ids) {
  const auto* from = static_cast<const Id*>(call.topk_idx.data);
  std::copy(from, from + num_counted * call.num_topk, ids.begin());
}

/// Homes that tokens pick, by the remainder of token index + rank, so that a lookup replaces a division per entry.
/// Absent if the table would have more than `most_entries`.
class PickRounds {
 public:
  PickRounds(const plan::HomeTable& homes, std::size_t most_entries) : width_(homes.ranges.size() + 1) {
    for (const plan::HomeRange& range : homes.ranges) {
      if (range.count > 1) num_rounds_ = std::lcm(num_rounds_, std::size_t{range.count});
      if (num_rounds_ * width_ > most_entries) return;
    }
    picks_.reserve(num_rounds_ * width_);
    for (std::size_t round = 0; round < num_rounds_; ++round) {
      picks_.push_back(-1);  // no expert
      for (std::size_t logical = 0; logical + 1 < width_; ++logical) {
        picks_.push_back(homes.pick(logical, static_cast<std::int64_t>(round), 0));
      }
    }
  }

  bool present() const { return !picks_.empty(); }
  std::size_t num_rounds() const { return num_rounds_; }
  /// Row of the table, to be indexed by ids from -1 on.
  const std::int32_t* round(std::size_t number) const { return picks_.data() + number * width_ + 1; }

 private:
  std::size_t width_;
  std::size_t num_rounds_ = 1;
  std::vector<std::int32_t> picks_;
};

/// Copies the ids as the homes that the tokens pick.
template <typename Id>
void pick_ids(const RouteCall& call, const plan::HomeTable& homes, int my_rank, std::int64_t num_counted,
              std::vector<std::int64_t>& ids_out) {
  /// Half of a core's first-level cache.
  constexpr std::size_t kMostEntries = 4096;
  /// Minimum ratio of the batch's entries to the table's, so that the table pays off.
  constexpr std::size_t kLeastShare = 4;
  const auto* from = static_cast<const Id*>(call.topk_idx.data);
  const auto num_topk = static_cast<std::size_t>(call.num_topk);
  std::int64_t* ids = ids_out.data();
  const PickRounds rounds(homes, std::min(kMostEntries, to_size(num_counted) * num_topk / kLeastShare));
  if (!rounds.present()) {
    for (std::int64_t token = 0; token < num_counted; ++token) {
      for (std::size_t topk = 0; topk < num_topk; ++topk) {
        const Id id = *from++;
        *ids++ = id < 0 ? -1 : homes.pick(to_size(id), token, my_rank);
      }
    }
    return;
  }
  std::size_t round = to_size(my_rank) % rounds.num_rounds();
  for (std::int64_t token = 0; token < num_counted; ++token) {
    const std::int32_t* const picks = rounds.round(round);
    for (std::size_t topk = 0; topk < num_topk; ++topk) *ids++ = picks[*from++];
    round = round + 1 < rounds.num_rounds() ? round + 1 : 0;
  }
}

/// Number of entries that name an expert and have picked none.
template <typename Id>
std::int64_t count_homeless(const RouteCall& call, std::int64_t num_counted, const std::vector<std::int64_t>& picked) {
  const auto* named = static_cast<const Id*>(call.topk_idx.data);
  return std::transform_reduce(named, named + num_counted * call.num_topk, picked.begin(), std::int64_t{0}, std::plus{},
                               [](Id id, std::int64_t pick) { return std::int64_t{id >= 0 && pick < 0}; });
}

/// Adds count_of(i) to entry index_of(i) of a counter, if that is not negative, for each i below `num`.
template <typename IndexOf, typename CountOf>
void add_counts(const TensorView& counter, std::size_t num, IndexOf index_of, CountOf count_of) {
  if (!counter.present()) return;
  for (std::size_t i = 0; i < num; ++i) {
    const std::int64_t index = index_of(i);
    if (index < 0) continue;
    if (counter.dtype == DType::kInt64) {
      static_cast<std::int64_t*>(counter.data)[index] += count_of(i);
    } else {
      // Unsigned, so that overflow wraps.
      static_cast<std::uint32_t*>(counter.data)[index] += static_cast<std::uint32_t>(count_of(i));
    }
  }
}

}  // namespace

plan::RouteShape route_shape(const RouteCall& call, const Topology& topology) {
  return {.layout = call.options.layout,
          .num_ranks = to_size(topology.num_ranks),
          .num_experts = to_size(call.options.num_experts),
          .num_topk = to_size(call.num_topk),
          .expert_alignment = call.options.expert_alignment,
          .slab_capacity = call.options.slab_capacity,
          .expert_to_rank = call.placement ? std::span<const std::int32_t>(call.placement->expert_to_rank)
                                           : std::span<const std::int32_t>()};
}

void copy_inputs(const RouteCall& call, int my_rank, CpuRouting& routing) {
  copy_inputs(call, call.placement->homes, my_rank, routing);
}

void copy_inputs(const RouteCall& call, const plan::HomeTable& homes, int my_rank, CpuRouting& routing) {
  routing.num_tokens = call.num_tokens;
  routing.num_topk = call.num_topk;
  routing.num_experts = call.options.num_experts;
  routing.layout = call.options.layout;
  routing.ids.resize(to_size(call.num_tokens * call.num_topk));
  const std::int64_t num_counted = num_counted_tokens(call);
  const bool wide = call.topk_idx.dtype == DType::kInt64;
  if (homes.present()) {
    wide ? pick_ids<std::int64_t>(call, homes, my_rank, num_counted, routing.ids)
         : pick_ids<std::int32_t>(call, homes, my_rank, num_counted, routing.ids);
  } else {
    wide ? copy_ids<std::int64_t>(call, num_counted, routing.ids)
         : copy_ids<std::int32_t>(call, num_counted, routing.ids);
  }
  routing.num_homeless = 0;
  if (homes.present() && call.options.counters.homeless.present()) {
    routing.num_homeless = wide ? count_homeless<std::int64_t>(call, num_counted, routing.ids)
                                : count_homeless<std::int32_t>(call, num_counted, routing.ids);
  }
  std::fill(routing.ids.begin() + num_counted * call.num_topk, routing.ids.end(), -1);
  routing.weights.clear();
  if (call.topk_weights.present()) {
    const auto* weights = static_cast<const float*>(call.topk_weights.data);
    routing.weights.assign(weights, weights + routing.ids.size());
  }
}

void plan_rows(const plan::RouteShape& shape, plan::AllCounts sources, const plan::ExpertGroups& groups,
               std::size_t my_rank, std::span<const std::int64_t> ids, CpuRouting& routing) {
  routing.tokens = plan::place_tokens(shape, sources, groups, my_rank, ids, std::move(routing.tokens));
  routing.num_rows_to_rank = routing.tokens.num_rows_to_rank;
  routing.num_tokens_of_rank.clear();
  routing.rank_counts.clear();
  routing.num_rows_on_rank.clear();
  routing.num_rows_from_rank.clear();
  for (std::size_t rank = 0; rank < shape.num_ranks; ++rank) {
    routing.num_tokens_of_rank.push_back(sources[rank].num_entries / static_cast<std::int64_t>(shape.num_topk));
    routing.rank_counts.insert(routing.rank_counts.end(), sources[rank].rank_counts,
                               sources[rank].rank_counts + shape.num_ranks);
    routing.num_rows_on_rank.push_back(plan::rows_on_rank(shape, sources, groups, rank));
    routing.num_rows_from_rank.push_back(plan::rows_from_source(shape, sources[rank], my_rank));
  }
  routing.num_used_rows = routing.num_rows_on_rank[my_rank];
  routing.source_table.assign(to_size(routing.num_used_rows) * 2, -1);
}

void finish(const RouteCall& call, const plan::RouteShape& shape, const plan::ExpertGroups& groups, std::size_t my_rank,
            const std::int32_t* own_counts, CpuRouting& routing) {
  const bool by_rank = shape.by_rank();
  routing.expert_rows.assign(groups.num_rows.begin(), groups.num_rows.end());
  routing.own_expert_counts.assign(own_counts, own_counts + shape.num_experts);
  routing.local_expert.assign(shape.num_experts, -1);
  routing.local_expert_ids.clear();
  routing.num_rows_per_local_expert.clear();
  routing.expert_row_offsets.clear();
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
    if (shape.owner(expert) != my_rank) continue;
    routing.local_expert[expert] = static_cast<std::int32_t>(routing.local_expert_ids.size());
    routing.local_expert_ids.push_back(static_cast<std::int32_t>(expert));
    routing.num_rows_per_local_expert.push_back(static_cast<std::int32_t>(groups.num_rows[expert]));
    if (!by_rank) routing.expert_row_offsets.push_back(groups.first_rows[expert]);
  }
  if (!by_rank) routing.expert_row_offsets.push_back(routing.num_used_rows);
  set_views(call, routing);
}

void add_to_counters(const LoadCounters& counters, const ExpertPlacement& placement, const CpuRouting& routing) {
  const auto self = [](std::size_t i) { return static_cast<std::int64_t>(i); };
  const auto own = [&routing](std::size_t i) { return routing.own_expert_counts[i]; };
  const std::vector<std::int32_t>& logical_of = placement.physical_to_logical;
  add_counts(counters.physical, routing.own_expert_counts.size(), self, own);
  add_counts(
      counters.logical, routing.own_expert_counts.size(),
      [&logical_of](std::size_t i) {
        return logical_of.empty() ? static_cast<std::int64_t>(i) : std::int64_t{logical_of[i]};
      },
      own);
  add_counts(counters.received, routing.num_rows_per_local_expert.size(), self,
             [&routing](std::size_t i) { return routing.num_rows_per_local_expert[i]; });
  add_counts(counters.homeless, 1, self, [&routing](std::size_t) { return routing.num_homeless; });
}

void set_views(const RouteCall& call, CpuRouting& routing) {
  routing.num_recv_rows = call.options.max_recv_rows > 0 ? call.options.max_recv_rows : routing.num_used_rows;
  routing.num_used_rows_i32 = static_cast<std::int32_t>(routing.num_used_rows);

  routing.num_used_rows_view = ConstTensorView(&routing.num_used_rows_i32, DType::kInt32, {1});
  const auto num_local = static_cast<std::int64_t>(routing.local_expert_ids.size());
  routing.rows_per_expert_view = ConstTensorView(routing.num_rows_per_local_expert.data(), DType::kInt32, {num_local});
  routing.expert_rows_view = ConstTensorView(routing.expert_rows.data(), DType::kInt64, {routing.num_experts});
  if (routing.layout != Layout::kTokens) {
    routing.row_offsets_view = ConstTensorView(routing.expert_row_offsets.data(), DType::kInt64, {num_local + 1});
  }
  const std::int64_t num_tokens = routing.num_tokens;
  const std::int64_t num_topk = routing.num_topk;
  routing.slots = ConstTensorView(routing.tokens.slots.data(), DType::kInt32, {num_tokens, num_topk});
  routing.source = ConstTensorView(routing.source_table.data(), DType::kInt32, {routing.num_used_rows, 2});
  routing.topk_idx = ConstTensorView(routing.ids.data(), DType::kInt64, {num_tokens, num_topk});
  if (call.topk_weights.present()) {
    routing.topk_weights = ConstTensorView(routing.weights.data(), DType::kFloat32, {num_tokens, num_topk});
  }
}

}  // namespace ferry::cpu
