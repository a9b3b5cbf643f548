#ifndef FERRY_TESTS_RANDOM_WORLD_HPP
#define FERRY_TESTS_RANDOM_WORLD_HPP

/// Seeded routings: the input of route on all ranks, drawn from a short description.

#include <cstdint>
#include <random>

#include "oracle/oracle.hpp"

namespace ferry::test {

enum class RoutingPattern {
  kRandom,      ///< distinct experts (as far as E allows), some entries without one
  kZipf,        ///< distinct experts, low ids far more often
  kOneHot,      ///< every token names the same expert; its other entries repeat it or are empty
  kNone,        ///< no token names any expert
  kDuplicates,  ///< drawn with repetition from three experts and "none"
};

enum class TokenCounts {
  kEven,      ///< max_tokens on every rank
  kUneven,    ///< any count up to max_tokens
  kSomeZero,  ///< no tokens on every other rank, starting with rank 0
  kAllZero,
};

struct WorldSpec {
  int num_ranks = 2;
  int ranks_per_node = 0;  ///< 0: all
  int num_topk = 2;
  std::int64_t num_experts = 8;
  std::int64_t max_tokens = 12;
  RoutingPattern pattern = RoutingPattern::kRandom;
  TokenCounts counts = TokenCounts::kEven;
  Layout layout = Layout::kTokens;
  std::int64_t expert_alignment = 1;
  std::int64_t spare_slab_rows = 0;   ///< kSlab: capacity beyond the rows of the busiest expert
  std::int64_t spare_recv_rows = -1;  ///< >= 0: max_recv_rows exceeds the need by this; -1: rows are known on the host
  std::int64_t fixed_rows = 0;        ///< > 0: max_recv_rows or, with kSlab, the capacity, for any routing
  bool custom_placement = false;      ///< experts on random ranks; a rank may own none
  std::int64_t num_replicas = -1;     ///< >= 0: a placement with this many more physical experts than E, some idle
  ReplicaChoice replica_choice = ReplicaChoice::kNearest;
  /// > 0: with num_replicas, allow_homeless is set and all homes of this many experts are taken away: alternately their
  /// physical experts are left idle or, which makes P smaller, removed.
  std::int64_t num_homeless = 0;
  bool weights = true;
  bool idle_tail = false;  ///< a random number of each rank's last tokens have no expert
  std::uint64_t seed = 1;
};

/// World of `spec`. Equal specs give equal worlds.
oracle::World make_world(const WorldSpec& spec);

/// Number of a rank's tokens up to the last one that has an expert.
std::int64_t num_counted_tokens(const oracle::RankTokens& tokens, int num_topk);

/// Draws every field at random, within the limits of a short test.
WorldSpec draw_world_spec(std::mt19937_64& random, int num_ranks);

}  // namespace ferry::test

#endif  // FERRY_TESTS_RANDOM_WORLD_HPP
