#include "bench/tune.hpp"

#include <fmt/format.h>

#include <CLI/Validators.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/bench_plan.hpp"
#include "bench/bench_rank.hpp"
#include "bench/bench_result.hpp"
#include "bench/latency_options.hpp"
#include "bench/tune_settings.hpp"
#include "bench/tuning_file.hpp"
#include "ferry/bootstrap.hpp"
#include "report/host_facts.hpp"
#include "report/output.hpp"
#include "run/exit_code.hpp"
#include "run/launcher.hpp"
#include "run/option_types.hpp"
#include "run/run_options.hpp"

namespace ferry::tools {

namespace {

/// Values of --mode.
enum class TuneMode { kThroughput = 0, kLatency = 1 };

constexpr std::int64_t kThroughputTokens = 4096;
constexpr std::int64_t kLatencyTokens = 128;
constexpr std::int64_t kMostTunedTokens = std::int64_t{1} << 20;
constexpr std::int64_t kMostTunedExperts = std::int64_t{1} << 16;
constexpr int kMostTriedSms = 1024;
constexpr int kMostTunedIterations = 1'000'000;

struct TuneOptions {
  CommonOptions common;
  BenchPlan plan;
  TuneMode mode = TuneMode::kThroughput;
  TriedNumbers tried;
  std::vector<std::int64_t> hidden;
  std::string json_path;
  std::string out_path;
  bool tokens_given = false;
  bool layout_given = false;
  bool quantize_given = false;
};

/// Rows of a kind to tune for.
struct TunedRows {
  BenchOp op = BenchOp::kPair;
  BenchMemory memory = BenchMemory::kSymmetric;
  BenchDType dtype = BenchDType::kBfloat16;
  Quantization quantize = Quantization::kNone;
};

/// Everything that has settings of its own in such a run. Combine is always bf16.
std::vector<TunedRows> rows_to_tune(const TuneOptions& options, int num_nodes) {
  if (options.mode == TuneMode::kLatency) {
    std::vector<TunedRows> all = {{.op = BenchOp::kLatencyPair, .quantize = options.plan.quantize}};
    if (!options.quantize_given) all.push_back({.op = BenchOp::kLatencyDispatch, .quantize = Quantization::kFp8});
    if (num_nodes > 1) all.push_back({.op = BenchOp::kLatencyCombine, .memory = BenchMemory::kPlain});
    return all;
  }
  std::vector<TunedRows> all = {{.op = BenchOp::kPair}, {.op = BenchOp::kDispatch, .dtype = BenchDType::kFp8}};
  if (num_nodes > 1) {
    all.push_back({.op = BenchOp::kCombine, .memory = BenchMemory::kPlain});  // a dispatch is alike for all memory
  } else {
    all.push_back({.op = BenchOp::kPair, .memory = BenchMemory::kPlain});
    all.push_back({.op = BenchOp::kDispatch, .memory = BenchMemory::kPlain, .dtype = BenchDType::kFp8});
  }
  return all;
}

/// Runs all measurements and shows them. A launcher's ranks all do the same; one shows.
class Tuner {
 public:
  Tuner(const LaunchPlan& launch, BenchPlan plan, const TriedNumbers& tried)
      : launch_(launch), plan_(std::move(plan)), tried_(tried) {}

  /// Measures all settings of the operations for rows of `hidden` channels, then the best ones again.
  Status tune(std::int64_t hidden, const TunedRows& rows) {
    plan_.hidden = hidden;
    plan_.op = rows.op;
    plan_.memory = rows.memory;
    plan_.dtype = rows.dtype;
    plan_.quantize = rows.quantize;
    auto first = measure(first_settings(plan_, tried_));
    if (!first) return first.status();
    auto second = measure(second_settings(*first, tried_));
    if (!second) return second.status();
    best_.insert(best_.end(), second->begin(), second->end());
    return {};
  }
  const std::vector<Sweep>& all() const { return all_; }
  /// Results of the second measurements.
  const std::vector<Sweep>& best() const { return best_; }
  const TunedMachine& machine() const { return machine_; }
  TunedBatch batch() const { return {std::string(name_of(plan_.layout)), plan_.num_tokens, plan_.latency()}; }

 private:
  Result<std::vector<Sweep>> measure(std::vector<KernelOptions> kernels) {
    plan_.kernels = std::move(kernels);
    const RunOptions run_options{launch_, BenchArea::size_bytes(plan_), plan_.timeout_ns};
    auto outcome = run_ranks(run_options, [&](RankContext& context) { return run_bench_rank(plan_, context); });
    if (!outcome) return outcome.status();
    const BenchArea area(plan_, outcome->result(0));
    machine_ = {
        area.device().facts.name.data(), read_driver_module_version(), plan_.ranks_per_node(), plan_.num_nodes, {}};
    if (plan_.num_nodes > 1) {
      const WireNames& names = area.wire().names;
      machine_.network =
          fmt::format("{} {}, ring memory {}", names.transport.data(), names.route.data(), plan_.ring_memory);
    }
    std::vector<Sweep> sweeps = sweeps_of(plan_, *outcome);
    for (const Sweep& sweep : sweeps) {
      if (launch_.reports_here()) {
        if (Status shown = print(stdout, to_text(sweep)); !shown) return shown;
      }
      all_.push_back(sweep);
    }
    return sweeps;
  }

  const LaunchPlan& launch_;
  BenchPlan plan_;
  const TriedNumbers& tried_;
  std::vector<Sweep> all_;
  std::vector<Sweep> best_;
  TunedMachine machine_;
};

Status write_tuning_file(const std::string& path, Json file, const Tuner& tuner) {
  std::vector<TunedCall> calls;
  for (const Sweep& sweep : tuner.best()) calls.push_back(tuned_call(sweep));
  const TunedMachine& machine = tuner.machine();
  const TunedBatch batch = tuner.batch();
  auto whole = with_table(std::move(file), machine, batch, calls);
  if (!whole) return whole.status();
  Status status = write_json(path, *whole);
  if (!status) return status;
  const std::string nodes = machine.num_nodes == 1 ? "" : fmt::format("{} nodes of ", machine.num_nodes);
  return print(
      stdout,
      fmt::format("\n{} has the settings that are better{}, for {}{} ranks with {} each, layout {} and about {} "
                  "tokens; groups use them by GroupOptions::tuning_file or FERRY_TUNING={}, other calls, GPUs "
                  "and numbers of {}ranks ignore them\n",
                  path, batch.latency ? " in latency mode" : "", nodes, machine.num_ranks, machine.gpu, batch.layout,
                  batch.num_tokens, path, machine.num_nodes == 1 ? "" : "nodes and "));
}

Status check_options(const TuneOptions& options, const BenchPlan& plan) {
  const auto invalid = [](std::string text) { return Status(ErrorCode::kInvalidArgument, std::move(text)); };
  if (options.mode == TuneMode::kLatency && options.layout_given && options.plan.layout != Layout::kSlab) {
    return invalid("--layout with --mode latency: latency mode receives in a slab; leave the option out");
  }
  const bool of_latency =
      options.quantize_given || plan.split || plan.masks_lost_ranks || plan.order != CombineOrder::kExact;
  if (options.mode != TuneMode::kLatency && of_latency) {
    return invalid("--quantize, --order, --split and --mask-lost-ranks need --mode latency: no other calls take them");
  }
  if (plan.num_topk > plan.num_experts) {
    return invalid(
        fmt::format("--topk {} of --experts {}: a token picks distinct experts", plan.num_topk, plan.num_experts));
  }
  for (const std::int64_t hidden : options.hidden) {
    if (hidden % kRowGranuleBytes == 0) continue;
    return invalid(fmt::format("--hidden {}: rows of one byte for each channel are multiples of {} bytes", hidden,
                               kRowGranuleBytes));
  }
  return {};
}

BenchPlan plan_of(const TuneOptions& options, const LaunchPlan& launch, const std::string& backend) {
  BenchPlan plan = options.plan;
  const bool latency = options.mode == TuneMode::kLatency;
  if (!options.tokens_given) plan.num_tokens = latency ? kLatencyTokens : kThroughputTokens;
  if (latency) plan.layout = Layout::kSlab;
  plan.num_ranks = launch.num_ranks;
  plan.num_nodes = launch.num_nodes;
  plan.shares_clock = launch.num_hosts == 1;
  plan.transport = options.common.transport;
  plan.net_devices = options.common.net_devices;
  plan.ring_memory = options.common.ring_memory;
  plan.backend = backend;
  plan.timeout_ns = options.common.timeout_ns();
  plan.arena_bytes = options.common.arena_bytes;
  plan.seed = options.common.seed;
  plan.measures_limit = false;
  plan.compares = false;
  plan.tuning_file = "builtin";  // the settings under test are compared with these, not with a file named by
                                 // FERRY_TUNING
  return plan;
}

std::string introduction(const TuneOptions& options, const BenchPlan& plan, const LaunchPlan& launch) {
  const bool latency = options.mode == TuneMode::kLatency;
  return fmt::format(
      "{}\n{} tokens of each rank, top {} of {} experts, layout {}{}; {} iterations after {} to warm up\n\n",
      launch.description, plan.num_tokens, plan.num_topk, plan.num_experts, name_of(plan.layout),
      latency ? fmt::format(", latency mode, combine order {}, {}", name_of(plan.order),
                            plan.split ? "split calls" : "whole calls")
              : "",
      plan.num_iterations, plan.num_warmup);
}

/// The ranks of a launcher meet once, since each measurement has a group of its own.
Status join(LaunchPlan* launch, std::int64_t timeout_ns) {
  if (!launch->from_environment || launch->joined != nullptr) return {};
  launch->bootstrap.timeout_ns = timeout_ns;
  auto joined = create_tcp_bootstrap(launch->bootstrap);
  if (!joined) return joined.status();
  launch->joined = std::move(*joined);
  return {};
}

int run_tune(const TuneOptions& options) {
  const auto fail = [](const Status& status, int exit_code) { return report_failure("tune", status, exit_code); };
  auto launch = plan_launch(options.common.launch_request());
  if (!launch) return fail(launch.status(), exit_code_of_launch(launch.status()));
  auto backend = resolve_backend(options.common, launch->num_nodes);
  if (!backend) return fail(backend.status(), kExitUsage);
  if (*backend != "cuda") {
    if (!launch->reports_here()) return kExitUsage;
    return fail(Status(ErrorCode::kUnsupported,
                       fmt::format("backend {} has no kernels to tune; the command needs GPUs and the backend cuda{}; "
                                   "`ferry doctor` shows whether they work here",
                                   *backend, launch->num_nodes > 1 ? ", over several nodes by --backend cuda" : "")),
                kExitUsage);
  }
  if (Status status = check_transport(options.common, launch->num_nodes); !status) return fail(status, kExitUsage);
  const BenchPlan plan = plan_of(options, *launch, *backend);
  if (Status status = check_options(options, plan); !status) return fail(status, kExitUsage);
  const bool reports = launch->reports_here();
  Json file;
  if (reports) {
    if (Status status = check_writable(options.json_path, "the report"); !status) return fail(status, kExitUsage);
    if (Status status = check_writable(options.out_path, "the kernel settings"); !status) {
      return fail(status, kExitUsage);
    }
    auto read = options.out_path.empty() ? Result<Json>(Json()) : read_tuning_file(options.out_path);
    if (!read) return fail(read.status(), kExitUsage);
    file = std::move(*read);
  }

  Status status = reports ? print(stdout, introduction(options, plan, *launch)) : Status();
  if (status) status = join(&*launch, plan.timeout_ns);
  Tuner tuner(*launch, plan, options.tried);
  for (const std::int64_t hidden : options.hidden) {
    for (const TunedRows& rows : rows_to_tune(options, plan.num_nodes)) {
      if (status) status = tuner.tune(hidden, rows);
    }
  }
  if (!reports) return status ? kExitOk : fail(status, kExitFailed);
  if (status) status = print(stdout, gains_to_text(tuner.best()));
  if (status && !options.json_path.empty()) status = write_json(options.json_path, sweeps_to_json(tuner.all()));
  if (status && !options.out_path.empty()) status = write_tuning_file(options.out_path, std::move(file), tuner);
  return status ? kExitOk : fail(status, kExitFailed);
}

}  // namespace

void add_tune_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<TuneOptions>();
  BenchPlan& plan = options->plan;
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
  add_choice<TuneMode>(*command, "--mode", &options->mode,
                       {{"throughput", TuneMode::kThroughput}, {"latency", TuneMode::kLatency}},
                       "Calls to tune: dispatch and combine (throughput, the default), or those of latency mode");
  command
      ->add_option(
          "--tokens", plan.num_tokens,
          fmt::format("Tokens of each rank (default {}, in latency mode {})", kThroughputTokens, kLatencyTokens))
      ->check(whole_number(std::int64_t{1}, kMostTunedTokens));
  add_choice<Layout>(*command, "--layout", &plan.layout,
                     {{"tokens", Layout::kTokens}, {"experts", Layout::kExperts}, {"slab", Layout::kSlab}},
                     "Layout of received rows (default tokens; latency mode has slabs)");
  add_whole_numbers(*command, "--hidden", &options->hidden, {1, std::int64_t{1} << 20},
                    "Channels of a token; several sizes, e.g. 2048,7168")
      ->default_str(std::to_string(kDefaultHidden));
  command->add_option("--topk", plan.num_topk, "Experts of a token")
      ->check(whole_number(1, kMaxTopk))
      ->capture_default_str();
  command->add_option("--experts", plan.num_experts, "Experts of all ranks")
      ->check(whole_number(std::int64_t{1}, kMostTunedExperts))
      ->capture_default_str();
  add_latency_options(*command, &plan);
  add_whole_numbers(*command, "--num-sms", &options->tried.num_sms, {1, kMostTriedSms},
                    "Multiprocessors to try, e.g. 8,16,24 (default: a dozen numbers)");
  add_whole_numbers(*command, "--chunk-tokens", &options->tried.chunk_tokens, {1, static_cast<int>(kMostTunedTokens)},
                    "Tokens of a chunk to try with the best of them (default: several)");
  command->add_option("--iterations", plan.num_iterations, "Timed iterations of each setting")
      ->check(whole_number(1, kMostTunedIterations))
      ->capture_default_str();
  command->add_option("--warmup", plan.num_warmup, "Iterations before the first timed one")
      ->check(whole_number(0, kMostTunedIterations))
      ->capture_default_str();
  command->add_option("--json", options->json_path, "Write all settings and times to this file as JSON")->check(path());
  command
      ->add_option("--out", options->out_path,
                   "Write the best settings to this file, which groups read (GroupOptions::tuning_file, FERRY_TUNING); "
                   "what it has for other GPUs, numbers of nodes and ranks, modes, layouts and numbers of tokens stays")
      ->check(path());
  command->callback([options, command, exit_code] {
    options->tokens_given = command->count("--tokens") > 0;
    options->layout_given = command->count("--layout") > 0;
    options->quantize_given = command->count("--quantize") > 0;
    *exit_code = run_tune(*options);
  });
}

}  // namespace ferry::tools
