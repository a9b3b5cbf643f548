#include "cuda/tuning.hpp"

#include <algorithm>

namespace ferry::cuda {
namespace {

/// Defaults for one rank per GPU, measured on H200 (docs/performance.md).
constexpr int kSendSms = 10;
constexpr int kUnpackSms = 4;
constexpr int kCopySms = 14;
constexpr int kSumSms = 12;
constexpr int kStageSms = 12;
constexpr int kChunkTokens = 512;
constexpr int kChunkRows = 128;

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

DispatchPlan plan_dispatch(const KernelOptions& options, const DeviceLimits& limits, bool staged, bool unpacks) {
  DispatchPlan plan;
  plan.bulk = limits.has_bulk && options.copy_path != CopyPath::kLoadStore;
  plan.num_send_blocks = kSendSms;
  plan.num_receive_blocks = staged ? kCopySms : unpacks ? kUnpackSms : 0;
  apply(options, plan.num_send_blocks, plan.num_receive_blocks);
  fit(limits.num_sms, plan.num_send_blocks, plan.num_receive_blocks);
  plan.chunk_tokens = options.chunk_tokens > 0 ? options.chunk_tokens : kChunkTokens;
  return plan;
}

CombinePlan plan_combine(const KernelOptions& options, const DeviceLimits& limits, bool staged) {
  CombinePlan plan;
  plan.bulk = limits.has_bulk && options.copy_path != CopyPath::kLoadStore;
  plan.num_sum_blocks = kSumSms;
  plan.num_stage_blocks = staged ? kStageSms : 0;
  apply(options, plan.num_sum_blocks, plan.num_stage_blocks);
  fit(limits.num_sms, plan.num_sum_blocks, plan.num_stage_blocks);
  plan.chunk_rows = options.chunk_tokens > 0 ? options.chunk_tokens : kChunkRows;
  return plan;
}

}  // namespace ferry::cuda
