#include "bench/tune.hpp"

#include <fmt/format.h>

#include <CLI/Validators.hpp>
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/bench_plan.hpp"
#include "bench/bench_rank.hpp"
#include "bench/bench_result.hpp"
#include "bench/kernel_settings.hpp"
#include "report/output.hpp"
#include "report/table.hpp"
#include "run/exit_code.hpp"
#include "run/launcher.hpp"
#include "run/option_types.hpp"
#include "run/run_options.hpp"

namespace ferry::tools {

namespace {

constexpr std::array kNumSms = {2, 4, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 132};
/// Plain pointers need multiprocessors on both sides of the staging: these shares of them only copy.
constexpr std::array kPlainNumSms = {8, 16, 24, 32, 48, 64, 96};
constexpr int kQuartersOfCopySms = 4;

struct TuneOptions {
  CommonOptions common;
  BenchPlan plan;
  std::string json_path;
};

std::vector<KernelOptions> candidates(const KernelOptions& base, BenchMemory memory) {
  std::vector<KernelOptions> all = {base};
  const auto add = [&](int num_sms, int num_copy_sms) {
    KernelOptions kernel = base;
    kernel.num_sms = num_sms;
    kernel.num_copy_sms = num_copy_sms;
    all.push_back(kernel);
  };
  if (memory == BenchMemory::kSymmetric) {
    for (int num_sms : kNumSms) add(num_sms, 0);
    return all;
  }
  for (int num_sms : kPlainNumSms) {
    for (int quarters = 1; quarters < kQuartersOfCopySms; ++quarters) {
      add(num_sms, num_sms * quarters / kQuartersOfCopySms);
    }
  }
  return all;
}

/// The times of one operation by settings; those that were not measured are left out.
struct Sweep {
  std::string name;
  std::int64_t num_tokens = 0;
  std::vector<KernelOptions> kernels;
  std::vector<OpResult> results;
  int num_ranks = 1;

  std::size_t best() const {
    std::size_t best_idx = 0;
    for (std::size_t i = 1; i < results.size(); ++i) {
      if (results[i].time_p50_ns < results[best_idx].time_p50_ns) best_idx = i;
    }
    return best_idx;
  }
};

std::vector<Sweep> sweeps_of(const BenchPlan& plan, const RunOutcome& outcome) {
  std::vector<Sweep> sweeps;
  for (std::size_t kernel_idx = 0; kernel_idx < plan.kernels.size(); ++kernel_idx) {
    std::size_t op_idx = 0;
    for (const OpResult& result : summarise(plan, outcome, kernel_idx)) {
      if (result.op == BenchOp::kPair || result.time_p50_ns == 0) continue;
      if (op_idx == sweeps.size()) {
        const BenchDType dtype = result.op == BenchOp::kCombine ? BenchDType::kBfloat16 : plan.dtype;
        sweeps.push_back({fmt::format("{} {}, {} memory", name_of(result.op), name_of(dtype), name_of(plan.memory)),
                          plan.num_tokens,
                          {},
                          {},
                          plan.num_ranks});
      }
      sweeps[op_idx].kernels.push_back(plan.kernels[kernel_idx]);
      sweeps[op_idx].results.push_back(result);
      ++op_idx;
    }
  }
  return sweeps;
}

std::string number_or_default(int value) { return value == 0 ? "default" : fmt::to_string(value); }

std::string to_text(const Sweep& sweep) {
  Table table({sweep.name, "copy SMs", "p50", "p99", "GB/s logical", "GB/s wire", ""});
  for (std::size_t i = 0; i < sweep.results.size(); ++i) {
    const OpResult& result = sweep.results[i];
    table.add_row(
        {fmt::format("{} SMs", number_or_default(sweep.kernels[i].num_sms)),
         number_or_default(sweep.kernels[i].num_copy_sms), format_ns(result.time_p50_ns), format_ns(result.time_p99_ns),
         fmt::format("{:.1f}", result.logical_gbps(sweep.num_ranks).value_or(0)),
         fmt::format("{:.1f}", result.wire_gbps(sweep.num_ranks).value_or(0)), i == sweep.best() ? "<- best" : ""});
  }
  return table.to_string() + "\n";
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
                    {"ranks", sweep.num_ranks},
                    {"tokens", sweep.num_tokens},
                    {"settings", std::move(settings)},
                    {"best", sweep.results.empty() ? Json(nullptr) : to_json(sweep.kernels[sweep.best()])}});
  }
  return json;
}

int run_tune(const TuneOptions& options) {
  const auto fail = [](const Status& status, int exit_code) { return report_failure("tune", status, exit_code); };
  auto launch = plan_launch({LaunchMode::kFork, options.common.num_ranks, options.common.num_nodes, kDefaultNumRanks});
  if (!launch) return fail(launch.status(), kExitUsage);
  auto backend = resolve_backend(options.common, launch->num_nodes);
  if (!backend) return fail(backend.status(), kExitUsage);
  if (*backend != "cuda") {
    Status status =
        print(stdout, fmt::format("backend {}: there is nothing to tune; the settings of kernels are for the "
                                  "backend cuda\n",
                                  *backend));
    return status ? kExitOk : fail(status, kExitFailed);
  }
  if (Status status = check_writable(options.json_path, "the report"); !status) return fail(status, kExitUsage);
  BenchPlan plan = options.plan;
  plan.num_ranks = launch->num_ranks;
  plan.backend = *backend;
  plan.timeout_ns = options.common.timeout_ns();
  plan.arena_bytes = options.common.arena_bytes;
  plan.seed = options.common.seed;
  plan.measures_limit = false;
  const KernelOptions base = plan.kernels.front();

  const auto show = [](std::string_view text) { return print(stdout, text); };
  Status shown =
      show(fmt::format("{} ranks, {} tokens each, hidden {}, top {} of {} experts; {} iterations after {} to "
                       "warm up\n\n",
                       plan.num_ranks, plan.num_tokens, plan.hidden, plan.num_topk, plan.num_experts,
                       plan.num_iterations, plan.num_warmup));
  if (!shown) return fail(shown, kExitFailed);
  std::vector<Sweep> all;
  for (const BenchMemory memory : {BenchMemory::kSymmetric, BenchMemory::kPlain}) {
    for (const BenchDType dtype : {BenchDType::kBfloat16, BenchDType::kFp8}) {
      plan.memory = memory;
      plan.dtype = dtype;
      plan.op = dtype == BenchDType::kBfloat16 ? BenchOp::kPair : BenchOp::kDispatch;  // combine is bf16 in any case
      plan.kernels = candidates(base, memory);
      const RunOptions run_options{*launch, BenchArea::size_bytes(plan), plan.timeout_ns};
      auto outcome = run_ranks(run_options, [&](RankContext& context) { return run_bench_rank(plan, context); });
      if (!outcome) return fail(outcome.status(), kExitFailed);
      for (Sweep& sweep : sweeps_of(plan, *outcome)) {
        if (shown = show(to_text(sweep)); !shown) return fail(shown, kExitFailed);
        all.push_back(std::move(sweep));
      }
    }
  }
  std::string best;
  for (const Sweep& sweep : all) {
    best += fmt::format("best for {}: {}\n", sweep.name, describe(sweep.kernels[sweep.best()]));
  }
  if (shown = show(best); !shown) return fail(shown, kExitFailed);
  if (options.json_path.empty()) return kExitOk;
  Status status = write_json(options.json_path, sweeps_to_json(all));
  return status ? kExitOk : fail(status, kExitFailed);
}

}  // namespace

void add_tune_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<TuneOptions>();
  BenchPlan& plan = options->plan;
  plan.num_tokens = 4096;
  plan.hidden = 7168;  // the MoE layer of DeepSeek-V3
  plan.num_topk = 8;
  plan.num_experts = 256;
  plan.routing_name = "random";
  plan.num_iterations = 20;
  plan.num_warmup = 3;
  CLI::App* command =
      app.add_subcommand("tune", "Find the kernel settings with which dispatch and combine are fastest on these GPUs");
  add_common_options(*command, &options->common);
  command->add_option("--tokens", plan.num_tokens, "Tokens of each rank")
      ->check(whole_number(std::int64_t{1}, std::int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--json", options->json_path, "Write all settings and times to this file as JSON")->check(path());
  command->callback([options, exit_code] { *exit_code = run_tune(*options); });
}

}  // namespace ferry::tools
