/// Memory of latency mode's messages between nodes: where their parts lie, and which of them are words. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/far/params.hpp"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/params.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

constexpr int kNumRanks = 6;
constexpr int kPerNode = 2;

/// Parts of different sizes, so that places which are mixed up overlap.
FarLayout layout_of(int rank) {
  return FarLayout::of({.num_ranks = kNumRanks,
                        .ranks_per_node = kPerNode,
                        .rank = rank,
                        .front_bytes = 1280,
                        .row_words_bytes = 512,
                        .rows_bytes = 640,
                        .sum_words_bytes = 896,
                        .return_words_bytes = 384,
                        .returns_bytes = 256,
                        .weights_bytes = 128,
                        .in_gpu = true});
}

TEST(FarLayout, RanksAgreeOnPlacesThatDoNotOverlap) {
  std::vector<FarLayout> layouts;
  for (int rank = 0; rank < kNumRanks; ++rank) layouts.push_back(layout_of(rank));
  const FarLayout& first = layouts.front();
  for (int rank = 0; rank < kNumRanks; ++rank) {
    const FarLayout& own = layouts[to_size(rank)];
    EXPECT_EQ(own.inbox_bytes, first.inbox_bytes);
    EXPECT_EQ(own.outbox_bytes, first.outbox_bytes);
    EXPECT_EQ(own.num_far(), kNumRanks - kPerNode);
    for (int idx = 0; idx < own.num_far(); ++idx) {
      const int source = own.far_rank(idx);
      EXPECT_TRUE(own.is_far(source));
      EXPECT_EQ(own.far_idx(source), idx);
      EXPECT_EQ(layouts[to_size(source)].far_idx_at(rank, source), idx) << "where the source puts its message";
    }
  }
  // Every byte of the inbox belongs to one place at most.
  std::vector<bool> taken(to_size(first.inbox_bytes), false);
  const auto take = [&taken](std::int64_t offset, std::int64_t bytes) {
    for (std::int64_t at = offset; at < offset + bytes; ++at) {
      ASSERT_LT(to_size(at), taken.size());
      ASSERT_FALSE(taken[to_size(at)]);
      taken[to_size(at)] = true;
    }
  };
  for (int rank = 0; rank < kNumRanks; ++rank) take(first.arrived_at(kFarWeights, rank), 8);
  for (int kind = 0; kind < kFarKinds; ++kind) {
    for (int rank = 0; rank < kNumRanks; ++rank) {
      take(first.arrived_at(kind, rank), 8);
      for (std::uint64_t number = 1; number <= kFarGrantSlots; ++number) take(first.grant_at(kind, rank, number), 8);
    }
    for (int set = 0; set < kFarHeaderSets; ++set) {
      for (int idx = 0; idx < first.num_far(); ++idx) {
        const bool has_set = set < kFarSets;
        const bool is_dispatch = kind == 0;
        const std::int64_t before = has_set && is_dispatch ? first.words_before_header() : 0;
        const std::int64_t whole = is_dispatch ? first.message_bytes : first.sum_message_bytes();
        take(first.header_at(kind, set, idx) - before, has_set ? whole : kFarHeaderBytes);
        take(first.record_at(kind, set, idx), kFarRecordBytes);
      }
    }
  }
  for (int set = 0; set < kFarSets; ++set) {
    take(first.return_words_at(set), first.return_words_bytes);
    take(first.returns_at(set), first.returns_bytes);
    for (int idx = 0; idx < first.num_far(); ++idx) take(first.weights_at(set, idx), first.weights_bytes);
  }
}

TEST(FarLayout, MessagesThatLeaveDoNotOverlap) {
  const FarParams far{.layout = layout_of(0)};
  const FarLayout& layout = far.layout;
  std::int64_t end = 0;
  for (int idx = 0; idx < layout.num_far(); ++idx) {
    EXPECT_EQ(far.header_out(0, idx) - layout.words_before_header(), end);
    end += layout.message_bytes;
  }
  for (int idx = 0; idx < layout.num_far(); ++idx) {
    EXPECT_EQ(far.header_out(1, idx), end);
    end += layout.sum_message_bytes();
  }
  EXPECT_EQ(far.weights_out(), end);
  EXPECT_EQ(layout.outbox_bytes, end + layout.weights_bytes);
}

TEST(FarMessage, FitsWhereItsCallFitsTheWindow) {
  constexpr int kMostRanks = 8;
  for (const std::int64_t max_tokens : {1, 7, 128, 1000}) {
    for (const int num_topk : {1, 2, 7, 8, 15, 16, 32}) {
      for (const std::int64_t row_bytes : {16, 7168 + 224, 14336}) {
        const SetNeed dispatch = SetNeed::of_dispatch(kMostRanks, max_tokens, num_topk, row_bytes);
        const SetNeed combine = SetNeed::of_combine(max_tokens, num_topk, num_topk, row_bytes);
        const LatencyLayout window = LatencyLayout::of(
            0, std::max(LatencyLayout::bytes_for(dispatch, kMostRanks), LatencyLayout::bytes_for(combine, kMostRanks)),
            kMostRanks);
        const FarLayout far = far_layout(window, kMostRanks, 2, 0, true);
        const FarMessage message = FarMessage::of(kMaxExperts, num_topk);
        EXPECT_GE(message.words(max_tokens, 0, 0), -far.words_before_header());
        EXPECT_LE(far.words_before_header() + FarMessage::kPlainRows + max_tokens * round_up_row(row_bytes),
                  far.message_bytes);
        EXPECT_LE(max_tokens * num_topk * round_up_row(row_bytes), far.returns_bytes);
        EXPECT_LE(num_far_words(max_tokens * num_topk) * kFarWordBytes, far.weights_bytes);
        const std::int64_t few = std::min(max_tokens / 2, kFarWordTokens);
        const std::int64_t stride = far_word_stride(far, row_bytes, few);
        EXPECT_GT(stride, 0);
        EXPECT_GE(message.words(few, few, stride), -far.words_before_header());
      }
    }
  }
}

/// Step in which all sums of a combine travel as words between nodes of one rank; 0: not all do.
int word_step_vectors(RowKind kind, std::int64_t row_bytes, std::int64_t max_tokens, int num_ranks = 2) {
  const std::int64_t most_tokens = 256;
  const SetNeed need = SetNeed::of_combine(most_tokens, 8, num_ranks, row_bytes);
  const LatencyLayout window = LatencyLayout::of(0, LatencyLayout::bytes_for(need, num_ranks), num_ranks);
  const FarLayout far = far_layout(window, num_ranks, 1, 0, true);
  const CombineRows rows{row_bytes, kind, CombineOrder::kRankSums};
  return word_step_vectors_over_nodes(rows, max_tokens, window, far);
}

TEST(FarWords, SumsAreWordsUpToTheirTokensRoomAndBytes) {
  constexpr std::int64_t kRowBytes = 14336;
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kRowBytes, kFarSumTokens), kFarStepVectors);
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kRowBytes, kFarSumTokens + 1), 0);
  EXPECT_EQ(word_step_vectors(RowKind::kFp8Sums, kRowBytes, kFarFp8SumTokens), kFp8StepVectors);
  EXPECT_EQ(word_step_vectors(RowKind::kFp8Sums, kRowBytes, kFarFp8SumTokens + 1), 0);
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kMostFarWordRow, 58), kFarStepVectors);
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kMostFarWordRow, 59), 0) << "room inside a node";
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, 256, 128), 0);
  // 7 KiB more for each row of 14: 146 fit into the MiB.
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kRowBytes, kFarSumTokens, 3), kFarStepVectors);
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kRowBytes, 48, 4), kFarStepVectors);
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kRowBytes, 49, 4), 0) << "bytes";
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kRowBytes, kFarWordTokens, kSmallRanks), kFarStepVectors);
  EXPECT_EQ(word_step_vectors(RowKind::kBfloat16, kRowBytes, 1, kSmallRanks + 1), 0) << "ranks";
}

}  // namespace
}  // namespace ferry::cuda
