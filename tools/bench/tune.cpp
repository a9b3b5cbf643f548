#include "bench/tune.hpp"

#include <fmt/format.h>

#include <CLI/Validators.hpp>
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/bench_plan.hpp"
#include "bench/bench_rank.hpp"
#include "bench/bench_result.hpp"
#include "bench/kernel_settings.hpp"
#include "bench/tuning_file.hpp"
#include "report/host_facts.hpp"
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
/// Chunks matter if rows are staged. Otherwise some of a dispatch's multiprocessors only copy rows that stay on the
/// rank.
constexpr std::array kChunkTokens = {64, 128, 256, 512, 1024, 2048};
constexpr std::array kOwnRowSms = {1, 2, 3, 4, 6, 8};

struct TuneOptions {
  CommonOptions common;
  BenchPlan plan;
  std::vector<std::int64_t> hidden;
  std::string json_path;
  std::string out_path;
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

/// Times of one operation by settings; settings that were not measured are left out.
struct Sweep {
  std::string name;
  BenchOp op = BenchOp::kDispatch;
  bool staged = false;
  std::int64_t row_bytes = 0;
  Layout layout = Layout::kTokens;
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
        Sweep& sweep = sweeps.emplace_back();
        sweep.op = result.op;
        sweep.staged = plan.memory == BenchMemory::kPlain;
        sweep.row_bytes = result.op == BenchOp::kCombine ? plan.combine_row_bytes() : plan.payload_bytes();
        sweep.name = fmt::format("{} {}, {} bytes, {} memory", name_of(result.op), name_of(dtype), sweep.row_bytes,
                                 name_of(plan.memory));
        sweep.layout = plan.layout;
        sweep.num_tokens = plan.num_tokens;
        sweep.num_ranks = plan.num_ranks;
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
                    {"layout", name_of(sweep.layout)},
                    {"tokens", sweep.num_tokens},
                    {"settings", std::move(settings)},
                    {"best", sweep.results.empty() ? Json(nullptr) : to_json(sweep.kernels[sweep.best()])}});
  }
  return json;
}

/// Settings for the second measurement: the default, the best of the first, and variants of the best.
std::vector<KernelOptions> finalists(const std::vector<Sweep>& sweeps, const KernelOptions& base) {
  std::vector<KernelOptions> all = {base};
  for (const Sweep& sweep : sweeps) {
    const KernelOptions best = sweep.kernels[sweep.best()];
    if (sweep.best() != 0) all.push_back(best);
    for (int chunk_tokens : kChunkTokens) {
      if (!sweep.staged) continue;
      all.push_back(best);
      all.back().chunk_tokens = chunk_tokens;
    }
    for (int own_row_sms : kOwnRowSms) {
      const bool too_many = best.num_sms > 0 && own_row_sms >= best.num_sms;
      if (sweep.staged || sweep.op != BenchOp::kDispatch || too_many) continue;
      all.push_back(best);
      all.back().num_copy_sms = own_row_sms;
    }
  }
  return all;
}

TunedCall tuned_call(const Sweep& sweep) {
  TunedCall call;
  call.operation = name_of(sweep.op);
  call.staged = sweep.staged;
  call.row_bytes = sweep.row_bytes;
  call.best = sweep.kernels[sweep.best()];
  call.default_ns = sweep.results.front().time_p50_ns;
  call.best_ns = sweep.results[sweep.best()].time_p50_ns;
  return call;
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

/// Runs all measurements and shows them.
class Tuner {
 public:
  Tuner(const LaunchPlan& launch, BenchPlan plan) : launch_(launch), plan_(std::move(plan)) {}

  /// Measures all settings of the operations for rows of `hidden` channels, then the best ones again.
  Status tune(std::int64_t hidden, BenchMemory memory, BenchDType dtype) {
    const KernelOptions base;
    plan_.hidden = hidden;
    plan_.memory = memory;
    plan_.dtype = dtype;
    plan_.op = dtype == BenchDType::kBfloat16 ? BenchOp::kPair : BenchOp::kDispatch;  // combine is always bf16
    auto first = measure(candidates(base, memory));
    if (!first) return first.status();
    auto second = measure(finalists(*first, base));
    if (!second) return second.status();
    for (const Sweep& sweep : *second) best_.push_back(sweep);
    return {};
  }
  const std::vector<Sweep>& all() const { return all_; }
  /// Results of the second measurements.
  const std::vector<Sweep>& best() const { return best_; }
  const TunedMachine& machine() const { return machine_; }
  TunedBatch batch() const { return {std::string(name_of(plan_.layout)), plan_.num_tokens}; }

 private:
  Result<std::vector<Sweep>> measure(std::vector<KernelOptions> kernels) {
    plan_.kernels = std::move(kernels);
    const RunOptions run_options{launch_, BenchArea::size_bytes(plan_), plan_.timeout_ns};
    auto outcome = run_ranks(run_options, [&](RankContext& context) { return run_bench_rank(plan_, context); });
    if (!outcome) return outcome.status();
    machine_ = {BenchArea(plan_, outcome->result(0)).device().facts.name.data(), read_driver_module_version(),
                plan_.num_ranks};
    std::vector<Sweep> sweeps = sweeps_of(plan_, *outcome);
    for (const Sweep& sweep : sweeps) {
      if (Status shown = print(stdout, to_text(sweep)); !shown) return shown;
      all_.push_back(sweep);
    }
    return sweeps;
  }

  const LaunchPlan& launch_;
  BenchPlan plan_;
  std::vector<Sweep> all_;
  std::vector<Sweep> best_;
  TunedMachine machine_;
};

Status write_tuning_file(const std::string& path, Json file, const Tuner& tuner) {
  std::vector<TunedCall> calls;
  for (const Sweep& sweep : tuner.best()) calls.push_back(tuned_call(sweep));
  auto whole = with_table(std::move(file), tuner.machine(), tuner.batch(), calls);
  if (!whole) return whole.status();
  Status status = write_json(path, *whole);
  if (!status) return status;
  return print(stdout,
               fmt::format("\n{} has the settings that are better, for {} ranks with {} each, layout {} and about {} "
                           "tokens; groups use them by GroupOptions::tuning_file or FERRY_TUNING={}, other calls, GPUs "
                           "and numbers of ranks ignore them\n",
                           path, tuner.machine().num_ranks, tuner.machine().gpu, tuner.batch().layout,
                           tuner.batch().num_tokens, path));
}

int run_tune(const TuneOptions& options) {
  const auto fail = [](const Status& status, int exit_code) { return report_failure("tune", status, exit_code); };
  LaunchRequest request = options.common.launch_request();
  request.mode = LaunchMode::kFork;
  auto launch = plan_launch(request);
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
  Json file;
  if (!options.out_path.empty()) {
    if (Status status = check_writable(options.out_path, "the kernel settings"); !status) {
      return fail(status, kExitUsage);
    }
    auto read = read_tuning_file(options.out_path);
    if (!read) return fail(read.status(), kExitUsage);
    file = std::move(*read);
  }
  BenchPlan plan = options.plan;
  plan.num_ranks = launch->num_ranks;
  plan.backend = *backend;
  plan.timeout_ns = options.common.timeout_ns();
  plan.arena_bytes = options.common.arena_bytes;
  plan.seed = options.common.seed;
  plan.measures_limit = false;
  plan.tuning_file = "builtin";  // the settings under test are compared with these, not with a file named by
                                 // FERRY_TUNING

  Status status =
      print(stdout, fmt::format("{} ranks, {} tokens each, top {} of {} experts, layout {}; {} iterations after {} to "
                                "warm up\n\n",
                                plan.num_ranks, plan.num_tokens, plan.num_topk, plan.num_experts, name_of(plan.layout),
                                plan.num_iterations, plan.num_warmup));
  Tuner tuner(*launch, plan);
  for (const std::int64_t hidden : options.hidden) {
    for (const BenchMemory memory : {BenchMemory::kSymmetric, BenchMemory::kPlain}) {
      for (const BenchDType dtype : {BenchDType::kBfloat16, BenchDType::kFp8}) {
        if (status) status = tuner.tune(hidden, memory, dtype);
      }
    }
  }
  if (status) status = print(stdout, gains_to_text(tuner.best()));
  if (status && !options.json_path.empty()) status = write_json(options.json_path, sweeps_to_json(tuner.all()));
  if (status && !options.out_path.empty()) status = write_tuning_file(options.out_path, std::move(file), tuner);
  return status ? kExitOk : fail(status, kExitFailed);
}

}  // namespace

void add_tune_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<TuneOptions>();
  BenchPlan& plan = options->plan;
  plan.num_tokens = 4096;
  constexpr std::int64_t kDefaultHidden = 7168;  // the MoE layer of DeepSeek-V3
  options->hidden = {kDefaultHidden};
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
  add_choice<Layout>(*command, "--layout", &plan.layout,
                     {{"tokens", Layout::kTokens}, {"experts", Layout::kExperts}, {"slab", Layout::kSlab}},
                     "Layout of received rows (default tokens)");
  add_whole_numbers(*command, "--hidden", &options->hidden, {1, std::int64_t{1} << 20},
                    "Channels of a token; several sizes, e.g. 2048,7168")
      ->default_str(std::to_string(kDefaultHidden));
  command->add_option("--json", options->json_path, "Write all settings and times to this file as JSON")->check(path());
  command
      ->add_option("--out", options->out_path,
                   "Write the best settings to this file, which groups read (GroupOptions::tuning_file, FERRY_TUNING); "
                   "what it has for other GPUs, numbers of ranks, layouts and numbers of tokens stays")
      ->check(path());
  command->callback([options, exit_code] { *exit_code = run_tune(*options); });
}

}  // namespace ferry::tools
