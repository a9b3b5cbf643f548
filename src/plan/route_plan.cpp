#include "plan/route_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "plan/slots.hpp"

namespace ferry::plan {
namespace {

/// Remembers the last token that visited each run, which needs no clearing between tokens. first_visit returns a
/// number, because expert choices are random and a branch on them would be mispredicted every other time.
class LastToken {
 public:
  explicit LastToken(std::size_t num_runs) : last_(num_runs, -1) {}
  /// 1 the first time `token` visits `run`, then 0; tokens come in ascending order.
  unsigned first_visit(std::size_t run, std::int32_t token) {
    const unsigned first = last_[run] != token ? 1U : 0U;
    last_[run] = token;
    return first;
  }

 private:
  std::vector<std::int32_t> last_;
};

/// A destination as one number that sorts as (rank, row, topk) does.
std::uint64_t pack_destination(std::size_t rank, std::int32_t row, std::size_t topk) {
  return static_cast<std::uint64_t>(rank) << 48 | static_cast<std::uint64_t>(static_cast<std::uint32_t>(row)) << 8 |
         static_cast<std::uint64_t>(topk);
}

/// Sorts a token's destinations, which all differ. Counts the smaller ones instead of comparing and moving, again to
/// avoid branches: 8 destinations cost 64 comparisons.
void sort_destinations(std::span<const std::uint64_t> packed, Destination* out) {
  std::array<std::uint64_t, kMaxTopk> sorted;
  for (const std::uint64_t destination : packed) {
    std::size_t position = 0;
    for (const std::uint64_t other : packed) position += other < destination ? 1U : 0U;
    sorted[position] = destination;
  }
  std::uint64_t previous_row = ~std::uint64_t{0};
  for (std::size_t i = 0; i < packed.size(); ++i) {
    const std::uint64_t rank_and_row = sorted[i] >> 8;
    out[i] = {static_cast<std::int32_t>(rank_and_row & 0xFFFFFFFFU), static_cast<std::int16_t>(rank_and_row >> 40),
              static_cast<std::uint8_t>(sorted[i] & 0xFFU),
              static_cast<std::uint8_t>(rank_and_row != previous_row ? 1 : 0)};
    previous_row = rank_and_row;
  }
}

std::int32_t count_of_tokens(const RouteShape& shape, std::span<const std::int64_t> ids) {
  return static_cast<std::int32_t>(ids.size() / shape.num_topk);
}

/// First row, on the owner, of each run that `my_rank` sends.
std::vector<std::int64_t> first_rows(const RouteShape& shape, AllCounts sources, const ExpertGroups& groups,
                                     std::size_t my_rank) {
  std::vector<std::int64_t> rows = groups.first_rows;
  if (shape.by_rank()) rows.assign(shape.num_ranks, 0);
  for (std::size_t source = 0; source < my_rank; ++source) {
    const std::int32_t* const counts = sources[source].of_runs(shape);
    for (std::size_t run = 0; run < rows.size(); ++run) rows[run] += counts[run];
  }
  return rows;
}

}  // namespace

void count_tokens(const RouteShape& shape, std::span<const std::int64_t> ids, std::int32_t* rank_counts_out,
                  std::int32_t* expert_counts_out) {
  // An entry without an expert is counted for an extra rank and an extra expert that are dropped below.
  std::vector<std::int32_t> owners(shape.num_experts + 1, static_cast<std::int32_t>(shape.num_ranks));
  std::copy_n(shape.expert_to_rank.begin(), shape.num_experts, owners.begin());
  std::vector<std::int32_t> rank_counts(shape.num_ranks + 1, 0);
  std::vector<std::int32_t> expert_counts(shape.num_experts + 1, 0);
  LastToken ranks(shape.num_ranks + 1);
  LastToken experts(shape.num_experts + 1);
  const std::int32_t num_tokens = count_of_tokens(shape, ids);
  for (std::int32_t token = 0; token < num_tokens; ++token) {
    for (std::size_t entry = to_size(token) * shape.num_topk; entry < (to_size(token) + 1) * shape.num_topk; ++entry) {
      const std::size_t expert = ids[entry] < 0 ? shape.num_experts : to_size(ids[entry]);
      const std::size_t rank = to_size(owners[expert]);
      rank_counts[rank] += static_cast<std::int32_t>(ranks.first_visit(rank, token));
      expert_counts[expert] += static_cast<std::int32_t>(experts.first_visit(expert, token));
    }
  }
  std::copy_n(rank_counts.begin(), shape.num_ranks, rank_counts_out);
  std::copy_n(expert_counts.begin(), shape.num_experts, expert_counts_out);
}

void list_run_tokens(const RouteShape& shape, std::span<const std::int64_t> ids, const std::int32_t* counts,
                     std::int32_t* tokens) {
  const std::int32_t num_tokens = count_of_tokens(shape, ids);
  const std::size_t no_run = shape.num_runs();
  std::vector<std::size_t> next(no_run + 1, 0);
  for (std::size_t run = 0; run < no_run; ++run) next[run + 1] = next[run] + static_cast<std::size_t>(counts[run]);
  LastToken visited(no_run + 1);
  std::int32_t discarded = 0;
  for (std::int32_t token = 0; token < num_tokens; ++token) {
    for (std::size_t entry = to_size(token) * shape.num_topk; entry < (to_size(token) + 1) * shape.num_topk; ++entry) {
      const std::int64_t id = ids[entry];
      const std::size_t run = id < 0 ? no_run : shape.by_rank() ? shape.owner(to_size(id)) : to_size(id);
      const unsigned first = visited.first_visit(run, token);
      *(first != 0 && run != no_run ? tokens + next[run] : &discarded) = token;
      next[run] += first;
    }
  }
}

bool counts_fit(const RouteShape& shape, const SourceCounts& source) {
  const auto fit = [&source](const std::int32_t* counts, std::size_t num_counts) {
    const bool negative = std::any_of(counts, counts + num_counts, [](std::int32_t count) { return count < 0; });
    return !negative && std::accumulate(counts, counts + num_counts, std::int64_t{0}) <= source.num_entries;
  };
  return fit(source.rank_counts, shape.num_ranks) && fit(source.expert_counts, shape.num_experts);
}

ExpertGroups group_experts(const RouteShape& shape, AllCounts sources) {
  ExpertGroups groups;
  groups.num_rows.assign(shape.num_experts, 0);
  for (const SourceCounts& source : sources) {
    for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
      groups.num_rows[expert] += source.expert_counts[expert];
    }
  }
  groups.first_rows.assign(shape.num_experts, 0);
  std::vector<std::int64_t> next_row(shape.num_ranks, 0);
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
    std::int64_t& next = next_row[shape.owner(expert)];
    groups.first_rows[expert] = next;
    next += shape.layout == Layout::kSlab ? shape.slab_capacity
                                          : aligned_group_rows(groups.num_rows[expert], shape.expert_alignment);
  }
  return groups;
}

std::int64_t rows_on_rank(const RouteShape& shape, AllCounts sources, const ExpertGroups& groups, std::size_t rank) {
  std::int64_t rows = 0;
  if (shape.by_rank()) {
    for (const SourceCounts& source : sources) rows += source.rank_counts[rank];
    return rows;
  }
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
    if (shape.owner(expert) != rank) continue;
    rows += shape.layout == Layout::kSlab ? shape.slab_capacity
                                          : aligned_group_rows(groups.num_rows[expert], shape.expert_alignment);
  }
  return rows;
}

std::int64_t rows_from_source(const RouteShape& shape, const SourceCounts& source, std::size_t rank) {
  if (shape.by_rank()) return source.rank_counts[rank];
  std::int64_t rows = 0;
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
    if (shape.owner(expert) == rank) rows += source.expert_counts[expert];
  }
  return rows;
}

Status too_many_rows(std::int64_t rank, std::int64_t num_rows, std::int64_t max_recv_rows) {
  const bool given = max_recv_rows > 0;
  return Status(ErrorCode::kCapacity,
                fmt::format("route: rank {} would receive {} rows but {} is {}; {}", rank, num_rows,
                            given ? "max_recv_rows" : "the most that one rank can hold", row_limit(max_recv_rows),
                            given ? "raise it to at least that, or set 0 to size outputs after route"
                                  : "use smaller batches or more ranks"),
                static_cast<int>(rank));
}

Status full_slab(std::int64_t rank, std::int64_t expert, std::int64_t num_rows, std::int64_t slab_capacity) {
  return Status(ErrorCode::kCapacity,
                fmt::format("route: rank {} would receive {} rows for expert {} but slab_capacity is {}; raise it to "
                            "at least {}",
                            rank, num_rows, expert, slab_capacity, num_rows),
                static_cast<int>(rank));
}

Status check_capacity(const RouteShape& shape, AllCounts sources, const ExpertGroups& groups) {
  if (shape.layout == Layout::kSlab) {
    for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
      if (groups.num_rows[expert] <= shape.slab_capacity) continue;
      return full_slab(static_cast<std::int64_t>(shape.owner(expert)), static_cast<std::int64_t>(expert),
                       groups.num_rows[expert], shape.slab_capacity);
    }
  }
  for (std::size_t rank = 0; rank < shape.num_ranks; ++rank) {
    const std::int64_t rows = rows_on_rank(shape, sources, groups, rank);
    if (rows <= row_limit(sources[rank].max_recv_rows)) continue;
    return too_many_rows(static_cast<std::int64_t>(rank), rows, sources[rank].max_recv_rows);
  }
  return {};
}

TokenPlan place_tokens(const RouteShape& shape, AllCounts sources, const ExpertGroups& groups, std::size_t my_rank,
                       std::span<const std::int64_t> ids_in) {
  const std::size_t num_topk = shape.num_topk;
  const std::size_t num_tokens = ids_in.size() / num_topk;
  std::vector<std::int64_t> next_row = first_rows(shape, sources, groups, my_rank);
  std::vector<std::int32_t> current_row(next_row.size(), -1);
  LastToken visited(next_row.size());
  TokenPlan plan;
  plan.slots.assign(ids_in.size(), -1);
  plan.first_destination.assign(num_tokens + 1, 0);
  plan.destinations.resize(ids_in.size());
  plan.num_rows_to_rank.assign(shape.num_ranks, 0);
  // Plain pointers: the compiler cannot know that the stores below do not modify the vectors themselves.
  const std::int64_t* const ids = ids_in.data();
  const std::int32_t* const owners = shape.expert_to_rank.data();
  const bool by_rank = shape.by_rank();
  std::int32_t* const slots = plan.slots.data();
  std::int64_t* const num_rows_to_rank = plan.num_rows_to_rank.data();
  Destination* const destinations = plan.destinations.data();
  std::array<std::uint64_t, kMaxTopk> packed;
  std::size_t num_destinations = 0;
  for (std::size_t token = 0; token < num_tokens; ++token) {
    std::size_t num_packed = 0;
    for (std::size_t topk = 0; topk < num_topk; ++topk) {
      const std::int64_t id = ids[token * num_topk + topk];
      if (id < 0) continue;
      const auto rank = static_cast<std::size_t>(owners[id]);
      const std::size_t run = by_rank ? rank : to_size(id);
      const unsigned first = visited.first_visit(run, static_cast<std::int32_t>(token));
      const std::int32_t row = first != 0 ? static_cast<std::int32_t>(next_row[run]) : current_row[run];
      current_row[run] = row;
      next_row[run] += first;
      num_rows_to_rank[rank] += first;
      slots[token * num_topk + topk] = row;
      packed[num_packed++] = pack_destination(rank, row, topk);
    }
    sort_destinations(std::span(packed.data(), num_packed), destinations + num_destinations);
    num_destinations += num_packed;
    plan.first_destination[token + 1] = static_cast<std::int32_t>(num_destinations);
  }
  plan.destinations.resize(num_destinations);
  return plan;
}

}  // namespace ferry::plan
