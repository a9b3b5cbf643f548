#include "bench/tune_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <tuple>
#include <utility>

#include "bench/kernel_settings.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

constexpr std::array kNumSms = {2, 4, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 132};
/// Plain pointers need multiprocessors on both sides of the staging: these shares of them only copy.
constexpr std::array kPlainNumSms = {8, 16, 24, 32, 48, 64, 96};
constexpr int kQuartersOfCopySms = 4;
/// Chunks matter if rows are staged. Otherwise some of a dispatch's multiprocessors only copy rows that stay on the
/// rank.
constexpr std::array kChunkTokens = {64, 128, 256, 512, 1024, 2048};
constexpr std::array kOwnRowSms = {1, 2, 3, 4, 6, 8};
/// More would take multiprocessors from libraries whose kernels wait, which a file does not.
constexpr std::array kLatencyNumSms = {8, 16, 24, 32, 48, 64, 80, 96};
/// Over nodes beside the fewest that an exchange takes. The default is 24.
constexpr std::array kNodesNumSms = {5, 8, 12, 16, 20, 24, 32, 48, 64};
/// Bytes of a ring's chunks, which hold 512 KiB at most.
constexpr std::array kChunkBytes = {16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10};

std::vector<int> numbers_or(const std::vector<int>& given, std::span<const int> otherwise) {
  return given.empty() ? std::vector<int>(otherwise.begin(), otherwise.end()) : given;
}

/// Two blocks serve the rings of each other node, and one copies what stays in this one.
int fewest_sms(int num_nodes) { return num_nodes > 1 ? 2 * (num_nodes - 1) + 1 : 1; }

std::vector<int> sms_to_try(const BenchPlan& plan, const TriedNumbers& tried) {
  if (plan.num_nodes == 1)
    return numbers_or(tried.num_sms, plan.latency() ? std::span<const int>(kLatencyNumSms) : kNumSms);
  const int fewest = fewest_sms(plan.num_nodes);
  std::vector<int> all = numbers_or(tried.num_sms, kNodesNumSms);
  if (tried.num_sms.empty()) all.insert(all.begin(), fewest);
  std::erase_if(all, [&](int num_sms) { return num_sms < fewest; });
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

/// Numbers of tokens in a chunk between nodes that are worth a try.
std::vector<int> nodes_chunks(const Sweep& sweep) {
  std::vector<int> all;
  for (const int chunk_bytes : kChunkBytes) {
    const auto tokens = static_cast<int>(std::max<std::int64_t>(1, chunk_bytes / sweep.item_bytes));
    if (tokens <= sweep.num_tokens && (all.empty() || all.back() != tokens)) all.push_back(tokens);
  }
  return all;
}

bool is_dispatch(const Sweep& sweep) { return sweep.op == BenchOp::kDispatch || sweep.op == BenchOp::kLatencyDispatch; }
bool is_latency(const Sweep& sweep) {
  return sweep.op == BenchOp::kLatencyDispatch || sweep.op == BenchOp::kLatencyCombine;
}

/// Variants of a sweep's best settings in what it can be told beside num_sms.
std::vector<KernelOptions> variants(const Sweep& sweep, const TriedNumbers& tried) {
  const KernelOptions best = sweep.kernels[sweep.best()];
  const bool over_nodes = sweep.num_nodes > 1;
  std::vector<KernelOptions> all;
  const auto add = [&](int KernelOptions::*option, int value) {
    all.push_back(best);
    all.back().*option = value;
  };
  if (over_nodes || sweep.staged) {
    const std::vector<int> chunks =
        numbers_or(tried.chunk_tokens, over_nodes ? std::span<const int>(nodes_chunks(sweep)) : kChunkTokens);
    for (const int tokens : chunks) add(&KernelOptions::chunk_tokens, tokens);
  }
  if (!is_dispatch(sweep) || sweep.staged || (is_latency(sweep) && !over_nodes)) return all;
  for (const int own_row_sms : kOwnRowSms) {
    const int fewest_others = over_nodes ? fewest_sms(sweep.num_nodes) - 1 : 1;
    if (best.num_sms > 0 && own_row_sms > best.num_sms - fewest_others) continue;
    add(&KernelOptions::num_copy_sms, own_row_sms);
  }
  return all;
}

std::string number_or_default(int value) { return value == 0 ? "default" : fmt::to_string(value); }

/// Type of the rows that travel.
std::string_view name_of_rows(const BenchPlan& plan, BenchOp op) {
  if (op == BenchOp::kCombine || op == BenchOp::kLatencyCombine) return name_of(BenchDType::kBfloat16);
  return plan.quantize == Quantization::kNone ? name_of(plan.dtype) : name_of(plan.quantize);
}

Sweep sweep_of(const BenchPlan& plan, BenchOp op) {
  const bool combine = op == BenchOp::kCombine || op == BenchOp::kLatencyCombine;
  Sweep sweep;
  sweep.op = op;
  sweep.staged = plan.memory == BenchMemory::kPlain;
  sweep.row_bytes = combine ? plan.combine_row_bytes() : plan.payload_bytes();
  sweep.item_bytes = combine ? plan.combine_wire_row_bytes() : plan.dispatch_wire_row_bytes();
  sweep.name = fmt::format("{} {}, {} bytes, {} memory", name_of(op), name_of_rows(plan, op), sweep.row_bytes,
                           name_of(plan.memory));
  sweep.layout = plan.layout;
  sweep.num_tokens = plan.num_tokens;
  sweep.num_nodes = plan.num_nodes;
  sweep.num_ranks = plan.num_ranks;
  return sweep;
}

}  // namespace

std::size_t Sweep::best() const {
  std::size_t best_idx = 0;
  for (std::size_t i = 1; i < results.size(); ++i) {
    if (results[i].time_p50_ns < results[best_idx].time_p50_ns) best_idx = i;
  }
  return best_idx;
}

std::vector<KernelOptions> first_settings(const BenchPlan& plan, const TriedNumbers& tried) {
  std::vector<KernelOptions> all(1);
  const auto add = [&](int num_sms, int num_copy_sms) {
    KernelOptions& kernel = all.emplace_back();
    kernel.num_sms = num_sms;
    kernel.num_copy_sms = num_copy_sms;
  };
  if (plan.num_nodes > 1 || plan.latency() || plan.memory == BenchMemory::kSymmetric) {
    for (const int num_sms : sms_to_try(plan, tried)) add(num_sms, 0);
    return all;
  }
  for (const int num_sms : numbers_or(tried.num_sms, kPlainNumSms)) {
    for (int quarters = 1; quarters < kQuartersOfCopySms; ++quarters) {
      add(num_sms, num_sms * quarters / kQuartersOfCopySms);
    }
  }
  return all;
}

std::vector<KernelOptions> second_settings(const std::vector<Sweep>& sweeps, const TriedNumbers& tried) {
  std::vector<KernelOptions> all(1);
  const auto add = [&all](const KernelOptions& kernel) {
    const auto numbers = [](const KernelOptions& one) {
      return std::tuple(one.num_sms, one.num_copy_sms, one.chunk_tokens);
    };
    const auto is_same = [&](const KernelOptions& other) { return numbers(other) == numbers(kernel); };
    if (std::none_of(all.begin(), all.end(), is_same)) all.push_back(kernel);
  };
  for (const Sweep& sweep : sweeps) {
    add(sweep.kernels[sweep.best()]);
    for (const KernelOptions& variant : variants(sweep, tried)) add(variant);
  }
  return all;
}

std::vector<Sweep> sweeps_of(const BenchPlan& plan, const RunOutcome& outcome) {
  std::vector<Sweep> sweeps;
  for (std::size_t kernel_idx = 0; kernel_idx < plan.kernels.size(); ++kernel_idx) {
    std::size_t op_idx = 0;
    for (const OpResult& result : summarise(plan, outcome, kernel_idx)) {
      const bool is_tuned = result.op == plan.dispatch_op() || result.op == plan.combine_op();
      if (!is_tuned || result.time_p50_ns == 0) continue;
      if (op_idx == sweeps.size()) sweeps.push_back(sweep_of(plan, result.op));
      sweeps[op_idx].kernels.push_back(plan.kernels[kernel_idx]);
      sweeps[op_idx].results.push_back(result);
      ++op_idx;
    }
  }
  return sweeps;
}

TunedCall tuned_call(const Sweep& sweep) {
  TunedCall call;
  call.operation =
      fmt::format("{}{}", is_latency(sweep) ? "latency_" : "", is_dispatch(sweep) ? "dispatch" : "combine");
  call.staged = sweep.staged;
  call.row_bytes = sweep.row_bytes;
  call.best = sweep.kernels[sweep.best()];
  if (sweep.num_nodes > 1 && !is_dispatch(sweep)) call.best.num_copy_sms = 0;  // measured for a dispatch beside it
  call.default_ns = sweep.results.front().time_p50_ns;
  call.best_ns = sweep.results[sweep.best()].time_p50_ns;
  return call;
}

std::string to_text(const Sweep& sweep) {
  Table table({sweep.name, "copy SMs", "chunk", "p50", "p99", "GB/s logical", "GB/s wire", ""});
  for (std::size_t i = 0; i < sweep.results.size(); ++i) {
    const OpResult& result = sweep.results[i];
    table.add_row({fmt::format("{} SMs", number_or_default(sweep.kernels[i].num_sms)),
                   number_or_default(sweep.kernels[i].num_copy_sms), number_or_default(sweep.kernels[i].chunk_tokens),
                   format_ns(result.time_p50_ns), format_ns(result.time_p99_ns),
                   fmt::format("{:.1f}", result.logical_gbps(sweep.num_ranks).value_or(0)),
                   fmt::format("{:.1f}", result.wire_gbps(sweep.num_ranks).value_or(0)),
                   i == sweep.best() ? "<- best" : ""});
  }
  return table.to_string() + "\n";
}

std::string gains_to_text(const std::vector<Sweep>& sweeps) {
  Table table({"", "built-in", "best", "gain", "settings"});
  for (const Sweep& sweep : sweeps) {
    const TunedCall call = tuned_call(sweep);
    table.add_row({sweep.name, format_ns(call.default_ns), format_ns(call.best_ns), fmt::format("{:.3f}", call.gain()),
                   call.is_better() ? describe(call.best) : "the built-in ones"});
  }
  return table.to_string();
}

Json sweeps_to_json(const std::vector<Sweep>& sweeps) {
  Json json = Json::array();
  for (const Sweep& sweep : sweeps) {
    Json settings = Json::array();
    for (std::size_t i = 0; i < sweep.results.size(); ++i) {
      settings.push_back({{"kernel_options", to_json(sweep.kernels[i])},
                          {"time_us_p50", static_cast<double>(sweep.results[i].time_p50_ns) / 1000.0},
                          {"time_us_p99", static_cast<double>(sweep.results[i].time_p99_ns) / 1000.0}});
    }
    json.push_back({{"op", sweep.name},
                    {"nodes", sweep.num_nodes},
                    {"ranks", sweep.num_ranks},
                    {"layout", name_of(sweep.layout)},
                    {"tokens", sweep.num_tokens},
                    {"settings", std::move(settings)},
                    {"best", sweep.results.empty() ? Json(nullptr) : to_json(sweep.kernels[sweep.best()])}});
  }
  return json;
}

}  // namespace ferry::tools
