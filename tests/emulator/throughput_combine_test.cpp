/// Combine inside a node by emulated GPUs must give the oracle's bits in every order in which warps claim tokens, rows
/// land and staged rows are reported.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cuda/intranode/combine_params.hpp"
#include "emulator/node_ranks.hpp"
#include "emulator/routed_tokens.hpp"
#include "oracle/oracle.hpp"

namespace ferry::emulator {
namespace {

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

struct Spec {
  int num_ranks = 2;
  Layout layout = Layout::kTokens;
  std::int64_t num_tokens = 9;
  int num_topk = 3;
  std::int64_t num_experts = 8;
  std::int64_t hidden = 24;
  bool float32 = false;
  bool weighted = false;
  int num_biases = 0;
  bool returns_weights = false;
  bool staged = false;
  bool bulk = true;
  int num_stage_blocks = 1;
  int rounds_between_reports = 1;
  int num_sum_blocks = 1;
  unsigned max_blocks = 0;  ///< of a rank that are alive at the same time; 0: all
  std::uint64_t seed = 1;
};

std::ostream& operator<<(std::ostream& out, const Spec& spec) {
  return out << spec.num_ranks << " ranks, layout " << static_cast<int>(spec.layout) << ", T " << spec.num_tokens
             << ", K " << spec.num_topk << ", H " << spec.hidden << ", weighted " << spec.weighted << ", biases "
             << spec.num_biases << ", staged " << spec.staged << ", bulk " << spec.bulk << ", seed " << spec.seed;
}

/// A group, its routing, and its calls.
class Combining {
 public:
  explicit Combining(const Spec& spec)
      : spec_(spec),
        ranks_(
            {.num_nodes = 1, .ranks_per_node = spec.num_ranks, .seed = spec.seed, .arena_bytes = std::size_t{4} << 20}),
        random_(spec.seed + 1) {
    if (spec.max_blocks > 0) ranks_.limit_blocks(spec.max_blocks);
    routed_ = route_tokens(ranks_, {.num_ranks = spec.num_ranks,
                                    .layout = spec.layout,
                                    .num_tokens = spec.num_tokens,
                                    .num_topk = spec.num_topk,
                                    .num_experts = spec.num_experts,
                                    .seed = spec.seed + 2});
  }

  /// Queues a call with new inputs. `refusing`: rank that refuses the call; -1: none.
  void combine(int refusing = -1) {
    draw();
    calls_.resize(to_size(spec_.num_ranks));
    for (int rank = 0; rank < spec_.num_ranks; ++rank) {
      cuda::CombineParams params;
      set_tables(params, routed_.tables[to_size(rank)]);
      params.ranks = ranks_.place(rank).ranks;
      params.entry.agreement = 55;
      params.float32 = spec_.float32;
      params.weighted = spec_.weighted;
      params.row_bytes = row_bytes();
      params.x = copy_in(rank, inputs_.x[to_size(rank)]);
      params.x_stride = row_bytes();
      const std::vector<float>& weights = inputs_.weights[to_size(rank)];
      if (spec_.returns_weights) {
        auto* given = reinterpret_cast<float*>(ranks_.allocate(rank, weights.size() * sizeof(float) + 4));
        std::ranges::copy(weights, given);
        params.entry.tables_offset = reinterpret_cast<std::byte*>(given) - base(rank);
        params.out_weights = reinterpret_cast<float*>(
            ranks_.allocate(rank, to_size(num_tokens(rank) * spec_.num_topk + 1) * sizeof(float)));
      }
      for (int bias = 0; bias < spec_.num_biases; ++bias) {
        params.bias[bias] = {copy_in(rank, inputs_.bias[to_size(bias)][to_size(rank)]), row_bytes()};
      }
      params.out_stride = row_bytes() + 16;
      params.out_x = ranks_.allocate(rank, to_size(num_tokens(rank) * params.out_stride) + 16);
      params.bulk = spec_.bulk;
      // Ranks may use different numbers of blocks.
      params.num_sum_blocks = spec_.num_sum_blocks + rank;
      params.entry.rows_stride = row_bytes();
      params.entry.rows_offset = params.x - base(rank);
      if (spec_.staged) {
        const std::int64_t num_rows = routed_.routings[to_size(rank)].num_recv_rows;
        params.staging = ranks_.allocate(rank, to_size(num_rows * row_bytes()) + 16);
        params.entry.rows_offset = params.staging - base(rank);
        params.num_stage_blocks = spec_.num_stage_blocks + rank;
        params.entry.flags = cuda::kRowsStaged | params.num_stage_blocks << cuda::kStagersShift;
        params.rounds_between_reports = spec_.rounds_between_reports + rank;
      }
      params.entry.num_blocks = params.num_sum_blocks + params.num_stage_blocks;
      calls_[to_size(rank)] = params;
      if (rank == refusing) {
        params = {};
        params.ranks = calls_[to_size(rank)].ranks;
        params.summary = calls_[to_size(rank)].summary;
        params.bulk = spec_.bulk;
      }
      ASSERT_EQ(cuda::launch_combine(params, ranks_.stream(rank)), cudaSuccess);
    }
  }

  void run_and_expect_nothing() {
    ASSERT_EQ(ranks_.run(), "");
    for (int rank = 0; rank < spec_.num_ranks; ++rank) {
      const cuda::CombineParams& call = calls_[to_size(rank)];
      const std::byte* end = call.out_x + num_tokens(rank) * call.out_stride;
      EXPECT_TRUE(
          std::all_of<const std::byte*>(call.out_x, end, [](std::byte byte) { return byte == DeviceMemory::kPattern; }))
          << "rank " << rank << "; " << spec_;
    }
  }

  void run_and_check() {
    ASSERT_EQ(ranks_.run(), "");
    const auto expected = oracle::combine(routed_.world, routed_.routings, inputs_);
    for (int rank = 0; rank < spec_.num_ranks; ++rank) {
      const cuda::CombineParams& call = calls_[to_size(rank)];
      const oracle::RankCombined& one = expected[to_size(rank)];
      for (std::int64_t token = 0; token < num_tokens(rank); ++token) {
        ASSERT_EQ(
            std::memcmp(call.out_x + token * call.out_stride, one.x.data() + token * row_bytes(), to_size(row_bytes())),
            0)
            << "sum of token " << token << " of rank " << rank << "; " << spec_;
        const std::byte* gap = call.out_x + token * call.out_stride + row_bytes();
        ASSERT_TRUE(std::all_of(gap, gap + 16, [](std::byte byte) { return byte == DeviceMemory::kPattern; }))
            << "behind token " << token << " of rank " << rank << "; " << spec_;
      }
      if (spec_.returns_weights) {
        ASSERT_EQ(std::memcmp(call.out_weights, one.weights.data(), one.weights.size() * sizeof(float)), 0)
            << "weights of rank " << rank << "; " << spec_;
      }
      EXPECT_EQ(call.ranks.control.local->num_items_claimed, 0U) << "must be 0 for the next call";
    }
  }

 private:
  std::int64_t row_bytes() const { return spec_.hidden * (spec_.float32 ? 4 : 2); }
  std::int64_t num_tokens(int rank) const { return routed_.world.ranks[to_size(rank)].num_tokens; }
  std::byte* base(int rank) { return ranks_.place(rank).ranks.peer_bases[rank]; }

  std::byte* copy_in(int rank, const oracle::Bytes& bytes) {
    std::byte* const data = ranks_.allocate(rank, bytes.size() + 16);
    std::ranges::copy(bytes, data);
    return data;
  }

  void set_tables(cuda::CombineParams& params, const RankTables& tables) const {
    params.summary = tables.summary;
    params.destinations = tables.destinations;
    params.rank_base = tables.rank_base;
    params.source_base = tables.source_base;
    params.num_tokens = tables.num_tokens;
    params.num_topk = spec_.num_topk;
    params.one_row_per_token = spec_.layout == Layout::kTokens;
    params.topk_weights = tables.weights;
    params.source = tables.source;
  }

  oracle::Bytes random_rows(std::int64_t num_elements) {
    oracle::Bytes rows(to_size(num_elements * (spec_.float32 ? 4 : 2)));
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < num_elements; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(normal(random_));
      const std::uint32_t upper = bits >> 16;
      const std::size_t bytes = spec_.float32 ? 4 : 2;
      std::memcpy(rows.data() + to_size(i) * bytes, spec_.float32 ? &bits : &upper, bytes);
    }
    return rows;
  }

  void draw() {
    inputs_ = {};
    inputs_.dtype = spec_.float32 ? DType::kFloat32 : DType::kBfloat16;
    inputs_.hidden = spec_.hidden;
    inputs_.weighted = spec_.weighted;
    std::normal_distribution<float> normal;
    const std::int64_t entries = spec_.layout == Layout::kTokens ? spec_.num_topk : 1;
    for (int rank = 0; rank < spec_.num_ranks; ++rank) {
      const std::int64_t num_rows = routed_.routings[to_size(rank)].num_recv_rows;
      inputs_.x.push_back(random_rows(num_rows * spec_.hidden));
      std::vector<float>& weights = inputs_.weights.emplace_back();
      for (std::int64_t i = 0; i < num_rows * entries; ++i) weights.push_back(normal(random_));
      for (int bias = 0; bias < spec_.num_biases; ++bias) {
        inputs_.bias[to_size(bias)].push_back(random_rows(num_tokens(rank) * spec_.hidden));
      }
    }
    if (!spec_.returns_weights) {
      for (std::vector<float>& weights : inputs_.weights) weights.assign(weights.size(), 0.0F);
    }
  }

  Spec spec_;
  NodeRanks ranks_;
  std::mt19937_64 random_;
  RoutedTokens routed_;
  oracle::CombineInputs inputs_;
  std::vector<cuda::CombineParams> calls_;
};

/// Checks two calls in a row: the second starts from the state that the first leaves.
void expect_sums(const Spec& spec) {
  Combining group(spec);
  for (int call = 0; call < 2; ++call) {
    group.combine();
    group.run_and_check();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(ThroughputCombine, RowsInPartsAndWhole) {
  // A set holds 4 KiB of two rows: shorter rows, several sets, and parts of rows. One block has 12 warps, so with 120
  // tokens the first are summed whole, and the last in parts.
  for (const std::int64_t hidden : {8, 2048, 2056, 5000}) expect_sums({.hidden = hidden});
  expect_sums({.num_tokens = 120, .num_topk = 2, .hidden = 40});
  expect_sums({.num_tokens = 120, .num_topk = 1, .hidden = 4104, .seed = 2});
}

TEST(ThroughputCombine, ManyRowsOfAToken) {
  for (const int num_topk : {1, 5, 12, 32}) {
    for (const bool weighted : {false, true}) {
      expect_sums({.num_ranks = 4,
                   .layout = Layout::kExperts,
                   .num_tokens = 20,
                   .num_topk = num_topk,
                   .num_experts = 16,
                   .hidden = 72,
                   .weighted = weighted,
                   .num_biases = num_topk % 3,
                   .returns_weights = weighted,
                   .seed = static_cast<std::uint64_t>(num_topk)});
    }
  }
}

TEST(ThroughputCombine, MoreReturnedWeightsThanAWarpFetchesAtOnce) {
  for (const bool bulk : {false, true}) {
    expect_sums({.num_ranks = 3, .num_topk = 32, .num_experts = 18, .returns_weights = true, .bulk = bulk, .seed = 5});
  }
}

TEST(ThroughputCombine, StagedRows) {
  for (const Layout layout : {Layout::kTokens, Layout::kExperts}) {
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      expect_sums({.num_ranks = 3,
                   .layout = layout,
                   .num_tokens = 300,
                   .num_topk = 2,
                   .hidden = 24,
                   .returns_weights = true,
                   .staged = true,
                   .rounds_between_reports = static_cast<int>(20 * seed) - 19,
                   .num_sum_blocks = 2,
                   .seed = seed});
    }
  }
}

TEST(ThroughputCombine, StagedRowsOfSeveralPieces) {
  // Peers that learn of rows too early would sum them before they are staged. A piece has at most 4 KiB; with 40 blocks
  // each lane polls the words of two.
  for (const std::int64_t hidden : {8, 2056, 7168}) {
    for (const int num_stage_blocks : {1, 3, 40}) {
      expect_sums({.num_tokens = hidden == 8 ? 400 : 280'000 / hidden,
                   .num_topk = 1,
                   .hidden = hidden,
                   .staged = true,
                   .num_stage_blocks = num_stage_blocks,
                   .seed = static_cast<std::uint64_t>(num_stage_blocks)});
    }
  }
}

TEST(ThroughputCombine, GoesOnWhereOnlyTwoBlocksOfARankHaveRoom) {
  // No summing block may keep out a staging block, for whose rows a peer waits.
  for (const bool bulk : {false, true}) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      expect_sums({.num_ranks = 3,
                   .num_tokens = 120,
                   .num_topk = 2,
                   .staged = true,
                   .bulk = bulk,
                   .num_stage_blocks = 3,
                   .num_sum_blocks = 4,
                   .max_blocks = 2,
                   .seed = seed});
    }
  }
}

TEST(ThroughputCombine, ARefusedCallMovesNothing) {
  for (const bool staged : {false, true}) {
    Combining group({.num_ranks = 3, .num_tokens = 20, .hidden = 40, .staged = staged});
    for (const int refusing : {1, -1, 0}) {
      group.combine(refusing);
      if (refusing < 0) {
        group.run_and_check();
      } else {
        group.run_and_expect_nothing();
      }
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ThroughputCombine, Float32AndByThreads) {
  for (const bool bulk : {false, true}) {
    for (const bool float32 : {false, true}) {
      for (const bool staged : {false, true}) {
        expect_sums({.num_tokens = 14,
                     .hidden = 280,
                     .float32 = float32,
                     .weighted = true,
                     .num_biases = 2,
                     .staged = staged,
                     .bulk = bulk,
                     .seed = 7});
      }
    }
  }
}

}  // namespace
}  // namespace ferry::emulator
