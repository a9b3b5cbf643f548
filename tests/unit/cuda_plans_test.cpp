/// Number of multiprocessors for each part of a dispatch and a combine, and sizes of their pieces of work.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/call/tuning.hpp"

namespace ferry::cuda {
namespace {

/// Multiprocessors of current GPUs, half of them if two ranks share one, and small numbers that may be left.
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

/// Expects two parts, of which the first is always wanted, to fit. A wanted part gets a block even with a single
/// multiprocessor.
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
      for (const CallShape& shape :
           {CallShape{}, CallShape{.staged = true}, CallShape{.staged = true, .quantized = true}}) {
        const CombinePlan plan = plan_combine(options, {.num_sms = num_sms}, shape);
        expect_fit(plan.num_sum_blocks, plan.num_stage_blocks, shape.staged, num_sms, describe(options, num_sms));
        EXPECT_GE(plan.chunk_rows, 1);
      }
}

TEST(WaitingBlocks, AreBoundedUnlessTheCallSetsANumber) {
  const DeviceLimits limits{.num_sms = 132, .num_ranks = 8, .num_waiting_sms = 20};
  EXPECT_EQ(most_waiting_blocks(0, limits), 20);
  EXPECT_EQ(most_waiting_blocks(64, limits), 64);
  EXPECT_EQ(most_waiting_blocks(500, limits), 132);
  EXPECT_EQ(most_blocks(0, limits), 132);
  const CombinePlan combine = plan_combine({}, limits, {.staged = true});
  EXPECT_LE(combine.num_sum_blocks + combine.num_stage_blocks, 20);
  const DispatchPlan dispatch = plan_dispatch({.num_sms = 40}, limits, {.staged = true});
  EXPECT_EQ(dispatch.num_send_blocks + dispatch.num_receive_blocks, 40);
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

TEST(DispatchPlan, ALoneRankSendsToItself) {
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

/// One row of R stays on the GPU; with fewer blocks than that share, all other blocks would wait for the last of these
/// rows.
TEST(DispatchPlan, OwnRowsGetTheirShareOfTheBlocks) {
  for (int num_ranks : {3, 4, 8, 16}) {
    for (int num_sms : {0, 8, 11, 16, 24, 96}) {
      for (bool staged : {false, true}) {
        const DispatchPlan plan = plan_dispatch({.num_sms = num_sms}, {.num_sms = 132, .num_ranks = num_ranks},
                                                {.row_bytes = 14336, .staged = staged});
        EXPECT_GE(plan.num_own_blocks * num_ranks, plan.num_send_blocks) << num_ranks << " ranks, " << num_sms;
        EXPECT_LT((plan.num_own_blocks - 1) * num_ranks, plan.num_send_blocks) << num_ranks << " ranks, " << num_sms;
      }
    }
  }
}

TEST(DispatchPlan, FewWarpsTakeTwoRowsWithScalesAtOnce) {
  const auto few = [](std::int64_t row_bytes, bool takes_several) {
    return plan_dispatch({}, {.num_sms = 132}, {.row_bytes = row_bytes, .takes_several = takes_several}).few_run_warps;
  };
  EXPECT_TRUE(few(7168, true));
  EXPECT_TRUE(few(8192, true));
  EXPECT_FALSE(few(7168, false)) << "nothing but rows";
  EXPECT_FALSE(few(4096, true)) << "two fit anyway";
  EXPECT_FALSE(few(14336, true)) << "two do not fit";
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

TEST(Plans, TakeFewMultiprocessorsBetweenTwoRanks) {
  const DeviceLimits limits = {.num_sms = 132, .num_ranks = 2};
  for (std::int64_t row_bytes : {2048, 7168, 14336}) {
    EXPECT_EQ(plan_dispatch({}, limits, {.row_bytes = row_bytes}).num_send_blocks, 16);
  }
  const CombinePlan plain = plan_combine({}, limits, {.row_bytes = 14336, .staged = true});
  EXPECT_EQ(plain.num_sum_blocks + plain.num_stage_blocks, 28);
}

TEST(Plans, CombineOfQuantisedRowsTakesTheNumbersOfTheCall) {
  const DeviceLimits limits = {.num_sms = 132, .num_ranks = 4};
  const CallShape shape{.row_bytes = 14336, .staged = true, .quantized = true};
  const CombinePlan plan = plan_combine({}, limits, shape);
  EXPECT_GT(plan.num_stage_blocks, plan_combine({}, limits, {.row_bytes = 14336, .staged = true}).num_stage_blocks);
  const CombinePlan given = plan_combine({.num_sms = 40, .num_copy_sms = 25}, limits, shape);
  EXPECT_EQ(given.num_sum_blocks, 15);
  EXPECT_EQ(given.num_stage_blocks, 25);
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

/// Numbers in docs/performance-gpus.md.
TEST(Plans, TakeAsManyMultiprocessorsAsIsDocumented) {
  struct Documented {
    int num_ranks;
    int dispatch;
    int combine;
    int plain_dispatch;
    int plain_combine;
  };
  for (const Documented& line : {Documented{2, 16, 16, 28, 28}, {4, 11, 12, 23, 24}, {8, 10, 12, 22, 24}}) {
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

}  // namespace
}  // namespace ferry::cuda
