#ifndef FERRY_TESTS_RANDOM_WORLD_HPP
#define FERRY_TESTS_RANDOM_WORLD_HPP

/// Seeded routings: everything that route sees on all ranks, drawn from a short description.

#include <cstdint>
#include <random>

#include "oracle/oracle.hpp"

namespace ferry::test {

enum class RoutingPattern {
  kRandom,      ///< distinct experts (as far as E allows), some entries without
  kZipf,        ///< distinct experts, the low ids far more often
  kOneHot,      ///< every token names one and the same expert, and nothing else or the same again
  kNone,        ///< no token names any expert
  kDuplicates,  ///< drawn with repetition from three experts and "none"
};

enum class TokenCounts {
  kEven,      ///< max_tokens on every rank
  kUneven,    ///< anything up to max_tokens
  kSomeZero,  ///< none on every other rank, starting with rank 0
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
  std::int64_t spare_slab_rows = 0;   ///< kSlab: capacity beyond that of the busiest expert
  std::int64_t spare_recv_rows = -1;  ///< >= 0: max_recv_rows is this much more than needed; -1: known on the host
  std::int64_t fixed_rows = 0;        ///< > 0: max_recv_rows or, with kSlab, the capacity is this, whatever the routing
  bool custom_placement = false;      ///< experts on ranks at random; a rank may own none
  std::int64_t num_replicas = -1;     ///< >= 0: a placement of that many more physical experts than E; some idle
  ReplicaChoice replica_choice = ReplicaChoice::kNearest;
  bool weights = true;
  bool idle_tail = false;  ///< the last tokens of each rank, a random number of them, have no expert
  std::uint64_t seed = 1;
};

/// The world of `spec`. Equal specs give equal worlds.
oracle::World make_world(const WorldSpec& spec);

/// Tokens of a rank up to the last one that has an expert.
std::int64_t num_counted_tokens(const oracle::RankTokens& tokens, int num_topk);

/// As above, with every field drawn at random within what a short test can run.
WorldSpec draw_world_spec(std::mt19937_64& random, int num_ranks);

}  // namespace ferry::test

#endif  // FERRY_TESTS_RANDOM_WORLD_HPP
