#ifndef FERRY_TESTS_EMULATOR_LATENCY_ROUTING_HPP
#define FERRY_TESTS_EMULATOR_LATENCY_ROUTING_HPP

/// Tables of a Routing of latency mode on all ranks, and their expected contents from the oracle.

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "emulator/latency_ranks.hpp"
#include "support/random_world.hpp"

namespace ferry::emulator {

/// Draws a small world of layout kSlab, with weights.
test::WorldSpec draw_latency_world(std::mt19937_64& random);

/// A world of layout kSlab that all ranks route, and the tables of each.
class LatencyRouting {
 public:
  /// `counts`: value of each rank's num_tokens_view, perhaps out of range; empty: no rank has one. Tokens that do not
  /// count lose their experts in the world. `masked`: ranks masked by the checked ranks.
  LatencyRouting(LatencyRanks& ranks, oracle::World world, std::int64_t max_tokens,
                 std::vector<std::int32_t> counts = {}, std::vector<int> masked = {});

  /// World that the ranks pass to dispatch.
  const oracle::World& given() const { return given_; }
  /// The given world after the tokens have picked their homes.
  const oracle::World& world() const { return world_; }
  /// The world without the masked ranks.
  const oracle::World& left() const { return left_; }
  const std::vector<oracle::RankRouting>& routings() const { return routings_; }
  const std::vector<std::int32_t>& owners() const { return owners_; }
  std::int64_t max_tokens() const { return max_tokens_; }
  std::int64_t num_tokens(int rank) const { return world_.ranks[static_cast<std::size_t>(rank)].num_tokens; }
  /// Count of the rank; null if it has none.
  const std::int32_t* count(int rank) const {
    return counts_.empty() ? nullptr : &counts_[static_cast<std::size_t>(rank)];
  }
  /// Number of tokens that count.
  std::int64_t num_counted(int rank) const {
    return count(rank) == nullptr ? num_tokens(rank) : std::clamp<std::int64_t>(*count(rank), 0, num_tokens(rank));
  }
  /// Number of these tokens that the checked ranks receive.
  std::int64_t num_received(int rank) const { return is_masked(rank) ? 0 : num_counted(rank); }
  std::int64_t num_local_experts(int rank) const {
    return static_cast<std::int64_t>(routings_[static_cast<std::size_t>(rank)].local_expert_ids.size());
  }
  /// Rows of the slab.
  std::int64_t num_rows(int rank) const { return num_local_experts(rank) * world_.options.slab_capacity; }
  bool has_weights() const { return has_weights_; }

  const cuda::LatencyTables& tables(int rank) const { return tables_[static_cast<std::size_t>(rank)]; }
  /// Parameters common to all calls on this Routing. The caller sets `num_blocks` and `agreement`.
  cuda::LatencyParams params(LatencyRanks& ranks, int rank) const;

  /// Sets the ranks that a later call masks: each rank then marks its own tokens' entries for them.
  void mask_later(std::vector<int> ranks) { masked_later_ = std::move(ranks); }
  /// Writes the same tables as dispatch.
  void fill(int rank) const;
  /// Name of the first table whose contents differ from the expected ones; "" if all are right.
  std::string compare(int rank) const;

 private:
  cuda::LatencyTables::Shape shape_of(int rank) const;
  void fill_tokens(int rank, const cuda::LatencyTables& tables) const;
  void fill_rows(int rank, const cuda::LatencyTables& tables) const;
  void fill_items(int rank, const cuda::LatencyTables& tables) const;
  /// Index of an expert among those of its rank.
  std::int32_t local_index(std::int64_t expert) const;

  /// The world with the ranks' counts applied.
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
