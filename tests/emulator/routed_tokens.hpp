#ifndef FERRY_TESTS_EMULATOR_ROUTED_TOKENS_HPP
#define FERRY_TESTS_EMULATOR_ROUTED_TOKENS_HPP

/// Tokens of emulated GPU ranks of one node, what the oracle routes of them, and the tables that a route leaves in
/// device memory, for the kernels that move rows.

#include <cstdint>
#include <vector>

#include "cuda/call/routing_tables.hpp"
#include "emulator/node_ranks.hpp"
#include "oracle/oracle.hpp"

namespace ferry::emulator {

struct RoutedSpec {
  int num_ranks = 2;
  Layout layout = Layout::kTokens;
  std::int64_t num_tokens = 9;  ///< about: ranks have different numbers of tokens, one of three none
  int num_topk = 3;
  std::int64_t num_experts = 8;
  std::uint64_t seed = 1;
};

/// Of one rank, in its memory; what is not said here is as in cuda::RoutingTables.
struct RankTables {
  static constexpr int kTokensPerBlock = 4;

  cuda::RouteSummary* summary = nullptr;
  cuda::Destination* destinations = nullptr;
  std::int32_t* block_ranks = nullptr;
  std::int32_t* rank_base = nullptr;
  std::int32_t* source_base = nullptr;
  std::int32_t* sent_tokens = nullptr;
  std::int32_t* homes = nullptr;
  float* weights = nullptr;
  std::int32_t* source = nullptr;  ///< [rows, 2]
  int num_blocks = 0;
  std::int64_t num_tokens = 0;
};

struct RoutedTokens {
  oracle::World world;
  std::vector<oracle::RankRouting> routings;
  std::vector<RankTables> tables;
};

/// Fills in the ranks of a world whose shape is known: different numbers of tokens, one of three has none. Ids repeat,
/// and some are missing.
void draw_tokens(oracle::World& world, std::int64_t num_tokens, std::uint64_t seed);

RoutedTokens route_tokens(NodeRanks& ranks, const RoutedSpec& spec);

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_ROUTED_TOKENS_HPP
