/// Memory layouts of the CUDA backend's host code for latency mode. Needs no GPU.

#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/latency/params.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"

namespace ferry::cuda {
namespace {

constexpr std::int64_t kMib = std::int64_t{1} << 20;

TEST(LatencyLayout, PartsFollowEachOtherAndEndInside) {
  for (const std::int64_t num_ranks : {1, 2, 3, 8, 128}) {
    for (const std::int64_t bytes : {20 * kMib + 12288, 100 * kMib, 900 * kMib}) {
      const LatencyLayout layout = LatencyLayout::of(4096, bytes, num_ranks);
      ASSERT_GT(layout.set_bytes, 0);
      EXPECT_EQ(layout.row_words, layout.control.size_bytes + kLatencyKinds * kSets * layout.set_bytes);
      EXPECT_LE(layout.row_words + kSets * num_ranks * layout.row_words_bytes, bytes);
      EXPECT_GT(layout.control.headers, layout.control.grants);
      EXPECT_GT(layout.control.local, layout.control.done);
      EXPECT_LT(layout.control.local, layout.control.size_bytes);
      EXPECT_LE(layout.slot_bytes * num_ranks, layout.words_bytes);
      EXPECT_LE(layout.words_bytes + layout.source_bytes * num_ranks, layout.set_bytes);
      for (const std::int64_t part :
           {layout.set_bytes, layout.words_bytes, layout.slot_bytes, layout.source_bytes, layout.row_words_bytes}) {
        EXPECT_EQ(part % kRowAlignment, 0) << "every row begins at a cache line";
      }
    }
  }
}

TEST(LatencyLayout, HoldsWhatItsBytesAreFor) {
  for (const std::int64_t num_ranks : {1, 2, 5, 8, 64}) {
    for (const std::int64_t max_tokens : {1, 7, 128, 1000}) {
      for (const std::int64_t num_topk : {0, 1, 8, 32}) {
        for (const std::int64_t row_bytes : {16, 7168 + 224, 14336}) {
          for (const SetNeed& need : {SetNeed::of_dispatch(num_ranks, max_tokens, num_topk, row_bytes),
                                      SetNeed::of_combine(max_tokens, num_topk, num_topk, row_bytes)}) {
            const std::int64_t bytes = LatencyLayout::bytes_for(need, num_ranks);
            EXPECT_TRUE(LatencyLayout::of(0, bytes, num_ranks).holds(need, num_ranks))
                << num_ranks << " ranks, M " << max_tokens << ", K " << num_topk << ", rows of " << row_bytes;
          }
        }
      }
    }
  }
}

TEST(LatencyLayout, HoldsSumsOfAFewTokensAsWords) {
  for (const int num_ranks : {2, 8}) {
    for (const std::int64_t max_tokens : {1, 5, 8, 9, 40, 128}) {
      const SetNeed need = SetNeed::of_combine(max_tokens, 8, num_ranks, 14336);
      const LatencyLayout layout = LatencyLayout::of(0, LatencyLayout::bytes_for(need, num_ranks), num_ranks);
      for (std::int64_t num_tokens = 1; num_tokens <= max_tokens; ++num_tokens) {
        const int expected = num_tokens > kWordTokens        ? 0
                             : num_tokens > kShortStepTokens ? kWordStepVectors
                                                             : kShortWordStepVectors;
        EXPECT_EQ(layout.word_step_vectors(14336, num_tokens, num_ranks), expected)
            << num_ranks << " ranks, M " << num_tokens << " of " << max_tokens;
      }
      EXPECT_EQ(layout.word_step_vectors(std::int64_t{1} << 20, kWordTokens, num_ranks), 0) << "rows of a MiB";
    }
  }
}

/// Whatever a group's memory is made for, words of a source stay in its part.
TEST(LatencyLayout, HasRoomForAllSumsThatTravelAsWords) {
  for (const int num_ranks : {2, 3, 5, 8, 16, 32}) {
    for (const std::int64_t num_topk : {1, 2, 4, 6, 7, 8}) {
      for (const std::int64_t row_bytes : {16, 512, 2048, 5760, 10240, 14336, 16384}) {
        for (const std::int64_t most : {1, 4, 8, 9, 64, 128}) {
          const std::int64_t per_token =
              num_returned_rows(CombineOrder::kRankSums, static_cast<int>(num_topk), num_ranks);
          const SetNeed need = SetNeed::of_combine(most, num_topk, per_token, row_bytes);
          const LatencyLayout layout = LatencyLayout::of(0, LatencyLayout::bytes_for(need, num_ranks), num_ranks);
          for (std::int64_t max_tokens = 1; max_tokens <= kWordTokens + 1; ++max_tokens) {
            const int step_vectors = layout.word_step_vectors(row_bytes, max_tokens, num_ranks);
            if (step_vectors == 0) continue;
            ASSERT_LE(max_tokens * row_words_bytes(row_bytes, step_vectors), layout.row_words_bytes)
                << num_ranks << " ranks, K " << num_topk << ", rows of " << row_bytes << ", M " << max_tokens
                << " in memory for " << most;
            ASSERT_TRUE(step_vectors == kWordStepVectors || num_ranks <= kSmallRanks) << "kernels with short steps";
          }
        }
      }
    }
  }
}

TEST(LatencyLayout, OfTooFewBytesHoldsNothing) {
  const SetNeed need = SetNeed::of_dispatch(2, 1, 1, 16);
  for (const std::int64_t bytes : {0, 4096}) {
    EXPECT_EQ(LatencyLayout::of(0, bytes, 2).set_bytes, 0);
    EXPECT_FALSE(LatencyLayout::of(0, bytes, 2).holds(need, 2));
  }
}

LatencyShape decoding_shape() {
  return {.backend = "cuda",
          .num_ranks = 8,
          .max_tokens = 128,
          .num_topk = 8,
          .dispatch_row_bytes = 7168 + 224,
          .combine_row_bytes = 14336};
}

TEST(LatencyBytesRequired, OfADecodingBatchIsLessThanAnEighthOfAGib) {
  LatencyShape shape = decoding_shape();
  constexpr std::size_t kEighthOfAGib = std::size_t{1} << 27;
  EXPECT_LT(*latency_bytes_required(shape), kEighthOfAGib);
  shape.dispatch_row_bytes = 14336;
  EXPECT_LT(*latency_bytes_required(shape), kEighthOfAGib) << "rows that are not quantised";
}

TEST(LatencyBytesRequired, CoversBothKindsOfCalls) {
  const LatencyShape shape = decoding_shape();
  const auto layout = LatencyLayout::of(0, static_cast<std::int64_t>(*latency_bytes_required(shape)), 8);
  EXPECT_TRUE(layout.holds(SetNeed::of_dispatch(8, 128, 8, shape.dispatch_row_bytes), 8));
  EXPECT_TRUE(layout.holds(SetNeed::of_combine(128, 8, 8, shape.combine_row_bytes), 8));
  EXPECT_FALSE(layout.holds(SetNeed::of_combine(256, 8, 8, shape.combine_row_bytes), 8));
}

TEST(LatencyBytesRequired, OfSumsCountsARowForEachRank) {
  LatencyShape shape = decoding_shape();
  const std::size_t of_eight = *latency_bytes_required(shape);
  shape.num_topk = 16;
  EXPECT_GT(*latency_bytes_required(shape), of_eight * 3 / 2);
  shape.order = CombineOrder::kRankSums;
  EXPECT_LT(*latency_bytes_required(shape), of_eight * 11 / 10) << "a row for each of 8 ranks, for any K";
}

TEST(LatencyBytesRequired, RefusesAbsurdShapes) {
  LatencyShape shape = decoding_shape();
  shape.max_tokens = shape.combine_row_bytes = std::int64_t{1} << 30;
  const Result<std::size_t> required = latency_bytes_required(shape);
  ASSERT_FALSE(required.ok());
  EXPECT_EQ(required.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(required.status().message().find("1073741824 tokens"), std::string::npos) << required.status().message();
}

TEST(BytesRequired, OfCudaCountsTheMemoryOfLatencyMode) {
  MemoryShape shape;
  shape.backend = "cuda";
  shape.num_ranks = 8;
  const std::size_t without = *bytes_required(shape);
  shape.latency_bytes = 4097;
  EXPECT_EQ(*bytes_required(shape) - without, 8192U) << "whole pages";
}

/// tests/conformance/memory_test.cpp compares these sizes with the memory of groups.
TEST(BytesRequired, OfCudaCountsTheRoutingsOfLatencyMode) {
  MemoryShape shape;
  shape.backend = "cuda";
  shape.num_ranks = 8;
  shape.num_experts = 256;
  shape.num_local_experts = 32;
  shape.num_tokens = 100;
  shape.num_topk = 8;
  shape.row_bytes = 14336;
  shape.scale_row_bytes = 224;
  shape.num_recv_rows = 32 * 1024;
  shape.symmetric = false;
  shape.max_tokens = 128;
  const std::size_t one = *bytes_required(shape);
  shape.num_routings = 3;
  const std::size_t tables = (*bytes_required(shape) - one) / 2;
  // Entries of the rows, entries returned to the sources, and this rank's own entries.
  const std::size_t least = 32 * 1024 * 8 + 8 * 128 * 8 * 4 + 100 * 8 * 16;
  EXPECT_GE(tables, least);
  EXPECT_LT(tables, least + 16 * 1024) << "plus tables by rank and by expert";
  shape.num_routings = 1;
  shape.weights = true;
  const std::size_t weights = (8 * 128 * 8 + 100 * 8) * 4;
  EXPECT_NEAR(static_cast<double>(*bytes_required(shape) - one), static_cast<double>(weights), 4096);
  shape.num_tokens = 129;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument) << "more tokens than M";
}

TEST(PackEntry, KeepsExpertAndOrdinalApart) {
  for (const int expert : {0, 1, static_cast<int>(kMaxExperts) - 1}) {
    for (const int ordinal : {0, 1, static_cast<int>(kMaxLatencyTokens) - 1}) {
      const std::uint32_t payload = pack_entry(expert, ordinal);
      EXPECT_NE(payload, kNoExpert);
      EXPECT_EQ(entry_expert(payload), expert);
      EXPECT_EQ(entry_ordinal(payload), ordinal);
    }
  }
}

}  // namespace
}  // namespace ferry::cuda
