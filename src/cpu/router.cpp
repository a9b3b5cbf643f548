#include "cpu/router.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <span>

#include "plan/slots.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

/// Remembers the last token that touched each of a set of runs: "has this token been here?" without clearing. Says so
/// as a number, because routers' choices are random and a branch on them would be mispredicted every other time.
class LastToken {
 public:
  explicit LastToken(std::size_t num_runs) : last_(num_runs, -1) {}
  /// 1 the first time `token` asks about `run`, then 0; tokens come in ascending order.
  unsigned first_visit(std::size_t run, std::int32_t token) {
    const unsigned first = last_[run] != token ? 1U : 0U;
    last_[run] = token;
    return first;
  }

 private:
  std::vector<std::int32_t> last_;
};

/// A place as one number that orders as (rank, row, topk) does.
std::uint64_t pack_place(std::size_t rank, std::int32_t row, std::size_t topk) {
  return static_cast<std::uint64_t>(rank) << 48 | static_cast<std::uint64_t>(static_cast<std::uint32_t>(row)) << 8 |
         static_cast<std::uint64_t>(topk);
}

/// Sort a token's places, all different. Counts smaller ones instead of comparing and moving, again to avoid branches:
/// 8 places cost 64 comparisons.
void sort_places(std::span<const std::uint64_t> packed, Place* out) {
  std::array<std::uint64_t, kMaxTopk> sorted;
  for (const std::uint64_t place : packed) {
    std::size_t position = 0;
    for (const std::uint64_t other : packed) position += other < place ? 1U : 0U;
    sorted[position] = place;
  }
  std::uint64_t previous_row = ~std::uint64_t{0};
  for (std::size_t i = 0; i < packed.size(); ++i) {
    const std::uint64_t rank_and_row = sorted[i] >> 8;
    out[i] = {static_cast<std::int32_t>(rank_and_row & 0xFFFFFFFFU), static_cast<std::int16_t>(rank_and_row >> 40),
              static_cast<std::uint8_t>(sorted[i] & 0xFFU), rank_and_row != previous_row};
    previous_row = rank_and_row;
  }
}

template <typename Id>
void copy_ids(const RouteCall& call, std::vector<std::int64_t>& ids) {
  const auto* from = static_cast<const Id*>(call.topk_idx.data);
  std::copy(from, from + ids.size(), ids.begin());
}

}  // namespace

Router::Router(const RouteCall& call, const Topology& topology, std::shared_ptr<CpuRouting> state)
    : call_(call),
      num_ranks_(to_size(topology.num_ranks)),
      num_experts_(to_size(call.options.num_experts)),
      my_rank_(to_size(topology.rank)),
      by_rank_(call.options.layout == Layout::kTokens),
      state_(std::move(state)) {}

void Router::copy_inputs() {
  state_->num_tokens = call_.num_tokens;
  state_->num_topk = call_.num_topk;
  state_->num_experts = call_.options.num_experts;
  state_->layout = call_.options.layout;
  state_->ids.resize(to_size(call_.num_tokens * call_.num_topk));
  if (call_.topk_idx.dtype == DType::kInt32) {
    copy_ids<std::int32_t>(call_, state_->ids);
  } else {
    copy_ids<std::int64_t>(call_, state_->ids);
  }
  if (call_.topk_weights.present()) {
    const auto* weights = static_cast<const float*>(call_.topk_weights.data);
    state_->weights.assign(weights, weights + state_->ids.size());
  }
}

void Router::fill_counts(std::int32_t* rank_counts_out, std::int32_t* expert_counts_out) const {
  // An entry without an expert counts for a rank and an expert that do not exist.
  const auto num_topk = to_size(call_.num_topk);
  const auto expert_of = [this](std::size_t entry) {
    const std::int64_t id = state_->ids[entry];
    return id < 0 ? num_experts_ : to_size(id);
  };
  std::vector<std::int32_t> owners(num_experts_ + 1, static_cast<std::int32_t>(num_ranks_));
  std::copy_n(call_.expert_to_rank.begin(), num_experts_, owners.begin());
  std::vector<std::int32_t> rank_counts(num_ranks_ + 1, 0);
  std::vector<std::int32_t> expert_counts(num_experts_ + 1, 0);
  LastToken ranks(num_ranks_ + 1);
  LastToken experts(num_experts_ + 1);
  const auto num_tokens = static_cast<std::int32_t>(call_.num_tokens);
  for (std::int32_t token = 0; token < num_tokens; ++token) {
    for (std::size_t entry = to_size(token) * num_topk; entry < (to_size(token) + 1) * num_topk; ++entry) {
      const std::size_t expert = expert_of(entry);
      const std::size_t rank = to_size(owners[expert]);
      rank_counts[rank] += static_cast<std::int32_t>(ranks.first_visit(rank, token));
      expert_counts[expert] += static_cast<std::int32_t>(experts.first_visit(expert, token));
    }
  }
  std::copy_n(rank_counts.begin(), num_ranks_, rank_counts_out);
  std::copy_n(expert_counts.begin(), num_experts_, expert_counts_out);
}

void Router::fill_tokens(const std::int32_t* counts, std::int32_t* tokens) const {
  const auto num_topk = to_size(call_.num_topk);
  const auto num_tokens = static_cast<std::int32_t>(call_.num_tokens);
  const std::size_t nowhere_run = num_runs();
  std::vector<std::size_t> next(nowhere_run + 1, 0);
  for (std::size_t run = 0; run < nowhere_run; ++run) next[run + 1] = next[run] + static_cast<std::size_t>(counts[run]);
  LastToken visited(nowhere_run + 1);
  std::int32_t nowhere = 0;
  for (std::int32_t token = 0; token < num_tokens; ++token) {
    for (std::size_t entry = to_size(token) * num_topk; entry < (to_size(token) + 1) * num_topk; ++entry) {
      const std::int64_t id = state_->ids[entry];
      const std::size_t run = id < 0 ? nowhere_run : by_rank_ ? owner(to_size(id)) : to_size(id);
      const unsigned first = visited.first_visit(run, token);
      *(first != 0 && run != nowhere_run ? tokens + next[run] : &nowhere) = token;
      next[run] += first;
    }
  }
}

bool Router::add_source(const SourceCounts& source) {
  sources_.push_back(source);
  state_->num_tokens_of_rank.push_back(source.num_entries / call_.num_topk);
  const auto acceptable = [&source](const std::int32_t* counts, std::size_t num_counts) {
    const bool negative = std::any_of(counts, counts + num_counts, [](std::int32_t count) { return count < 0; });
    return !negative && std::accumulate(counts, counts + num_counts, std::int64_t{0}) <= source.num_entries;
  };
  return acceptable(source.rank_counts, num_ranks_) && acceptable(source.expert_counts, num_experts_);
}

void Router::sum_sources() {
  expert_totals_.assign(num_experts_, 0);
  for (const SourceCounts& source : sources_) {
    for (std::size_t expert = 0; expert < num_experts_; ++expert)
      expert_totals_[expert] += source.expert_counts[expert];
  }
  // Groups of one owner follow each other in ascending expert order.
  expert_first_row_.assign(num_experts_, 0);
  std::vector<std::int64_t> next_row(num_ranks_, 0);
  for (std::size_t expert = 0; expert < num_experts_; ++expert) {
    std::int64_t& next = next_row[owner(expert)];
    expert_first_row_[expert] = next;
    next += call_.options.layout == Layout::kSlab
                ? call_.options.slab_capacity
                : plan::aligned_group_rows(expert_totals_[expert], call_.options.expert_alignment);
  }
}

std::int64_t Router::local_experts_of(std::size_t rank) const {
  return std::count(call_.expert_to_rank.begin(), call_.expert_to_rank.end(), static_cast<std::int32_t>(rank));
}

std::int64_t Router::rows_of(std::size_t rank) const {
  std::int64_t rows = 0;
  if (by_rank_) {
    for (const SourceCounts& source : sources_) rows += source.rank_counts[rank];
    return rows;
  }
  if (call_.options.layout == Layout::kSlab) {
    return plan::slab_first_row(local_experts_of(rank), call_.options.slab_capacity);
  }
  for (std::size_t expert = 0; expert < num_experts_; ++expert) {
    if (owner(expert) == rank) {
      rows += plan::aligned_group_rows(expert_totals_[expert], call_.options.expert_alignment);
    }
  }
  return rows;
}

Status Router::check_capacity() const {
  if (call_.options.layout == Layout::kSlab) {
    for (std::size_t expert = 0; expert < num_experts_; ++expert) {
      if (expert_totals_[expert] <= call_.options.slab_capacity) continue;
      return Status(
          ErrorCode::kCapacity,
          fmt::format("route: rank {} would receive {} rows for expert {} but slab_capacity is {}; raise it to at "
                      "least {}",
                      owner(expert), expert_totals_[expert], expert, call_.options.slab_capacity,
                      expert_totals_[expert]),
          static_cast<int>(owner(expert)));
    }
  }
  for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
    const std::int64_t rows = rows_of(rank);
    const std::int64_t given = sources_[rank].max_recv_rows;
    const std::int64_t limit = given > 0 ? given : std::numeric_limits<std::int32_t>::max();
    if (rows <= limit) continue;
    return Status(ErrorCode::kCapacity,
                  fmt::format("route: rank {} would receive {} rows but {} is {}; {}", rank, rows,
                              given > 0 ? "max_recv_rows" : "the most that one rank can hold", limit,
                              given > 0 ? "raise it to at least that, or set 0 to size outputs after route"
                                        : "use smaller batches or more ranks"),
                  static_cast<int>(rank));
  }
  return {};
}

std::vector<std::int64_t> Router::first_rows() const {
  std::vector<std::int64_t> rows(by_rank_ ? num_ranks_ : num_experts_, 0);
  if (!by_rank_) rows = expert_first_row_;
  for (std::size_t source = 0; source < my_rank_; ++source) {
    const std::int32_t* counts = by_rank_ ? sources_[source].rank_counts : sources_[source].expert_counts;
    for (std::size_t run = 0; run < rows.size(); ++run) rows[run] += counts[run];
  }
  return rows;
}

void Router::place_tokens() {
  const auto num_topk = to_size(call_.num_topk);
  const auto num_tokens = to_size(call_.num_tokens);
  std::vector<std::int64_t> next_row = first_rows();
  std::vector<std::int32_t> current_row(next_row.size(), -1);
  LastToken visited(next_row.size());
  state_->slot_table.assign(num_tokens * num_topk, -1);
  state_->first_place.assign(num_tokens + 1, 0);
  state_->places.resize(num_tokens * num_topk);
  state_->num_rows_to_rank.assign(num_ranks_, 0);
  // Plain pointers: the compiler cannot know that the stores below leave the vectors' own fields alone.
  const std::int64_t* const ids = state_->ids.data();
  const std::int32_t* const owners = call_.expert_to_rank.data();
  std::int32_t* const slots = state_->slot_table.data();
  std::int64_t* const num_rows_to_rank = state_->num_rows_to_rank.data();
  Place* const places = state_->places.data();
  std::array<std::uint64_t, kMaxTopk> packed;
  std::size_t num_places = 0;
  for (std::size_t token = 0; token < num_tokens; ++token) {
    std::size_t num_packed = 0;
    for (std::size_t topk = 0; topk < num_topk; ++topk) {
      const std::int64_t id = ids[token * num_topk + topk];
      if (id < 0) continue;
      const auto rank = static_cast<std::size_t>(owners[id]);
      const std::size_t run = by_rank_ ? rank : to_size(id);
      const unsigned first = visited.first_visit(run, static_cast<std::int32_t>(token));
      const std::int32_t row = first != 0 ? static_cast<std::int32_t>(next_row[run]) : current_row[run];
      current_row[run] = row;
      next_row[run] += first;
      num_rows_to_rank[rank] += first;
      slots[token * num_topk + topk] = row;
      packed[num_packed++] = pack_place(rank, row, topk);
    }
    sort_places(std::span(packed.data(), num_packed), places + num_places);
    num_places += num_packed;
    state_->first_place[token + 1] = static_cast<std::int32_t>(num_places);
  }
  state_->places.resize(num_places);
}

std::int64_t Router::rows_between(std::size_t source_rank, std::size_t rank) const {
  const SourceCounts& source = sources_[source_rank];
  if (by_rank_) return source.rank_counts[rank];
  std::int64_t rows = 0;
  for (std::size_t expert = 0; expert < num_experts_; ++expert) {
    if (owner(expert) == rank) rows += source.expert_counts[expert];
  }
  return rows;
}

void Router::begin_sources() {
  for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
    state_->num_rows_on_rank.push_back(rows_of(rank));
    state_->num_rows_from_rank.push_back(rows_between(rank, my_rank_));
  }
  state_->num_used_rows = state_->num_rows_on_rank[my_rank_];
  state_->source_table.assign(to_size(state_->num_used_rows) * 2, -1);
}

void Router::name_sources() {
  std::vector<std::int64_t> next_row(by_rank_ ? 1 : num_experts_, 0);
  if (!by_rank_) next_row = expert_first_row_;
  for (std::size_t source = 0; source < num_ranks_; ++source) {
    const std::int32_t* const counts = by_rank_ ? sources_[source].rank_counts : sources_[source].expert_counts;
    for (std::size_t run = 0; run < num_runs(); ++run) {
      if ((by_rank_ ? run : owner(run)) != my_rank_) continue;
      std::int64_t& row = next_row[by_rank_ ? 0 : run];
      for (std::int32_t i = 0; i < counts[run]; ++i, ++row) {
        state_->source_table[to_size(row) * 2] = static_cast<std::int32_t>(source);
      }
    }
  }
}

void Router::finish() {
  CpuRouting& state = *state_;
  state.local_expert.assign(num_experts_, -1);
  for (std::size_t expert = 0; expert < num_experts_; ++expert) {
    if (owner(expert) != my_rank_) continue;
    state.local_expert[expert] = static_cast<std::int32_t>(state.local_expert_ids.size());
    state.local_expert_ids.push_back(static_cast<std::int32_t>(expert));
    state.num_rows_per_local_expert.push_back(static_cast<std::int32_t>(expert_totals_[expert]));
    if (!by_rank_) state.expert_row_offsets.push_back(expert_first_row_[expert]);
  }
  if (!by_rank_) state.expert_row_offsets.push_back(state.num_used_rows);
  state.num_recv_rows = call_.options.max_recv_rows > 0 ? call_.options.max_recv_rows : state.num_used_rows;
  state.num_used_rows_i32 = static_cast<std::int32_t>(state.num_used_rows);

  state.num_used_rows_view = ConstTensorView(&state.num_used_rows_i32, DType::kInt32, {1});
  const auto num_local = static_cast<std::int64_t>(state.local_expert_ids.size());
  state.rows_per_expert_view = ConstTensorView(state.num_rows_per_local_expert.data(), DType::kInt32, {num_local});
  if (!by_rank_) {
    state.row_offsets_view = ConstTensorView(state.expert_row_offsets.data(), DType::kInt64, {num_local + 1});
  }
  state.slots = ConstTensorView(state.slot_table.data(), DType::kInt32, {state.num_tokens, state.num_topk});
  state.source = ConstTensorView(state.source_table.data(), DType::kInt32, {state.num_used_rows, 2});
  state.topk_idx = ConstTensorView(state.ids.data(), DType::kInt64, {state.num_tokens, state.num_topk});
  if (call_.topk_weights.present()) {
    state.topk_weights = ConstTensorView(state.weights.data(), DType::kFloat32, {state.num_tokens, state.num_topk});
  }
}

}  // namespace ferry::cpu
