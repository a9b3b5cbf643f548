/// What the CUDA backend's host decides and lays out. Needs no GPU.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/intranode/routing_tables.hpp"
#include "cuda/intranode/tuning.hpp"
#include "cuda/sync/call_log.hpp"
#include "cuda/sync/control.hpp"
#include "cuda/sync/rail_params.hpp"
#include "ferry/group.hpp"
#include "plan/token_record.hpp"

namespace ferry::cuda {
namespace {

// plan_dispatch, plan_combine

/// Multiprocessors of today's GPUs, their halves where two ranks share one, and what is left of them at worst.
constexpr std::array<int, 12> kNumSms = {1, 2, 3, 4, 7, 8, 11, 16, 24, 66, 132, 148};

std::vector<KernelOptions> some_options() {
  std::vector<KernelOptions> all;
  for (int num_sms : {0, 1, 2, 3, 8, 20, 132, 1000}) {
    for (int num_copy_sms : {0, 1, 4, 19, 500}) {
      all.push_back({.num_sms = num_sms, .num_copy_sms = num_copy_sms});
    }
  }
  return all;
}

std::string describe(const KernelOptions& options, int num_sms) {
  return fmt::format("num_sms {} and num_copy_sms {} of {} multiprocessors", options.num_sms, options.num_copy_sms,
                     num_sms);
}

/// Two parts of which the first is always wanted. A wanted part gets a block even if there is but one multiprocessor.
void expect_fit(int first, int second, bool second_wanted, int num_sms, const std::string& what) {
  EXPECT_GE(first, 1) << what;
  if (second_wanted) {
    EXPECT_GE(second, 1) << what;
  } else {
    EXPECT_EQ(second, 0) << what;
  }
  EXPECT_LE(first + second, num_sms >= 2 || !second_wanted ? num_sms : 2) << what;
}

TEST(DispatchPlan, WantedPartsGetBlocksAndAllFit) {
  for (int num_sms : kNumSms)
    for (const KernelOptions& options : some_options())
      for (bool staged : {false, true})
        for (bool unpacks : {false, true}) {
          const DispatchPlan plan =
              plan_dispatch(options, {.num_sms = num_sms}, {.staged = staged, .unpacks = unpacks});
          expect_fit(plan.num_send_blocks, plan.num_receive_blocks, staged || unpacks, num_sms,
                     describe(options, num_sms));
          EXPECT_GE(plan.chunk_tokens, 1);
        }
}

TEST(CombinePlan, WantedPartsGetBlocksAndAllFit) {
  for (int num_sms : kNumSms)
    for (const KernelOptions& options : some_options())
      for (bool staged : {false, true}) {
        const CombinePlan plan = plan_combine(options, {.num_sms = num_sms}, {.staged = staged});
        expect_fit(plan.num_sum_blocks, plan.num_stage_blocks, staged, num_sms, describe(options, num_sms));
        EXPECT_GE(plan.chunk_rows, 1);
        EXPECT_GE(plan.first_chunk_rows, 1);
        EXPECT_LE(plan.first_chunk_rows, plan.chunk_rows);
      }
}

TEST(DispatchPlan, TakesTheCallersNumbersWhereTheyFit) {
  const DeviceLimits limits = {.num_sms = 132};
  for (bool staged : {false, true}) {
    const DispatchPlan total = plan_dispatch({.num_sms = 24}, limits, {.staged = staged, .unpacks = true});
    EXPECT_EQ(total.num_send_blocks + total.num_receive_blocks, 24);
    const DispatchPlan both =
        plan_dispatch({.num_sms = 24, .num_copy_sms = 5}, limits, {.staged = staged, .unpacks = true});
    EXPECT_EQ(both.num_send_blocks, 19);
    EXPECT_EQ(both.num_receive_blocks, 5);
    const DispatchPlan copying = plan_dispatch({.num_copy_sms = 7}, limits, {.staged = staged, .unpacks = true});
    EXPECT_EQ(copying.num_receive_blocks, 7);
  }
  const DispatchPlan alone =
      plan_dispatch({.num_sms = 24, .num_copy_sms = 5}, limits, {.staged = false, .unpacks = false});
  EXPECT_EQ(alone.num_send_blocks, 24) << "nothing to copy";
  EXPECT_EQ(alone.num_receive_blocks, 0);
  EXPECT_EQ(plan_dispatch({.chunk_tokens = 17}, limits, {.staged = false, .unpacks = false}).chunk_tokens, 17);
}

TEST(DispatchPlan, ARankThatIsAloneSendsToNobodyElse) {
  for (int num_copy_sms : {0, 1, 4, 1000}) {
    const DispatchPlan plan = plan_dispatch({.num_copy_sms = num_copy_sms}, {.num_sms = 132, .num_ranks = 1}, {});
    EXPECT_EQ(plan.num_own_blocks, plan.num_send_blocks) << num_copy_sms;
  }
}

TEST(DispatchPlan, SomeBlocksSendToPeersAndSomeCopyOwnRows) {
  for (int num_ranks : {2, 3, 8, 128}) {
    for (int num_sms : {0, 1, 2, 16, 500}) {
      for (int num_copy_sms : {0, 1, 1000}) {
        const DispatchPlan plan = plan_dispatch({.num_sms = num_sms, .num_copy_sms = num_copy_sms},
                                                {.num_sms = 132, .num_ranks = num_ranks}, {});
        EXPECT_LT(plan.num_own_blocks, plan.num_send_blocks);
        EXPECT_EQ(plan.num_own_blocks > 0, plan.num_send_blocks > 1);
        EXPECT_LE(plan.num_send_blocks, 132);
      }
    }
  }
}

TEST(CombinePlan, TakesTheCallersNumbersWhereTheyFit) {
  const DeviceLimits limits = {.num_sms = 132};
  const CombinePlan total = plan_combine({.num_sms = 24}, limits, {.staged = true});
  EXPECT_EQ(total.num_sum_blocks + total.num_stage_blocks, 24);
  const CombinePlan both = plan_combine({.num_sms = 24, .num_copy_sms = 5}, limits, {.staged = true});
  EXPECT_EQ(both.num_sum_blocks, 19);
  EXPECT_EQ(both.num_stage_blocks, 5);
  const CombinePlan alone = plan_combine({.num_sms = 24, .num_copy_sms = 5}, limits, {.staged = false});
  EXPECT_EQ(alone.num_sum_blocks, 24);
  EXPECT_EQ(alone.num_stage_blocks, 0);
  EXPECT_EQ(plan_combine({.chunk_tokens = 17}, limits, {.staged = false}).chunk_rows, 17);
}

TEST(Plans, TakeFewMultiprocessorsForLongRowsOfEightRanks) {
  const DeviceLimits limits = {.num_sms = 132, .num_ranks = 8};
  for (std::int64_t row_bytes : {7168, 14336}) {
    const DispatchPlan symmetric = plan_dispatch({}, limits, {.row_bytes = row_bytes});
    EXPECT_LE(symmetric.num_send_blocks, 12);
    const DispatchPlan plain = plan_dispatch({}, limits, {.row_bytes = row_bytes, .staged = true, .unpacks = true});
    EXPECT_LE(plain.num_send_blocks + plain.num_receive_blocks, 24);
    EXPECT_LE(plan_combine({}, limits, {.row_bytes = row_bytes}).num_sum_blocks, 16);
    const CombinePlan staged = plan_combine({}, limits, {.row_bytes = row_bytes, .staged = true});
    EXPECT_LE(staged.num_sum_blocks + staged.num_stage_blocks, 24);
  }
}

/// The table of docs/performance-gpus.md.
TEST(Plans, TakeAsManyMultiprocessorsAsIsDocumented) {
  struct Documented {
    int num_ranks;
    int dispatch;
    int combine;
    int plain_dispatch;
    int plain_combine;
  };
  for (const Documented& line : {Documented{2, 16, 16, 28, 28}, {4, 10, 12, 22, 24}, {8, 9, 10, 21, 22}}) {
    const DeviceLimits limits = {.num_sms = 132, .num_ranks = line.num_ranks};
    for (const std::int64_t row_bytes : {7168, 14336}) {
      const CallShape symmetric = {.row_bytes = row_bytes};
      const CallShape plain = {.row_bytes = row_bytes, .staged = true, .unpacks = true};
      const DispatchPlan dispatch = plan_dispatch({}, limits, symmetric);
      EXPECT_EQ(dispatch.num_send_blocks + dispatch.num_receive_blocks, line.dispatch);
      const DispatchPlan staged = plan_dispatch({}, limits, plain);
      EXPECT_EQ(staged.num_send_blocks + staged.num_receive_blocks, line.plain_dispatch);
      const CombinePlan combine = plan_combine({}, limits, symmetric);
      EXPECT_EQ(combine.num_sum_blocks + combine.num_stage_blocks, line.combine);
      const CombinePlan staging = plan_combine({}, limits, plain);
      EXPECT_EQ(staging.num_sum_blocks + staging.num_stage_blocks, line.plain_combine);
    }
  }
}

TEST(Plans, TakeFewMultiprocessorsForLongRowsOfTwoRanks) {
  const DeviceLimits limits = {.num_sms = 132, .num_ranks = 2};
  EXPECT_LE(plan_dispatch({}, limits, {.row_bytes = 14336}).num_send_blocks, 16);
  EXPECT_LE(plan_combine({}, limits, {.row_bytes = 14336}).num_sum_blocks, 16);
  EXPECT_LE(plan_combine({}, limits, {.row_bytes = 4096}).num_sum_blocks, 16);
  const CombinePlan staged = plan_combine({}, limits, {.row_bytes = 14336, .staged = true});
  EXPECT_LE(staged.num_sum_blocks + staged.num_stage_blocks, 28);
  for (const std::int64_t row_bytes : {4096, 7168, 14336}) {
    const DispatchPlan plain = plan_dispatch({}, limits, {.row_bytes = row_bytes, .staged = true, .unpacks = true});
    EXPECT_LE(plain.num_send_blocks + plain.num_receive_blocks, 28);
  }
}

TEST(MostBlocks, IsTheCallersBoundWhereTheGpuHasThatMany) {
  EXPECT_EQ(most_blocks(0, {.num_sms = 132}), 132);
  EXPECT_EQ(most_blocks(20, {.num_sms = 132}), 20);
  EXPECT_EQ(most_blocks(200, {.num_sms = 132}), 132);
  EXPECT_EQ(most_blocks(1, {.num_sms = 1}), 1);
}

TEST(Plans, StayWithinTheCallersTotal) {
  for (const KernelOptions& options : some_options()) {
    if (options.num_sms < 2) continue;
    const DispatchPlan dispatch = plan_dispatch(options, {.num_sms = 132}, {.staged = true, .unpacks = true});
    EXPECT_LE(dispatch.num_send_blocks + dispatch.num_receive_blocks, options.num_sms) << describe(options, 132);
    const CombinePlan combine = plan_combine(options, {.num_sms = 132}, {.staged = true});
    EXPECT_LE(combine.num_sum_blocks + combine.num_stage_blocks, options.num_sms) << describe(options, 132);
  }
}

TEST(Plans, CopyInBulkOnlyWhereTheGpuCanAndTheCallerDoesNotMind) {
  for (CopyPath path : {CopyPath::kAuto, CopyPath::kBulk, CopyPath::kLoadStore})
    for (bool staged : {false, true}) {
      const KernelOptions options = {.copy_path = path};
      const DeviceLimits without = {.num_sms = 132, .has_bulk = false};
      const DeviceLimits with = {.num_sms = 132, .has_bulk = true};
      EXPECT_FALSE(plan_dispatch(options, without, {.staged = staged, .unpacks = true}).bulk);
      EXPECT_FALSE(plan_combine(options, without, {.staged = staged}).bulk);
      EXPECT_EQ(plan_dispatch(options, with, {.staged = staged, .unpacks = true}).bulk, path != CopyPath::kLoadStore);
      EXPECT_EQ(plan_combine(options, with, {.staged = staged}).bulk, path != CopyPath::kLoadStore);
    }
}

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

/// A part of a layout, with the bytes that its elements need.
struct Part {
  const char* name;
  const void* begin;
  std::size_t num_bytes;
};

template <typename T>
Part part(const char* name, const T* begin, std::size_t count) {
  return {name, begin, count * sizeof(T)};
}

/// Parts in order, none in another, each at a multiple of 64 from the base; the size ends right behind the last one.
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
            part("done", control.done, num_ranks),
            part("block_done", control.block_done, num_ranks * kMaxCallBlocks),
            part("counts_ready", control.counts_ready, num_ranks),
            part("headers", control.headers, 2 * num_ranks),
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
  EXPECT_EQ(guess.num_rows(), 8 * 4096) << "each token comes once";
  guess.by_token = false;
  EXPECT_EQ(guess.num_rows(), 2 * 4096 * 8) << "twice an even share";
  guess.expert_alignment = 128;
  EXPECT_EQ(guess.num_rows(), 2 * 4096 * 8 + 32 * 127) << "and a gap after each expert";
  guess.num_tokens = 0;
  guess.known_rows = 8'000'000;
  EXPECT_EQ(guess.num_rows(), 9'000'000);
  EXPECT_EQ(SourceGuess{}.num_rows(), 0);
}

// bytes_required without a GPU; tests/conformance/memory_test.cpp compares it with what groups hold.

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
  // Ranges of each expert, homes, and whose home each is; the owners' table ends somewhere in a page.
  constexpr std::size_t kTables = 1024 * 8 + 2 * 2048 * 4;
  EXPECT_EQ(required(shape) - without, kTables);
  shape.placement_on_device = true;
  EXPECT_EQ(required(shape) - without, kTables + kPage) << "made by a kernel, with what that has found";
  shape.num_routings = 3;
  const std::size_t three = required(shape);
  shape.num_logical_experts = 0;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument) << "E is missing";
  shape.placement_on_device = false;
  EXPECT_EQ(three - required(shape), 3 * (kTables + kPage)) << "one for each Routing";
  shape.num_logical_experts = 2049;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument) << "more than P";
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

/// A bound: rings, what is forwarded, and what comes back.
TEST(BytesRequired, OfCudaNodesCountsWhatIsForwarded) {
  MemoryShape shape = cuda_shape();
  shape.ranks_per_node = 4;
  shape.num_node_tokens = 4000;
  const std::size_t nothing_forwarded = required(shape);
  // Sums of the own node and of the other, at most; rings have a budget.
  EXPECT_GT(nothing_forwarded, std::size_t{4000 + 4096} * 14336);
  EXPECT_LT(nothing_forwarded, (std::size_t{2} * 8096 + 4096 + 3 * 21000) * 14336 + (std::size_t{128} << 20));
  shape.num_forwarded_tokens = 3000;
  const std::size_t forwarded = required(shape) - nothing_forwarded;
  EXPECT_GE(forwarded, std::size_t{3000} * 14336);
  EXPECT_LT(forwarded, std::size_t{3000} * (14336 + 1024));
  // Of latency mode, which knows only M of the other ranks.
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
