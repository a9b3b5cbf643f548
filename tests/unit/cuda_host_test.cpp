/// Decisions and memory layouts of the CUDA backend's host code. Needs no GPU.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "cuda/call/routing_tables.hpp"
#include "cuda/sync/call_log.hpp"
#include "cuda/sync/control.hpp"
#include "cuda/sync/rail_params.hpp"
#include "ferry/group.hpp"
#include "plan/token_record.hpp"

namespace ferry::cuda {
namespace {

// TokenRecord

TEST(TokenRecord, PartsFollowEachOtherAndTheEndIsPadded) {
  for (std::int64_t scale_bytes : {0, 1, 3, 4, 7, 56, 224, 1000})
    for (int num_topk : {1, 2, 3, 8, 9, 32})
      for (unsigned wanted = 0; wanted < 8; ++wanted) {
        const plan::TokenRecord::Parts parts = {scale_bytes, num_topk, (wanted & 1) != 0, (wanted & 2) != 0,
                                                (wanted & 4) != 0};
        const plan::TokenRecord record = plan::TokenRecord::of(parts);
        SCOPED_TRACE(fmt::format("{} bytes of scales, K = {}, parts {:#b}", scale_bytes, num_topk, wanted));
        EXPECT_GE(4 * record.ids_word, scale_bytes);
        EXPECT_LT(4 * record.ids_word, scale_bytes + 4);
        EXPECT_EQ(record.weights_word - record.ids_word, parts.ids ? num_topk : 0);
        EXPECT_EQ(record.rows_word - record.weights_word, parts.weights ? num_topk : 0);
        EXPECT_EQ(record.end_word - record.rows_word, parts.rows ? num_topk : 0);
        EXPECT_EQ(record.num_words % 4, 0);
        EXPECT_GE(record.num_words, record.end_word);
        EXPECT_LT(record.num_words, record.end_word + 4);
        EXPECT_EQ(record.size_bytes(), 4 * record.num_words);
      }
}

TEST(TokenRecord, NothingWantedIsNoRecord) { EXPECT_EQ(plan::TokenRecord::of({.num_topk = 8}).size_bytes(), 0); }

// Control, RoutingTables

/// A part of a layout, with the size of its elements.
struct Part {
  const char* name;
  const void* begin;
  std::size_t num_bytes;
};

template <typename T>
Part part(const char* name, const T* begin, std::size_t count) {
  return {name, begin, count * sizeof(T)};
}

/// Expects parts in order, without overlap, each at a multiple of 64 from the base, and a size that ends with the last
/// part.
void expect_carved(const std::vector<Part>& parts, const std::byte* base, std::size_t size_bytes) {
  std::size_t end = 0;
  for (const Part& one : parts) {
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(one.begin) - base);
    EXPECT_EQ(offset % 64, 0U) << one.name;
    EXPECT_GE(offset, end) << one.name << " begins inside the part before it";
    EXPECT_LT(offset, end + 64) << one.name << " leaves a gap";
    end = offset + one.num_bytes;
  }
  EXPECT_EQ(size_bytes, (end + 63) / 64 * 64);
}

TEST(Control, PartsLieSideBySide) {
  for (std::size_t num_ranks :
       {std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{8}, std::size_t{kMaxRanks}}) {
    SCOPED_TRACE(fmt::format("{} ranks", num_ranks));
    const std::size_t size_bytes = Control::at(nullptr, num_ranks).size_bytes;
    std::vector<std::byte> arena(size_bytes);
    const Control control = Control::at(arena.data(), num_ranks);
    EXPECT_EQ(control.size_bytes, size_bytes) << "with and without a base";
    expect_carved(
        {
            part("entries", control.entries, num_ranks * kEntrySlotWords),
            part("progress", control.progress, num_ranks),
            part("staged", control.staged, num_ranks * kMaxCallBlocks),
            part("rail_verdicts", control.rail_verdicts, num_ranks),
            part("done", control.done, num_ranks),
            part("block_done", control.block_done, num_ranks * kMaxCallBlocks),
            part("counts_ready", control.counts_ready, num_ranks),
            part("headers", control.headers, 2 * num_ranks * kCountsHeaderWords),
            part("counts", control.counts, 2 * num_ranks * Control::counts_stride(num_ranks)),
            part("local", control.local, 1),
        },
        arena.data(), size_bytes);
  }
}

void expect_tables_carved(const RoutingTables::Shape& shape) {
  SCOPED_TRACE(fmt::format("R {} T {} K {} E {} L {} blocks {} weights {}", shape.num_ranks, shape.num_tokens,
                           shape.num_topk, shape.num_experts, shape.num_local_experts, shape.num_blocks,
                           shape.weights));
  const std::size_t num_entries = shape.num_tokens * shape.num_topk;
  const auto columns = plan::CountColumns::of(static_cast<int>(shape.num_ranks), static_cast<int>(shape.num_experts));
  const std::size_t size_bytes = RoutingTables::at(nullptr, shape).size_bytes;
  std::vector<std::byte> memory(size_bytes);
  const RoutingTables tables = RoutingTables::at(memory.data(), shape);
  EXPECT_EQ(tables.size_bytes, size_bytes) << "with and without a base";
  expect_carved(
      {
          part("summary", tables.summary, 1),
          part("destinations", tables.destinations, num_entries),
          part("slots", tables.slots, num_entries),
          part("homes", tables.homes, num_entries),
          part("sent_tokens", tables.sent_tokens, shape.num_ranks * shape.num_tokens),
          part("ids", tables.ids, num_entries),
          part("weights", tables.weights, shape.weights ? num_entries : 0),
          part("block_ranks", tables.block_ranks, (shape.num_blocks + 1) * shape.num_ranks),
          part("block_counts", tables.block_counts, shape.num_blocks * static_cast<std::size_t>(columns.size)),
          part("rank_base", tables.rank_base, shape.num_ranks),
          part("expert_rows", tables.expert_rows, shape.num_experts),
          part("expert_base", tables.expert_base, shape.num_experts),
          part("source_base", tables.source_base, shape.num_ranks + 1),
          part("rank_counts", tables.rank_counts, shape.num_ranks * shape.num_ranks),
          part("tokens_of_rank", tables.tokens_of_rank, shape.num_ranks),
          part("rows_per_expert", tables.rows_per_expert, shape.num_local_experts),
          part("row_offsets", tables.row_offsets, shape.num_local_experts + 1),
          part("block_marks", tables.block_marks, shape.num_blocks),
          part("source_offsets", tables.source_offsets, shape.num_ranks),
      },
      memory.data(), size_bytes);
}

TEST(RoutingTables, PartsLieSideBySide) {
  for (bool weights : {false, true}) {
    expect_tables_carved({1, 0, 1, 1, 1, 0, weights});
    expect_tables_carved({1, 1, 1, 1, 1, 1, weights});
    expect_tables_carved({3, 17, 5, 10, 0, 2, weights});
    expect_tables_carved({8, 4096, 8, 256, 32, 33, weights});
    expect_tables_carved({128, 63, 9, 4096, 32, 1, weights});
  }
}

TEST(RouteBlocks, CoverAllTokens) {
  for (const std::int64_t num_tokens : {0, 1, 63, 64, 65, 4096, 8192, 8193, 1'000'000}) {
    const RouteBlocks blocks = RouteBlocks::of(num_tokens);
    EXPECT_GE(blocks.num_blocks, 1);
    EXPECT_LE(blocks.num_blocks, 128);
    EXPECT_EQ(blocks.tokens_per_block % 64, 0);
    EXPECT_GE(std::int64_t{blocks.num_blocks} * blocks.tokens_per_block, num_tokens);
    EXPECT_LT(std::int64_t{blocks.num_blocks - 1} * blocks.tokens_per_block, std::max<std::int64_t>(num_tokens, 1));
  }
}

TEST(SourceGuess, HoldsEvenRoutesAndWhatCameBefore) {
  SourceGuess guess{.num_ranks = 8, .num_tokens = 4096, .num_topk = 8, .num_local_experts = 32};
  EXPECT_EQ(guess.num_rows(), 8 * 4096) << "each token arrives once";
  guess.by_token = false;
  EXPECT_EQ(guess.num_rows(), 2 * 4096 * 8) << "twice an even share";
  guess.expert_alignment = 128;
  EXPECT_EQ(guess.num_rows(), 2 * 4096 * 8 + 32 * 127) << "a gap after each expert";
  guess.num_tokens = 0;
  guess.known_rows = 8'000'000;
  EXPECT_EQ(guess.num_rows(), 9'000'000);
  EXPECT_EQ(SourceGuess{}.num_rows(), 0);
}

// bytes_required without a GPU; tests/conformance/memory_test.cpp compares it with the memory of groups.

MemoryShape cuda_shape() {
  MemoryShape shape;
  shape.backend = "cuda";
  shape.num_ranks = 8;
  shape.num_experts = 256;
  shape.num_tokens = 4096;
  shape.num_topk = 8;
  shape.num_recv_rows = 21000;
  shape.row_bytes = 14336;
  shape.scale_row_bytes = 224;
  shape.weights = true;
  return shape;
}

std::size_t required(const MemoryShape& shape) { return bytes_required(shape).value(); }

TEST(BytesRequired, OfCudaGrowsByWhatIsAdded) {
  constexpr std::size_t kPage = 4096;
  MemoryShape shape = cuda_shape();
  const std::size_t with_records = required(shape);
  shape.symmetric_tables = true;
  const std::size_t symmetric = required(shape);
  // Scales, K ids and K weights of each row.
  EXPECT_EQ(with_records - symmetric, (21000U * (224 + 64) + kPage - 1) / kPage * kPage);
  shape.num_routings = 3;
  const std::size_t more_routings = required(shape) - symmetric;
  EXPECT_EQ(more_routings % (2 * kPage), 0U) << "two more Routings";
  EXPECT_GT(more_routings, 2 * 4096U * 8 * (16 + 4 + 8 + 4)) << "destinations, slots, ids and weights of each entry";
  shape.num_routings = 1;
  shape.symmetric = false;
  // One staged block in place of x, the output and combine's input.
  EXPECT_EQ(symmetric - required(shape), 4096U * 14336 + 21000U * 14336);
}

TEST(BytesRequired, OfCudaCountsThePlacementsTables) {
  constexpr std::size_t kPage = 4096;
  MemoryShape shape = cuda_shape();
  shape.num_experts = 2048;  // P
  const std::size_t without = required(shape);
  shape.num_logical_experts = 1024;
  // Ranges of each expert, homes, and the expert of each home; the owners' table ends inside a page.
  constexpr std::size_t kTables = 1024 * 8 + 2 * 2048 * 4;
  EXPECT_EQ(required(shape) - without, kTables);
  shape.placement_on_device = true;
  EXPECT_EQ(required(shape) - without, kTables + kPage) << "the kernel that makes the tables adds its findings";
  shape.num_routings = 3;
  const std::size_t three = required(shape);
  shape.num_logical_experts = 0;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument) << "E is missing";
  shape.placement_on_device = false;
  EXPECT_EQ(three - required(shape), 3 * (kTables + kPage)) << "one for each Routing";
  shape.num_logical_experts = 2049;
  EXPECT_TRUE(bytes_required(shape).ok()) << "more than P: some have no home";
  shape.num_logical_experts = (1 << 20) + 1;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument) << "more than any placement has";
}

TEST(BytesRequired, OfCudaRefusesGroupsThatItDoesNotHave) {
  MemoryShape shape = cuda_shape();
  shape.num_ranks = 2 * kMaxNodes + 2;
  shape.ranks_per_node = 2;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kUnsupported) << "too many nodes";
  shape.ranks_per_node = 0;
  shape.num_ranks = kMaxRanks + 1;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kUnsupported);
}

/// Upper bound: rings, forwarded rows, and returned rows.
TEST(BytesRequired, OfCudaNodesCountsWhatIsForwarded) {
  MemoryShape shape = cuda_shape();
  shape.ranks_per_node = 4;
  shape.num_node_tokens = 4000;
  const std::size_t nothing_forwarded = required(shape);
  // At most the sums of this node and of the other; rings have a budget.
  EXPECT_GT(nothing_forwarded, std::size_t{4000 + 4096} * 14336);
  EXPECT_LT(nothing_forwarded, (std::size_t{2} * 8096 + 4096 + 3 * 21000) * 14336 + (std::size_t{128} << 20));
  shape.num_forwarded_tokens = 3000;
  const std::size_t forwarded = required(shape) - nothing_forwarded;
  EXPECT_GE(forwarded, std::size_t{3000} * 14336);
  EXPECT_LT(forwarded, std::size_t{3000} * (14336 + 1024));
  // Latency mode knows only M of the other ranks.
  shape.max_tokens = 4096;
  shape.num_node_tokens = 0;
  shape.num_forwarded_tokens = 0;
  EXPECT_GT(required(shape), std::size_t{2} * 4096 * 14336);
}

// agreement_word

CallRecord some_record() {
  CallRecord record;
  record.operation = Operation::kDispatch;
  for (std::size_t i = 0; i < kMaxAgreedFields; ++i) record.fields[i] = static_cast<std::int64_t>(100 + i);
  return record;
}

TEST(AgreementWord, EqualRecordsHaveTheSameOne) {
  EXPECT_EQ(agreement_word(some_record()), agreement_word(some_record()));
}

TEST(AgreementWord, IsZeroExactlyForFailedRecords) {
  EXPECT_NE(agreement_word(some_record()), 0U);
  EXPECT_NE(agreement_word(CallRecord{}), 0U);
  for (ErrorCode code : {ErrorCode::kInvalidArgument, ErrorCode::kCapacity, ErrorCode::kUnsupported}) {
    CallRecord failed = some_record();
    failed.set_status(Status(code, "refused"));
    EXPECT_EQ(agreement_word(failed), 0U);
  }
}

TEST(AgreementWord, DiffersWithTheOperationAndWithEveryField) {
  std::set<std::uint64_t> words = {0};
  std::size_t num_records = 1;
  const auto add = [&](const CallRecord& record, const std::string& what) {
    ++num_records;
    EXPECT_TRUE(words.insert(agreement_word(record)).second) << what;
  };
  add(some_record(), "the record itself");
  for (Operation operation : {Operation::kRoute, Operation::kCombine, Operation::kDestroy}) {
    CallRecord other = some_record();
    other.operation = operation;
    add(other, std::string(to_string(operation)));
  }
  for (std::size_t i = 0; i < kMaxAgreedFields; ++i)
    for (std::int64_t change : {std::int64_t{1}, std::int64_t{-1}, std::int64_t{1} << 32, std::int64_t{1} << 63}) {
      CallRecord other = some_record();
      other.fields[i] ^= change;
      add(other, fmt::format("field {} changed by {:#x}", i, change));
    }
  for (std::size_t i = 1; i < kMaxAgreedFields; ++i) {
    CallRecord other = some_record();
    std::swap(other.fields[i - 1], other.fields[i]);
    add(other, fmt::format("fields {} and {} exchanged", i - 1, i));
  }
  EXPECT_EQ(words.size(), num_records);
}

TEST(AgreementWord, IgnoresWhatRanksNeedNotGiveAlike) {
  CallRecord other = some_record();
  other.num_fields = 3;
  other.message.fill('x');
  EXPECT_EQ(agreement_word(other), agreement_word(some_record()));
}

}  // namespace
}  // namespace ferry::cuda
