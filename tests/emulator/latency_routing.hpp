#ifndef FERRY_TESTS_EMULATOR_LATENCY_ROUTING_HPP
#define FERRY_TESTS_EMULATOR_LATENCY_ROUTING_HPP

/// The tables of a Routing of latency mode on all ranks, and what the oracle says must be in them.

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "emulator/latency_ranks.hpp"
#include "support/random_world.hpp"

namespace ferry::emulator {

/// A small world of layout kSlab, with weights.
test::WorldSpec draw_latency_world(std::mt19937_64& random);

/// A world of layout kSlab that all ranks route, and the tables of each.
class LatencyRouting {
 public:
  /// `counts`: what each rank's num_tokens_view says, perhaps out of range; empty: no rank has one. Tokens that do not
  /// count lose their experts in the world. `masked`: by the ranks that are checked.
  LatencyRouting(LatencyRanks& ranks, oracle::World world, std::int64_t max_tokens,
                 std::vector<std::int32_t> counts = {}, std::vector<int> masked = {});

  /// What the ranks give to dispatch.
  const oracle::World& given() const { return given_; }
  /// That, after the tokens have picked their homes.
  const oracle::World& world() const { return world_; }
  /// What is left of it without the masked ranks.
  const oracle::World& left() const { return left_; }
  const std::vector<oracle::RankRouting>& routings() const { return routings_; }
  const std::vector<std::int32_t>& owners() const { return owners_; }
  std::int64_t max_tokens() const { return max_tokens_; }
  std::int64_t num_tokens(int rank) const { return world_.ranks[static_cast<std::size_t>(rank)].num_tokens; }
  /// Null where the rank gives none.
  const std::int32_t* count(int rank) const {
    return counts_.empty() ? nullptr : &counts_[static_cast<std::size_t>(rank)];
  }
  /// Tokens that count.
  std::int64_t num_counted(int rank) const {
    return count(rank) == nullptr ? num_tokens(rank) : std::clamp<std::int64_t>(*count(rank), 0, num_tokens(rank));
  }
  /// Of those, tokens that the ranks that are checked hear of.
  std::int64_t num_received(int rank) const { return is_masked(rank) ? 0 : num_counted(rank); }
  std::int64_t num_local_experts(int rank) const {
    return static_cast<std::int64_t>(routings_[static_cast<std::size_t>(rank)].local_expert_ids.size());
  }
  /// Rows of the slab.
  std::int64_t num_rows(int rank) const { return num_local_experts(rank) * world_.options.slab_capacity; }
  bool has_weights() const { return has_weights_; }

  const cuda::LatencyTables& tables(int rank) const { return tables_[static_cast<std::size_t>(rank)]; }
  /// What all calls on this Routing have alike. `num_blocks` and `agreement` are the caller's.
  cuda::LatencyParams params(LatencyRanks& ranks, int rank) const;

  /// Ranks that a later call masks: of its own tokens a rank then marks their entries.
  void mask_later(std::vector<int> ranks) { masked_later_ = std::move(ranks); }
  /// Writes what dispatch would.
  void fill(int rank) const;
  /// The first of the tables in which what dispatch has written is not what it must be; "" if all are.
  std::string compare(int rank) const;

 private:
  cuda::LatencyTables::Shape shape_of(int rank) const;
  void fill_tokens(int rank, const cuda::LatencyTables& tables) const;
  void fill_rows(int rank, const cuda::LatencyTables& tables) const;
  void fill_items(int rank, const cuda::LatencyTables& tables) const;
  /// An expert's index among those of its rank.
  std::int32_t local_index(std::int64_t expert) const;

  /// The world as the ranks' counts make it.
  oracle::World counted(oracle::World world) const;

  bool is_masked(int rank) const;
  bool is_lost(int rank) const;

  std::vector<std::int32_t> counts_;
  std::vector<int> masked_;
  std::vector<int> masked_later_;
  oracle::World given_;
  oracle::World world_;
  oracle::World left_;
  std::vector<oracle::RankRouting> routings_;
  std::vector<std::int32_t> owners_;
  std::int64_t max_tokens_ = 0;
  bool has_weights_ = false;
  std::vector<DeviceMemory> memory_;
  std::vector<cuda::LatencyTables> tables_;
};

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_LATENCY_ROUTING_HPP
