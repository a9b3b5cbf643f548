#include <algorithm>
#include <string>

#include "oracle/oracle.hpp"

namespace ferry::oracle {
namespace {

Status invalid(const std::string& what) { return {ErrorCode::kInvalidArgument, "oracle: " + what}; }

Status capacity(const std::string& what) { return {ErrorCode::kCapacity, "oracle: " + what}; }

Status validate(const World& world) {
  const RouteOptions& options = world.options;
  if (world.num_ranks < 1 || world.ranks.size() != static_cast<std::size_t>(world.num_ranks))
    return invalid("num_ranks and ranks disagree");
  if (world.ranks_per_node < 1 || world.num_ranks % world.ranks_per_node != 0) return invalid("ranks_per_node");
  if (world.num_topk < 1 || world.num_topk > kMaxTopk) return invalid("num_topk");
  if (options.num_experts < 1) return invalid("num_experts");
  if (options.placement.present()) return invalid("tokens have not picked their homes");
  if (options.layout == Layout::kExperts && options.expert_alignment < 1) return invalid("expert_alignment");
  if (options.layout == Layout::kSlab && options.slab_capacity < 1) return invalid("slab_capacity");
  if (!options.expert_to_rank.empty()) {
    if (options.expert_to_rank.size() != static_cast<std::size_t>(options.num_experts))
      return invalid("expert_to_rank does not have num_experts entries");
    for (std::int32_t rank : options.expert_to_rank)
      if (rank < 0 || rank >= world.num_ranks) return invalid("expert_to_rank has an entry that is not a rank");
  }
  if (!world.max_recv_rows.empty() && world.max_recv_rows.size() != world.ranks.size())
    return invalid("max_recv_rows does not have num_ranks entries");
  for (std::int64_t rows : world.max_recv_rows)
    if (rows < 0 || (rows != 0 && options.layout == Layout::kSlab)) return invalid("max_recv_rows");
  for (const RankTokens& tokens : world.ranks) {
    const auto num_entries = static_cast<std::size_t>(tokens.num_tokens * world.num_topk);
    if (tokens.topk_idx.size() != num_entries) return invalid("topk_idx is not [T, K]");
    if (!tokens.topk_weights.empty() && tokens.topk_weights.size() != num_entries)
      return invalid("topk_weights is not [T, K]");
    for (std::int64_t id : tokens.topk_idx)
      if (id < -1 || id >= options.num_experts) return invalid("expert id " + std::to_string(id));
  }
  return {};
}

/// Calls `visit(source_rank, token, entries of the token)` in the order of rows: by source rank, then by token.
template <typename Visit>
void for_each_token(const World& world, Visit visit) {
  for (int source_rank = 0; source_rank < world.num_ranks; ++source_rank) {
    const RankTokens& tokens = world.ranks[static_cast<std::size_t>(source_rank)];
    for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
      visit(source_rank, token, tokens.topk_idx.data() + token * world.num_topk);
    }
  }
}

bool names(const std::int64_t* ids, int num_topk, std::int64_t expert) {
  return std::find(ids, ids + num_topk, expert) != ids + num_topk;
}

/// Puts one token into one row of rank `dst_rank`; `is_here(k)` selects the entries that the row represents.
template <typename IsHere>
void place(const World& world, std::vector<RankRouting>& routings, int dst_rank, std::int64_t row, int source_rank,
           std::int64_t token, IsHere is_here) {
  RankRouting& receiver = routings[static_cast<std::size_t>(dst_rank)];
  RankRouting& sender = routings[static_cast<std::size_t>(source_rank)];
  if (static_cast<std::int64_t>(receiver.source.size()) <= row)
    receiver.source.resize(static_cast<std::size_t>(row) + 1);
  receiver.source[static_cast<std::size_t>(row)] = {source_rank, static_cast<std::int32_t>(token)};
  ++receiver.num_rows_from_rank[static_cast<std::size_t>(source_rank)];
  ++sender.num_rows_to_rank[static_cast<std::size_t>(dst_rank)];
  for (int k = 0; k < world.num_topk; ++k) {
    if (is_here(k)) sender.slots[static_cast<std::size_t>(token * world.num_topk + k)] = static_cast<std::int32_t>(row);
  }
}

/// Places the rows of rank `dst_rank` for kTokens. Returns N.
std::int64_t place_tokens(const World& world, const std::vector<std::int32_t>& owners, int dst_rank,
                          std::vector<RankRouting>& routings) {
  std::int64_t row = 0;
  for_each_token(world, [&](int source_rank, std::int64_t token, const std::int64_t* ids) {
    const auto is_here = [&](int k) { return ids[k] >= 0 && owners[static_cast<std::size_t>(ids[k])] == dst_rank; };
    bool any = false;
    for (int k = 0; k < world.num_topk; ++k) any = any || is_here(k);
    if (any) place(world, routings, dst_rank, row++, source_rank, token, is_here);
  });
  return row;
}

/// Places the rows of rank `dst_rank` for kExperts and kSlab, whose groups start at `expert_row_offsets`.
void place_experts(const World& world, int dst_rank, std::vector<RankRouting>& routings) {
  RankRouting& receiver = routings[static_cast<std::size_t>(dst_rank)];
  for (std::size_t local = 0; local < receiver.local_expert_ids.size(); ++local) {
    const std::int64_t expert = receiver.local_expert_ids[local];
    std::int64_t row = receiver.expert_row_offsets[local];
    for_each_token(world, [&](int source_rank, std::int64_t token, const std::int64_t* ids) {
      if (!names(ids, world.num_topk, expert)) return;
      place(world, routings, dst_rank, row++, source_rank, token, [&](int k) { return ids[k] == expert; });
    });
  }
}

}  // namespace

std::vector<std::int32_t> expert_owners(const World& world) {
  if (!world.options.expert_to_rank.empty()) return world.options.expert_to_rank;
  const std::int64_t num_experts = world.options.num_experts;
  std::vector<std::int32_t> owners(static_cast<std::size_t>(num_experts));
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    const std::int64_t first = rank * num_experts / world.num_ranks;
    const std::int64_t last = (rank + 1) * num_experts / world.num_ranks;
    for (std::int64_t expert = first; expert < last; ++expert) owners[static_cast<std::size_t>(expert)] = rank;
  }
  return owners;
}

World without_ranks(const World& world, const std::vector<int>& masked) {
  const std::vector<std::int32_t> owners = expert_owners(world);
  World left = world;
  for (RankTokens& tokens : left.ranks) {
    for (std::int64_t& id : tokens.topk_idx) {
      if (id < 0) continue;
      const int owner = owners[static_cast<std::size_t>(id)];
      if (std::find(masked.begin(), masked.end(), owner) != masked.end()) id = -1;
    }
  }
  for (const int rank : masked) left.ranks[static_cast<std::size_t>(rank)] = {};
  return left;
}

Result<std::vector<RankRouting>> route(const World& world) {
  if (Status status = validate(world); !status.ok()) return status;
  const RouteOptions& options = world.options;
  const std::vector<std::int32_t> owners = expert_owners(world);
  const auto num_ranks = static_cast<std::size_t>(world.num_ranks);

  std::vector<RankRouting> routings(num_ranks);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    routings[rank].num_rows_from_rank.assign(num_ranks, 0);
    routings[rank].num_rows_to_rank.assign(num_ranks, 0);
    routings[rank].slots.assign(world.ranks[rank].topk_idx.size(), -1);
  }
  for (std::int64_t expert = 0; expert < options.num_experts; ++expert) {
    std::int32_t count = 0;
    for_each_token(world, [&](int, std::int64_t, const std::int64_t* ids) {
      if (names(ids, world.num_topk, expert)) ++count;
    });
    RankRouting& owner = routings[static_cast<std::size_t>(owners[static_cast<std::size_t>(expert)])];
    owner.local_expert_ids.push_back(static_cast<std::int32_t>(expert));
    owner.num_rows_per_local_expert.push_back(count);
  }

  for (int rank = 0; rank < world.num_ranks; ++rank) {
    RankRouting& routing = routings[static_cast<std::size_t>(rank)];
    if (options.layout == Layout::kTokens) {
      routing.num_used_rows = place_tokens(world, owners, rank, routings);
    } else {
      const bool slab = options.layout == Layout::kSlab;
      const std::int64_t alignment = options.expert_alignment;
      routing.expert_row_offsets.push_back(0);
      for (std::int32_t count : routing.num_rows_per_local_expert) {
        if (slab && count > options.slab_capacity) return capacity("slab of rank " + std::to_string(rank));
        const std::int64_t group_rows = slab ? options.slab_capacity : (count + alignment - 1) / alignment * alignment;
        routing.expert_row_offsets.push_back(routing.expert_row_offsets.back() + group_rows);
      }
      routing.num_used_rows = routing.expert_row_offsets.back();
      place_experts(world, rank, routings);
    }
    routing.source.resize(static_cast<std::size_t>(routing.num_used_rows));

    const std::int64_t max_rows = world.max_recv_rows.empty() ? 0 : world.max_recv_rows[static_cast<std::size_t>(rank)];
    if (max_rows != 0 && routing.num_used_rows > max_rows) return capacity("rows of rank " + std::to_string(rank));
    routing.num_recv_rows = max_rows != 0 ? max_rows : routing.num_used_rows;
  }
  return routings;
}

std::vector<SourceRange> source_ranges(const World& world, const RankRouting& routing) {
  std::vector<SourceRange> ranges;
  for (std::size_t local = 0; local < routing.local_expert_ids.size(); ++local) {
    std::int32_t next = 0;
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      SourceRange range{0, next};
      for (std::int64_t row = routing.expert_row_offsets[local]; row < routing.expert_row_offsets[local + 1]; ++row) {
        if (routing.source[static_cast<std::size_t>(row)].rank == rank) ++range.num_rows;
      }
      next += range.num_rows;
      ranges.push_back(range);
    }
  }
  return ranges;
}

}  // namespace ferry::oracle
