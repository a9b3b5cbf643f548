#include "cuda/call/tuning.hpp"

#include <algorithm>

#include "cuda/sync/control.hpp"

namespace ferry::cuda {
namespace {

/// Defaults for one rank per GPU, measured on 2 and 4 H200 (docs/experiments-kernels.md): multiprocessors that keep up
/// with the links. One copies rows inside the GPU at the pace at which one of these sends them (47 and 43 GB/s).
constexpr int kSendSms = 8;
constexpr int kUnpackSms = 4;
/// Multiprocessors that copy out of staging the rows that kSendSms of each peer send: only rows that have crossed the
/// links are staged.
constexpr int kCopySms = 12;
constexpr int kSumSms = 9;
/// On four H200 11 to 14 took 497 us, 10 498, 9 499 and 8 502; a row of eight ranks' sums has more terms to wait for.
constexpr int kLeastSumSms = 12;
/// This many fill the links of two ranks, although half of all rows stay on their GPU.
constexpr int kMostSumSms = 16;
/// Only rows that cross the links are staged, at the pace of the links.
constexpr int kStageSms = 12;
/// Number of each kind for long rows between two ranks: 14 and 14 took a little less time than 16 that sum and 12 that
/// stage.
constexpr int kHalfSumSms = 14;
/// Combine of rows that travel as FP8: the stagers read two bytes for each one that crosses the links, also of the rows
/// that stay, and quantising bounds each to 16 GB/s. Between two H200 4,096 tokens took 146 us with these numbers, 202
/// with 24 and 36, and 191 as given (docs/experiments-kernels.md).
constexpr int kFp8SumSms = 32;
constexpr int kFp8StageSms = 64;
/// Share of the 16 senders between two ranks that sends the half of the rows that stays: 7 took 101 us with FP8 rows
/// and 203 us into plain memory, 8 took 105 and 208; with long rows into symmetric memory 7 took 192 us and 8 took 189.
constexpr int kPairOwnSms = 7;
constexpr int kPairSms = 16;
/// Rows that are sent in pieces of several KiB.
constexpr std::int64_t kLongRowBytes = 8192;
/// Rows with scales, of which one fits into the stage of a warp: four warps that take two or three at once send as
/// much, and their scales side by side, in half as many steps. With rows of 7168 bytes 260 us on four H200, with eight
/// warps and single rows 265; rows without scales took longer (493 and 483).
constexpr std::int64_t kMostSingleRowBytes = 8192;
constexpr std::int64_t kMostPairedRowBytes = 4096;
/// Copies inside the GPU wait for memory, and a short row waits as long as a long one.
constexpr std::int64_t kShortRowBytes = 6144;
constexpr int kShortRowCopyFactor = 2;
/// Longest rows whose pace is set by the cost of a token, not by the links.
constexpr std::int64_t kTinyRowBytes = 3072;
constexpr int kTinyRowSendFactor = 2;
constexpr int kChunkTokens = 512;
/// The report of a chunk takes as long for short rows as for long ones.
constexpr int kShortRowChunkTokens = 1024;
/// Staged rows of each source between two reports: as few as possible, so that peers can start early.
constexpr int kStagedRows = 1;

/// `link_sms` fill the links to the peers. One row of R stays on the GPU, which is additional work; a rank that is
/// alone has no links to wait for.
int with_own_rows(int link_sms, int num_ranks) {
  constexpr int kAlone = 4;
  return num_ranks < 2 ? kAlone * link_sms : link_sms * num_ranks / (num_ranks - 1);
}

/// Share of `send_sms` that sends the rows that stay on this GPU, one row of R: never less than the pace of the others
/// requires.
int own_sms(int send_sms, int num_ranks, const CallShape& shape) {
  if (num_ranks < 2) return send_sms;
  // Between two ranks the links take short rows, and those that also cross staging, from one more than copies its own.
  const bool even = num_ranks > 2 || (shape.row_bytes >= kLongRowBytes && !shape.staged);
  const int own = even ? (send_sms + num_ranks - 1) / num_ranks : send_sms * kPairOwnSms / kPairSms;
  return std::clamp(own, std::min(1, send_sms - 1), send_sms - 1);
}

int for_short_rows(int copy_sms, const CallShape& shape) {
  return copy_sms * (shape.row_bytes < kShortRowBytes ? kShortRowCopyFactor : 1);
}

int sending_sms(int num_ranks, const CallShape& shape) {
  const int others = std::max(1, num_ranks - 1);
  const int sms = num_ranks < 2 ? with_own_rows(kSendSms, num_ranks) : kSendSms + (kSendSms + others - 1) / others;
  // Two ranks have more for their own rows: 16 filled the links as well as 32 did.
  const bool enough = num_ranks == 2 && !shape.staged;
  return shape.row_bytes < kTinyRowBytes && !enough ? kTinyRowSendFactor * sms : sms;
}

int receiving_sms(int num_ranks) { return num_ranks < 2 ? 1 : kCopySms; }  // alone, nothing arrives

int summing_sms(int num_ranks) {
  const int sms = with_own_rows(kSumSms, num_ranks);
  return num_ranks < 2 ? sms : std::clamp(sms, kLeastSumSms, kMostSumSms);
}

int staging_sms(int num_ranks, const CallShape& shape) {
  return num_ranks < 2 ? 1 : for_short_rows(kStageSms, shape);  // a single rank has no peer that reads them
}

/// Two parts that together take at most `most` blocks, and at least one each if they are wanted at all.
void fit(int most, int& first, int& second) {
  if (second == 0) {
    first = std::clamp(first, 1, std::max(1, most));
    return;
  }
  const int total = first + second;
  if (total > most) {
    second = std::max(1, most * second / total);
    first = most - second;
  }
  first = std::max(1, first);
}

/// The caller's numbers in place of the defaults, where given.
void apply(const KernelOptions& options, int& moving, int& copying) {
  if (options.num_copy_sms > 0 && copying > 0) copying = options.num_copy_sms;
  if (options.num_sms <= 0) return;
  const int total = moving + copying;
  if (copying > 0) {
    if (options.num_copy_sms <= 0) copying = options.num_sms * copying / total;
    copying = std::clamp(copying, 1, std::max(1, options.num_sms - 1));
  }
  moving = std::max(1, options.num_sms - copying);
}

}  // namespace

DispatchPlan plan_dispatch(const KernelOptions& options, const DeviceLimits& limits, const CallShape& shape) {
  DispatchPlan plan;
  plan.bulk = limits.has_bulk && options.copy_path != CopyPath::kLoadStore;
  plan.num_send_blocks = sending_sms(limits.num_ranks, shape);
  if (shape.staged) {
    plan.num_receive_blocks = receiving_sms(limits.num_ranks);
  } else if (shape.unpacks) {
    plan.num_receive_blocks = kUnpackSms;
  }
  apply(options, plan.num_send_blocks, plan.num_receive_blocks);
  fit(std::min(most_waiting_blocks(options.num_sms, limits), kMaxCallBlocks), plan.num_send_blocks,
      plan.num_receive_blocks);
  plan.num_own_blocks = own_sms(plan.num_send_blocks, limits.num_ranks, shape);
  if (options.num_copy_sms > 0 && plan.num_receive_blocks == 0 && limits.num_ranks > 1) {
    plan.num_own_blocks = std::min(options.num_copy_sms, plan.num_send_blocks - 1);
  }
  plan.few_run_warps =
      shape.takes_several && shape.row_bytes > kMostPairedRowBytes && shape.row_bytes <= kMostSingleRowBytes;
  const int chunk_tokens = shape.row_bytes < kShortRowBytes ? kShortRowChunkTokens : kChunkTokens;
  plan.chunk_tokens = options.chunk_tokens > 0 ? options.chunk_tokens : chunk_tokens;
  return plan;
}

CombinePlan plan_combine(const KernelOptions& options, const DeviceLimits& limits, const CallShape& shape) {
  CombinePlan plan;
  plan.bulk = limits.has_bulk && options.copy_path != CopyPath::kLoadStore;
  plan.num_sum_blocks = summing_sms(limits.num_ranks);
  plan.num_stage_blocks = shape.staged ? staging_sms(limits.num_ranks, shape) : 0;
  if (shape.staged && limits.num_ranks == 2 && shape.row_bytes >= kShortRowBytes) {
    plan.num_sum_blocks = plan.num_stage_blocks = kHalfSumSms;
  }
  if (shape.quantized) {
    plan.num_sum_blocks = kFp8SumSms;
    plan.num_stage_blocks = kFp8StageSms;
  }
  apply(options, plan.num_sum_blocks, plan.num_stage_blocks);
  fit(std::min(most_waiting_blocks(options.num_sms, limits), kMaxCallBlocks), plan.num_sum_blocks,
      plan.num_stage_blocks);
  plan.chunk_rows = options.chunk_tokens > 0 ? options.chunk_tokens : kStagedRows;
  return plan;
}

int most_blocks(int num_sms, const DeviceLimits& limits) {
  return std::max(1, num_sms > 0 ? std::min(num_sms, limits.num_sms) : limits.num_sms);
}

int most_waiting_blocks(int num_sms, const DeviceLimits& limits) {
  const int most = most_blocks(num_sms, limits);
  return num_sms > 0 ? most : std::clamp(limits.num_waiting_sms, 1, most);
}

}  // namespace ferry::cuda
