/// Dispatch inside a node by emulated GPUs must give the oracle's bytes in every order in which rows land, chunks are
/// reported and arrivals are noticed.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/intranode/dispatch_params.hpp"
#include "emulator/node_ranks.hpp"
#include "emulator/routed_tokens.hpp"
#include "oracle/oracle.hpp"

namespace ferry::emulator {
namespace {

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

constexpr unsigned kNone = 0;
constexpr unsigned kAll = ~0U;
constexpr std::int64_t kGapBytes = 32;

struct Spec {
  int num_ranks = 2;
  Layout layout = Layout::kTokens;
  std::int64_t num_tokens = 9;
  int num_topk = 3;
  std::int64_t num_experts = 8;
  std::int64_t row_bytes = 48;
  int num_scales = 0;
  int scale_bytes = 4;
  bool ids = true;
  bool weights = true;
  unsigned plain_rows = kNone;    ///< bit mask of ranks whose rows peers cannot reach
  unsigned plain_tables = kNone;  ///< bit mask of ranks whose scales, ids and weights peers cannot reach
  bool gaps = false;              ///< between rows
  bool bulk = true;
  int num_send_blocks = 2;
  int num_own_blocks = 1;
  int num_receive_blocks = 1;
  bool few_run_warps = false;
  unsigned max_blocks = 0;  ///< of a rank that are alive at the same time; 0: all
  std::uint64_t seed = 1;
};

std::ostream& operator<<(std::ostream& out, const Spec& spec) {
  return out << spec.num_ranks << " ranks, layout " << static_cast<int>(spec.layout) << ", T " << spec.num_tokens
             << ", K " << spec.num_topk << ", rows of " << spec.row_bytes << " bytes, " << spec.num_scales
             << " scales of " << spec.scale_bytes << ", plain rows " << spec.plain_rows << ", plain tables "
             << spec.plain_tables << ", bulk " << spec.bulk << ", seed " << spec.seed;
}

/// A group, its routing, and its calls.
class Dispatching {
 public:
  explicit Dispatching(const Spec& spec)
      : spec_(spec),
        ranks_({.num_nodes = 1,
                .ranks_per_node = spec.num_ranks,
                .seed = spec.seed,
                .arena_bytes = std::size_t{16} << 20}),
        random_(spec.seed + 1),
        routed_(route_tokens(ranks_, {.num_ranks = spec.num_ranks,
                                      .layout = spec.layout,
                                      .num_tokens = spec.num_tokens,
                                      .num_topk = spec.num_topk,
                                      .num_experts = spec.num_experts,
                                      .seed = spec.seed + 2})),
        record_(plan::TokenRecord::of({.scale_bytes = scale_row_bytes(),
                                       .num_topk = spec.num_topk,
                                       .ids = by_token() && spec.ids,
                                       .weights = spec.weights,
                                       .rows = !by_token()})) {
    if (spec.max_blocks > 0) ranks_.limit_blocks(spec.max_blocks);
  }

  /// Queues a call with new inputs. `refusing`: rank that refuses the call; -1: none.
  void dispatch(int refusing = -1) {
    inputs_ = {};
    inputs_.row_bytes = to_size(spec_.row_bytes);
    inputs_.scale_row_bytes = to_size(scale_row_bytes());
    calls_.clear();
    for (int rank = 0; rank < spec_.num_ranks; ++rank) {
      const std::int64_t num_tokens = routed_.tables[to_size(rank)].num_tokens;
      inputs_.x.push_back(random_bytes(num_tokens * spec_.row_bytes));
      inputs_.scales.push_back(random_bytes(num_tokens * scale_row_bytes()));
      calls_.push_back(params_of(rank));
      cuda::DispatchParams params = calls_.back();
      if (rank == refusing) {
        params = {};
        params.ranks = calls_.back().ranks;
        params.summary = calls_.back().summary;
        params.bulk = spec_.bulk;
      }
      ASSERT_EQ(cuda::launch_dispatch(params, ranks_.stream(rank)), cudaSuccess);
    }
  }

  void run_and_expect_nothing() {
    ASSERT_EQ(ranks_.run(), "");
    for (int rank = 0; rank < spec_.num_ranks; ++rank) {
      const cuda::DispatchParams& call = calls_[to_size(rank)];
      EXPECT_TRUE(is_untouched(call.out.x, num_rows(rank) * call.out.x_stride)) << "rank " << rank << "; " << spec_;
    }
  }

  /// Makes rank 0 expect one more row from the last rank than that rank sends.
  void expect_too_many() { ++routed_.tables[0].source_base[spec_.num_ranks]; }

  void run_and_expect_lost_rows() {
    ASSERT_EQ(ranks_.run(), "");
    const cuda::LostReport& lost = ranks_.report(0).lost;
    EXPECT_EQ(lost.state, 1U) << spec_;
    EXPECT_EQ(lost.awaited, static_cast<std::int32_t>(cuda::Awaited::kRows)) << spec_;
    EXPECT_EQ(lost.peer, spec_.num_ranks - 1) << spec_;
  }

  void run_and_check() {
    ASSERT_EQ(ranks_.run(), "");
    const std::vector<oracle::RankReceived> expected = oracle::dispatch(routed_.world, routed_.routings, inputs_);
    for (int rank = 0; rank < spec_.num_ranks; ++rank) {
      check(rank, expected[to_size(rank)]);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

 private:
  bool by_token() const { return spec_.layout == Layout::kTokens; }
  bool is_plain(int rank, unsigned ranks) const { return (ranks >> rank & 1U) != 0; }
  std::int64_t scale_row_bytes() const { return std::int64_t{spec_.num_scales} * spec_.scale_bytes; }
  std::int64_t num_rows(int rank) const { return routed_.routings[to_size(rank)].num_recv_rows; }
  std::int64_t num_weights(int rank) const { return num_rows(rank) * (by_token() ? spec_.num_topk : 1); }

  std::byte* take(int rank, std::int64_t bytes) { return ranks_.allocate(rank, to_size(bytes) + 16); }
  oracle::Bytes random_bytes(std::int64_t count) {
    oracle::Bytes bytes(to_size(count));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    return bytes;
  }
  std::byte* copy_in(int rank, const oracle::Bytes& bytes) {
    std::byte* const data = take(rank, static_cast<std::int64_t>(bytes.size()));
    std::ranges::copy(bytes, data);
    return data;
  }
  static bool is_untouched(const std::byte* begin, std::int64_t count) {
    return std::all_of(begin, begin + count, [](std::byte byte) { return byte == DeviceMemory::kPattern; });
  }

  cuda::DispatchParams params_of(int rank) {
    const RankTables& tables = routed_.tables[to_size(rank)];
    cuda::DispatchParams params;
    params.ranks = ranks_.place(rank).ranks;
    params.entry.agreement = 55;
    params.summary = tables.summary;
    params.destinations = tables.destinations;
    params.block_ranks = tables.block_ranks;
    params.rank_base = tables.rank_base;
    params.sent_tokens = tables.sent_tokens;
    params.homes = tables.homes;
    params.weights = spec_.weights ? tables.weights : nullptr;
    if (spec_.num_scales > 0) {
      params.scales = {.data = copy_in(rank, inputs_.scales.back()),
                       .num_scales = spec_.num_scales,
                       .element_bytes = spec_.scale_bytes,
                       .row_stride = spec_.num_scales,
                       .column_stride = 1};
    }
    params.x = copy_in(rank, inputs_.x.back());
    params.x_stride = spec_.row_bytes;
    params.row_bytes = spec_.row_bytes;
    params.num_tokens = tables.num_tokens;
    params.num_topk = spec_.num_topk;
    params.tokens_per_block = RankTables::kTokensPerBlock;
    params.num_blocks = tables.num_blocks;
    params.record = record_;
    params.source_base = tables.source_base;
    params.one_row_per_token = by_token();
    set_outputs(params, rank);
    params.bulk = spec_.bulk;
    // Ranks may use different numbers of blocks.
    params.num_send_blocks = spec_.num_send_blocks + rank;
    params.num_own_blocks = spec_.num_own_blocks;
    params.few_run_warps = spec_.few_run_warps;
    params.entry.num_blocks = params.num_send_blocks;
    if (params.staged_rows != nullptr || params.unpacks) params.num_receive_blocks = spec_.num_receive_blocks;
    params.chunks = {tables.num_blocks, 5};
    params.run_chunk_blocks = 1;
    return params;
  }

  void set_outputs(cuda::DispatchParams& params, int rank) {
    std::byte* const base = params.ranks.peer_bases[rank];
    const std::int64_t rows = num_rows(rank);
    const bool direct = !is_plain(rank, spec_.plain_tables);
    params.out.x_stride = spec_.row_bytes + (spec_.gaps ? kGapBytes : 0);
    params.out.x = take(rank, rows * params.out.x_stride);
    params.entry.rows_offset = params.out.x - base;
    params.entry.rows_stride = params.out.x_stride;
    if (spec_.num_scales > 0) {
      // Column-major only where peers do not write the scales.
      params.out.scales = {.data = take(rank, rows * scale_row_bytes()),
                           .num_scales = spec_.num_scales,
                           .element_bytes = spec_.scale_bytes,
                           .row_stride = direct ? spec_.num_scales : 1,
                           .column_stride = direct ? 1 : rows};
      params.entry.scales_offset = params.out.scales.data - base;
      params.entry.scales_stride = scale_row_bytes();
    }
    params.out.wide_ids = rank % 2 == 0;
    if (record_.has_ids) params.out.ids = take(rank, rows * spec_.num_topk * 8);
    if (spec_.weights) params.out.weights = reinterpret_cast<float*>(take(rank, num_weights(rank) * 4));
    if (direct) {
      params.entry.flags |= cuda::kTablesDirect | (params.out.wide_ids ? cuda::kWideIds : 0);
      params.entry.ids_offset = static_cast<std::byte*>(params.out.ids) - base;
      params.entry.weights_offset = reinterpret_cast<std::byte*>(params.out.weights) - base;
    }
    params.unpacks = !direct && record_.num_words > 0 && (spec_.num_scales > 0 || record_.has_ids || spec_.weights);
    const bool staged = is_plain(rank, spec_.plain_rows);
    if (staged) {
      std::byte* const staging = take(rank, rows * spec_.row_bytes);
      params.staged_rows = staging;
      params.entry.rows_offset = staging - base;
      params.entry.rows_stride = spec_.row_bytes;
      params.entry.flags |= cuda::kRowsStaged;
    }
    if (params.unpacks || (staged && record_.has_rows)) {
      std::byte* const records = take(rank, rows * record_.size_bytes());
      params.records = records;
      params.entry.tables_offset = records - base;
    }
  }

  void check(int rank, const oracle::RankReceived& expected) {
    const cuda::DispatchParams& call = calls_[to_size(rank)];
    for (std::int64_t row = 0; row < num_rows(rank); ++row) {
      if (!expected.holds_token[to_size(row)]) continue;
      const auto where = [rank, row, this] {
        return "row " + std::to_string(row) + " of rank " + std::to_string(rank) + "; " +
               ::testing::PrintToString(spec_);
      };
      const std::byte* const found = call.out.x + row * call.out.x_stride;
      ASSERT_EQ(std::memcmp(found, expected.x.data() + row * spec_.row_bytes, to_size(spec_.row_bytes)), 0) << where();
      ASSERT_TRUE(is_untouched(found + spec_.row_bytes, call.out.x_stride - spec_.row_bytes)) << where();
      for (std::int64_t column = 0; column < spec_.num_scales; ++column) {
        const cuda::ScaleTable& scales = call.out.scales;
        const std::byte* const scale =
            scales.data + (row * scales.row_stride + column * scales.column_stride) * spec_.scale_bytes;
        const std::byte* const wanted = expected.scales.data() + row * scale_row_bytes() + column * spec_.scale_bytes;
        ASSERT_EQ(std::memcmp(scale, wanted, to_size(spec_.scale_bytes)), 0) << "scale " << column << ", " << where();
      }
      if (record_.has_ids) {
        for (std::int64_t at = row * spec_.num_topk; at < (row + 1) * spec_.num_topk; ++at) {
          const std::int64_t id = call.out.wide_ids ? static_cast<const std::int64_t*>(call.out.ids)[at]
                                                    : static_cast<const std::int32_t*>(call.out.ids)[at];
          ASSERT_EQ(id, expected.topk_idx[to_size(at)]) << where();
        }
      }
    }
    if (spec_.weights && by_token()) {
      ASSERT_EQ(std::memcmp(call.out.weights, expected.topk_weights.data(), to_size(num_weights(rank) * 4)), 0)
          << "weights of rank " << rank << "; " << spec_;
    }
    for (std::int64_t row = 0; spec_.weights && !by_token() && row < num_rows(rank); ++row) {
      if (!expected.holds_token[to_size(row)]) continue;
      ASSERT_EQ(std::memcmp(call.out.weights + row, &expected.topk_weights[to_size(row)], sizeof(float)), 0)
          << "weight of row " << row << " of rank " << rank << "; " << spec_;
    }
  }

  Spec spec_;
  NodeRanks ranks_;
  std::mt19937_64 random_;
  RoutedTokens routed_;
  plan::TokenRecord record_;
  oracle::DispatchInputs inputs_;
  std::vector<cuda::DispatchParams> calls_;
};

/// Checks two calls in a row: the second starts from the state that the first leaves.
void expect_rows(const Spec& spec) {
  Dispatching group(spec);
  for (int call = 0; call < 2; ++call) {
    group.dispatch();
    group.run_and_check();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

constexpr Layout kLayouts[] = {Layout::kTokens, Layout::kExperts};

TEST(ThroughputDispatch, RowsOfAllLengths) {
  // A stage holds 8 KiB: several rows, one row, or a piece of one.
  for (const unsigned plain : {kNone, kAll}) {
    for (const std::int64_t row_bytes : {16, 2048, 4096, 8192, 8208, 20000}) {
      expect_rows({.num_tokens = 20, .row_bytes = row_bytes, .plain_rows = plain, .plain_tables = plain});
    }
  }
}

TEST(ThroughputDispatch, ManyChunksArePassedOnWhileOthersCome) {
  // A warp has several units of each chunk.
  for (const Layout layout : kLayouts) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      expect_rows({.num_ranks = 3,
                   .layout = layout,
                   .num_tokens = 150,
                   .num_topk = 2,
                   .row_bytes = 4112,
                   .plain_rows = kAll,
                   .plain_tables = kAll,
                   .num_receive_blocks = static_cast<int>(seed),
                   .seed = seed});
    }
  }
}

TEST(ThroughputDispatch, ScalesIdsAndWeightsInRecordsAndOut) {
  // A unit's records land in 512 bytes, or are too long for that.
  for (const unsigned plain : {kNone, kAll}) {
    for (const int num_scales : {0, 3, 56, 140}) {
      for (const int scale_bytes : {1, 4}) {
        expect_rows({.num_tokens = 40,
                     .num_topk = 5,
                     .num_scales = num_scales,
                     .scale_bytes = scale_bytes,
                     .ids = num_scales != 3,
                     .weights = num_scales != 56,
                     .plain_tables = plain,
                     .seed = static_cast<std::uint64_t>(num_scales + 1)});
      }
    }
  }
  for (const int num_topk : {1, 8, 32}) {
    expect_rows({.num_tokens = 40, .num_topk = num_topk, .num_experts = 64, .plain_rows = kAll, .plain_tables = kAll});
  }
}

TEST(ThroughputDispatch, FewWarpsWithLongStages) {
  // Stages of 16 KiB: two rows of 7168 bytes with the scales of both, three of 4112, one row, or a piece of one.
  for (const unsigned plain : {kNone, kAll, 2U}) {
    for (const std::int64_t row_bytes : {2048, 4112, 7168, 8192, 16400}) {
      expect_rows({.num_ranks = 3,
                   .num_tokens = 90,
                   .row_bytes = row_bytes,
                   .num_scales = row_bytes == 4112 ? 70 : 56,
                   .scale_bytes = row_bytes == 8192 ? 1 : 4,
                   .plain_rows = plain,
                   .plain_tables = plain,
                   .few_run_warps = true,
                   .seed = static_cast<std::uint64_t>(row_bytes) + plain});
    }
  }
}

TEST(ThroughputDispatch, RanksWithMemoryOfDifferentKinds) {
  for (const Layout layout : kLayouts) {
    for (const bool bulk : {true, false}) {
      for (const unsigned ranks : {1U, 5U, 6U}) {
        expect_rows({.num_ranks = 4,
                     .layout = layout,
                     .num_tokens = 70,
                     .row_bytes = 4112,
                     .num_scales = 4,
                     .plain_rows = ranks,
                     .plain_tables = ranks ^ 3U,
                     .gaps = true,
                     .bulk = bulk,
                     .seed = ranks});
      }
    }
  }
}

TEST(ThroughputDispatch, GoesOnWhereOnlyTwoBlocksOfARankHaveRoom) {
  for (const Layout layout : kLayouts) {
    for (const bool bulk : {true, false}) {
      expect_rows({.num_ranks = 3,
                   .layout = layout,
                   .num_tokens = 100,
                   .plain_rows = kAll,
                   .plain_tables = kAll,
                   .bulk = bulk,
                   .num_send_blocks = 4,
                   .num_own_blocks = 2,
                   .num_receive_blocks = 3,
                   .max_blocks = 2});
    }
  }
}

TEST(ThroughputDispatch, AloneOrWithOneBlock) {
  for (const unsigned plain : {kNone, kAll}) {
    expect_rows({.num_ranks = 1, .plain_rows = plain, .plain_tables = plain, .num_own_blocks = 2});
    expect_rows(
        {.num_tokens = 50, .plain_rows = plain, .plain_tables = plain, .num_send_blocks = 1, .num_own_blocks = 0});
    // A rank that keeps twice as many rows as it sends.
    expect_rows({.num_tokens = 200,
                 .num_topk = 1,
                 .num_experts = 3,
                 .plain_rows = plain,
                 .plain_tables = plain,
                 .num_send_blocks = 1,
                 .num_own_blocks = 0});
  }
}

TEST(ThroughputDispatch, RowsThatNeverComeEndTheCallAtItsDeadline) {
  for (const Layout layout : kLayouts) {
    for (const bool bulk : {true, false}) {
      Dispatching group({.layout = layout, .num_tokens = 40, .plain_rows = kAll, .plain_tables = kAll, .bulk = bulk});
      group.expect_too_many();
      group.dispatch();
      group.run_and_expect_lost_rows();
      if (HasFatalFailure()) return;
    }
  }
}

void refuse_in_turn(const Spec& spec) {
  Dispatching group(spec);
  for (const int refusing : {1, -1, 0}) {
    group.dispatch(refusing);
    if (refusing < 0) {
      group.run_and_check();
    } else {
      group.run_and_expect_nothing();
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

/// With long rows, warps have begun with pieces that carry no tables.
TEST(ThroughputDispatch, ARefusedCallMovesNothing) {
  for (const std::int64_t row_bytes : {48, 20000}) {
    for (const unsigned plain : {kNone, kAll}) {
      refuse_in_turn(
          {.num_ranks = 3, .num_tokens = 20, .row_bytes = row_bytes, .plain_rows = plain, .plain_tables = plain});
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace ferry::emulator
