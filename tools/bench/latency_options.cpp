#include "bench/latency_options.hpp"

#include <fmt/format.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "run/option_types.hpp"

namespace ferry::tools {

namespace {

constexpr const char* kQuantize = "--quantize";
constexpr const char* kOrder = "--order";
constexpr const char* kSplit = "--split";
constexpr const char* kMask = "--mask-lost-ranks";
constexpr const char* kLateWeights = "--late-weights";

Status refused(const char* option, BenchOp op, std::string_view why) {
  return {ErrorCode::kInvalidArgument, fmt::format("{} with --op {}: {}", option, name_of(op), why)};
}

}  // namespace

void add_latency_options(CLI::App& command, BenchPlan* plan) {
  add_choice<Quantization>(command, kQuantize, &plan->quantize,
                           {{"none", Quantization::kNone},
                            {"fp8", Quantization::kFp8},
                            {"fp8-pow2", Quantization::kFp8PowerOfTwo},
                            {"fp8-ue8m0", Quantization::kFp8Ue8m0},
                            {"int8", Quantization::kInt8}},
                           "Latency mode: quantisation of bf16 rows by dispatch (default none)");
  add_choice<CombineOrder>(command, kOrder, &plan->order,
                           {{"exact", CombineOrder::kExact}, {"rank_sums", CombineOrder::kRankSums}},
                           "Latency mode: order of combine's sums (default exact)");
  command.add_flag(kSplit, plan->split, "Latency mode: make each call as its send half and its receive half");
  command.add_flag(kLateWeights, plan->late_weights,
                   "Latency mode: give the weights to combine, as programs of deep_ep do, not to dispatch");
  command.add_flag(kMask, plan->masks_lost_ranks, "Latency mode: in a group that goes on without lost ranks");
}

Status settle_latency_options(const CLI::App& command, BenchPlan* plan) {
  const auto given = [&](const char* option) { return command.count(option) > 0; };
  if (!plan->latency()) {
    for (const char* option : {kQuantize, kOrder, kSplit, kLateWeights, kMask}) {
      if (given(option)) return refused(option, plan->op, "only calls of latency mode take it (--op latency-…)");
    }
    return {};
  }
  if (given("--layout") && plan->layout != Layout::kSlab) {
    return refused("--layout", plan->op, "latency mode receives in a slab; leave the option out");
  }
  if (given("--cached")) return refused("--cached", plan->op, "each call routes; leave the option out");
  if (given(kQuantize) && !plan->measures_dispatch()) return refused(kQuantize, plan->op, "nothing is dispatched");
  if (given(kLateWeights) && !plan->measures_combine()) {
    return refused(kLateWeights, plan->op, "nothing is combined");
  }
  if (given(kOrder) && !plan->measures_combine()) return refused(kOrder, plan->op, "nothing is combined");
  if (plan->quantize != Quantization::kNone && plan->dtype == BenchDType::kFp8) {
    return refused(kQuantize, plan->op, "rows of --dtype fp8 are quantised already; leave one of the two out");
  }
  plan->layout = Layout::kSlab;
  return {};
}

}  // namespace ferry::tools
