#include "plan/route_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <utility>

#include "plan/slots.hpp"

namespace ferry::plan {
namespace {

/// Last token that visited each run, which needs no clearing between tokens. first_visit returns a number, because
/// expert choices are random and a branch on them would be mispredicted every other time.
class LastToken {
 public:
  explicit LastToken(std::size_t num_runs) : last_(num_runs, -1) {}
  /// 1 the first time `token` visits `run`, then 0; tokens must ascend.
  unsigned first_visit(std::size_t run, std::int32_t token) {
    const unsigned first = last_[run] != token ? 1U : 0U;
    last_[run] = token;
    return first;
  }

 private:
  std::vector<std::int32_t> last_;
};

/// Number of bits of a key for the index in [K].
constexpr int kTopkBits = 5;
static_assert(kMaxTopk <= 1 << kTopkBits);

/// Destinations of some tokens in the order of their discovery, with keys that sort like (rank, row, topk).
struct FoundDestinations {
  /// Number of tokens collected before any is sorted: by then their stores are done, and the next tokens' loads under
  /// way.
  static constexpr std::size_t kTokens = 32;
  struct Token {
    std::array<std::int32_t, kMaxTopk> keys;
    std::array<Destination, kMaxTopk> destinations;
    std::size_t count;
  };
  std::array<Token, kTokens> tokens{};
};

/// Writes a token's destinations to `out` in the order of their keys, which all differ. Counts the smaller keys instead
/// of comparing and moving, because branches on random choices are mispredicted; with a fixed number of lanes the
/// compiler counts for many keys at once.
template <std::size_t kLanes>
void write_sorted(const FoundDestinations::Token& token, Destination* out) {
  std::array<std::int32_t, kLanes> positions{};
  for (std::size_t i = 0; i < token.count; ++i) {
    const std::int32_t key = token.keys[i];
    for (std::size_t lane = 0; lane < kLanes; ++lane) positions[lane] += key < token.keys[lane] ? 1 : 0;
  }
  for (std::size_t i = 0; i < token.count; ++i) out[positions[i]] = token.destinations[i];
}

/// Run of each expert's entries; the last element, for entries without an expert, is the number of runs.
std::vector<std::int32_t> runs_of_experts(const RouteShape& shape) {
  std::vector<std::int32_t> runs(shape.num_experts + 1);
  if (shape.by_rank()) {
    std::copy_n(shape.expert_to_rank.begin(), shape.num_experts, runs.begin());
  } else {
    std::iota(runs.begin(), runs.end(), 0);
  }
  runs[shape.num_experts] = static_cast<std::int32_t>(shape.num_runs());
  return runs;
}

/// Sort number of each expert: entries sort by it as by (rank, row). Groups of one rank follow each other in ascending
/// expert order.
std::vector<std::int32_t> row_order(const RouteShape& shape) {
  std::vector<std::int32_t> order(shape.expert_to_rank.begin(),
                                  shape.expert_to_rank.begin() + static_cast<std::ptrdiff_t>(shape.num_experts));
  if (shape.by_rank()) return order;
  std::vector<std::int32_t> next(shape.num_ranks + 1, 0);
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) ++next[shape.owner(expert) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) order[expert] = next[shape.owner(expert)]++;
  return order;
}

/// Progress of a source in a run.
struct RunPosition {
  std::int32_t last_token;  ///< last token that has a row there
  std::int32_t next_row;
};

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
  // An entry without an expert is counted for an extra rank and an extra expert, which are dropped below.
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

void list_run_tokens(const RouteShape& shape, std::span<const std::int64_t> ids_in, const std::int32_t* counts,
                     std::int32_t* tokens) {
  const std::int32_t num_tokens = count_of_tokens(shape, ids_in);
  const std::vector<std::int32_t> run_table = runs_of_experts(shape);
  // Tokens without an expert are listed last, in entries that no run needs.
  std::vector<std::int64_t> next_table(shape.num_runs() + 1, 0);
  std::partial_sum(counts, counts + shape.num_runs(), next_table.begin() + 1, std::plus<std::int64_t>());
  LastToken visited(shape.num_runs() + 1);
  // Plain pointers and locals: the compiler cannot prove that the stores below do not modify the vectors themselves.
  const std::int64_t* ids = ids_in.data();
  const std::int32_t* const runs = run_table.data();
  std::int64_t* const next = next_table.data();
  const std::size_t num_experts = shape.num_experts;
  const std::size_t num_topk = shape.num_topk;
  for (std::int32_t token = 0; token < num_tokens; ++token, ids += num_topk) {
    for (std::size_t topk = 0; topk < num_topk; ++topk) {
      const auto run = static_cast<std::size_t>(runs[ids[topk] < 0 ? num_experts : to_size(ids[topk])]);
      const auto first = static_cast<std::int64_t>(visited.first_visit(run, token));
      tokens[next[run] + first - 1] = token;  // on repeated visits it rewrites the same entry
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
                       std::span<const std::int64_t> ids_in, TokenPlan plan) {
  const std::size_t num_topk = shape.num_topk;
  const std::size_t num_tokens = ids_in.size() / num_topk;
  std::vector<RunPosition> position_table;
  for (const std::int64_t row : first_rows(shape, sources, groups, my_rank)) {
    position_table.push_back({-1, static_cast<std::int32_t>(row)});
  }
  const std::vector<std::int32_t> order_table = row_order(shape);
  plan.slots.resize(ids_in.size());
  plan.first_destination.resize(num_tokens + 1);
  plan.first_destination[0] = 0;
  plan.destinations.resize(ids_in.size());
  // Plain pointers, for the same reason as in list_run_tokens.
  const std::int64_t* ids = ids_in.data();
  const std::int32_t* const owners = shape.expert_to_rank.data();
  const std::int32_t* const order = order_table.data();
  const bool by_rank = shape.by_rank();
  RunPosition* const positions = position_table.data();
  std::int32_t* slots = plan.slots.data();
  std::int32_t* const first_destination = plan.first_destination.data();
  Destination* destinations = plan.destinations.data();
  const auto write = num_topk <= 8 ? write_sorted<8> : num_topk <= 16 ? write_sorted<16> : write_sorted<kMaxTopk>;
  FoundDestinations found;
  for (std::size_t begin = 0; begin < num_tokens; begin += FoundDestinations::kTokens) {
    const std::size_t end = std::min(begin + FoundDestinations::kTokens, num_tokens);
    for (std::size_t token = begin; token < end; ++token, ids += num_topk, slots += num_topk) {
      FoundDestinations::Token& one = found.tokens[token - begin];
      std::size_t count = 0;
      for (std::size_t topk = 0; topk < num_topk; ++topk) {
        const std::int64_t id = ids[topk];
        if (id < 0) {
          slots[topk] = -1;
          continue;
        }
        const std::int32_t rank = owners[id];
        RunPosition& run = positions[by_rank ? rank : id];
        const std::int32_t first = run.last_token != static_cast<std::int32_t>(token) ? 1 : 0;
        run.last_token = static_cast<std::int32_t>(token);
        run.next_row += first;
        const std::int32_t row = run.next_row - 1;
        slots[topk] = row;
        one.keys[count] = order[id] << kTopkBits | static_cast<std::int32_t>(topk);
        one.destinations[count] = {row, static_cast<std::int16_t>(rank), static_cast<std::uint8_t>(topk),
                                   static_cast<std::uint8_t>(first)};
        ++count;
      }
      one.count = count;
    }
    for (std::size_t token = begin; token < end; ++token) {
      const FoundDestinations::Token& one = found.tokens[token - begin];
      write(one, destinations);
      destinations += one.count;
      first_destination[token + 1] = static_cast<std::int32_t>(destinations - plan.destinations.data());
    }
  }
  plan.destinations.resize(to_size(first_destination[num_tokens]));
  plan.num_rows_to_rank.clear();
  for (std::size_t rank = 0; rank < shape.num_ranks; ++rank) {
    plan.num_rows_to_rank.push_back(rows_from_source(shape, sources[my_rank], rank));
  }
  return plan;
}

}  // namespace ferry::plan
