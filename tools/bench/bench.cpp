#include "bench/bench.hpp"

#include <fmt/format.h>

#include <CLI/Validators.hpp>
#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "bench/bench_plan.hpp"
#include "bench/bench_rank.hpp"
#include "bench/bench_result.hpp"
#include "bench/gpu_report.hpp"
#include "bench/kernel_settings.hpp"
#include "bench/latency_options.hpp"
#include "bench/one_sided.hpp"
#include "bench/report.hpp"
#include "ferry/exchange.hpp"
#include "ferry/version.hpp"
#include "report/host_facts.hpp"
#include "report/output.hpp"
#include "report/table.hpp"
#include "run/exit_code.hpp"
#include "run/launcher.hpp"
#include "run/option_types.hpp"
#include "run/run_options.hpp"

namespace ferry::tools {

namespace {

constexpr std::int64_t kMaxTokens = 1 << 22;
constexpr std::int64_t kMaxHidden = 1 << 20;
constexpr std::int64_t kMaxExperts = 1 << 16;
constexpr int kMaxIterations = 1'000'000;
constexpr std::int64_t kNsPerUs = 1000;
constexpr std::int64_t kMaxLateUs = 1'000'000;
constexpr double kMinNetworkRate = 0.001;
constexpr double kMaxNetworkRate = 1e6;

struct BenchOptions {
  CommonOptions common;
  BenchPlan plan;
  std::string routing = "random";
  std::vector<std::int64_t> sweep_tokens;
  std::string json_path;
  bool topk_given = false;
  bool experts_given = false;
  bool iterations_given = false;
  bool warmup_given = false;
  std::int64_t late_us = 0;
};

/// A GPU's iterations are a hundred times shorter, so more of them cost little.
constexpr int kGpuIterations = 30;
constexpr int kGpuWarmup = 5;

/// Calls of the one-sided layer are a thousand times shorter.
constexpr int kOneSidedCalls = 500;
constexpr int kOneSidedWarmup = 50;

Status set_routing(const BenchOptions& options, BenchPlan* plan) {
  static const std::map<std::string, RoutingKind> kinds = {
      {"random", RoutingKind::kRandom}, {"zipf", RoutingKind::kZipf}, {"one-hot", RoutingKind::kOneHot}};
  constexpr std::string_view kTracePrefix = "trace:";
  plan->routing_name = options.routing;
  if (const auto kind = kinds.find(options.routing); kind != kinds.end()) {
    plan->routing = kind->second;
    return {};
  }
  if (!std::string_view(options.routing).starts_with(kTracePrefix)) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("--routing {}: expected random, zipf, one-hot or trace:FILE", options.routing)};
  }
  auto trace = read_trace(options.routing.substr(kTracePrefix.size()));
  if (!trace) return trace.status();
  const RoutingTable& table = trace->table;
  if ((options.topk_given && plan->num_topk != table.num_topk) ||
      (options.experts_given && plan->num_experts != table.num_experts)) {
    return {ErrorCode::kInvalidArgument, fmt::format("the trace has --topk {} and --experts {}; leave both options out",
                                                     table.num_topk, table.num_experts)};
  }
  plan->num_topk = table.num_topk;
  plan->num_experts = table.num_experts;
  plan->trace = std::move(*trace);
  return {};
}

Status check_shape(const BenchPlan& plan) {
  if (plan.num_topk > plan.num_experts) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("--topk {} of --experts {}: a token picks distinct experts", plan.num_topk, plan.num_experts)};
  }
  if (plan.num_replicas >= 0 && plan.op != BenchOp::kRoute) {
    return {ErrorCode::kInvalidArgument,
            "--replicas needs --op route: the other operations support one home per expert"};
  }
  if (plan.late_ns > 0 && plan.num_ranks < 2) {
    return {ErrorCode::kInvalidArgument, "--late-us needs ranks that wait for the late one; give --ranks 2 or more"};
  }
  if (plan.counts_load && (plan.cached || plan.latency() || plan.op == BenchOp::kCombine) &&
      plan.op != BenchOp::kRoute) {
    return {ErrorCode::kInvalidArgument,
            "--count-load needs calls that route: --op route, or --op dispatch or pair with --no-cached"};
  }
  if (plan.returns_weights && (plan.latency() || !plan.measures_combine() || plan.layout != Layout::kTokens)) {
    return {ErrorCode::kInvalidArgument, "--return-weights needs --op combine or pair, and --layout tokens"};
  }
  if (plan.wire_format != WireFormat::kAsGiven) {
    const bool travels = plan.latency() ? plan.order == CombineOrder::kRankSums : plan.num_nodes == 1;
    if (!plan.measures_combine() || !travels) {
      return {ErrorCode::kInvalidArgument,
              "--combine-wire fp8 needs --op combine or pair, and one node; or --op latency-combine or latency-pair, "
              "and --order rank_sums"};
    }
    if (plan.hidden % kQuantBlockSize != 0) {
      return {ErrorCode::kInvalidArgument,
              fmt::format("--combine-wire fp8 needs a --hidden that is a multiple of {}, not {}", kQuantBlockSize,
                          plan.hidden)};
    }
  }
  if (plan.payload_bytes() % kRowGranuleBytes != 0 || plan.combine_row_bytes() % kRowGranuleBytes != 0) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("--hidden {} makes rows of {} bytes; rows are multiples of {} bytes", plan.hidden,
                        plan.payload_bytes(), kRowGranuleBytes)};
  }
  return {};
}

/// Refuses runs that would end in swapping or in the system killing a rank.
Status check_memory(const BenchPlan& plan) {
  if (plan.on_gpu()) return {};  // GPU memory: its allocations report a lack of it
  const HostFacts host = read_host_facts();
  std::int64_t available = host.available_memory_bytes;
  if (host.memory_limit_bytes > 0) available = std::min(available, host.memory_limit_bytes);
  if (available == 0) return {};
  // Drawing the ids of tokens that fit no machine takes minutes.
  std::int64_t needed = memory_bytes_with(plan, 0);
  if (needed <= available) needed = estimate_memory_bytes(plan);
  if (needed <= available) return {};
  return {ErrorCode::kSystem, fmt::format("{} ranks with {} tokens need about {}, this machine has {} left; use fewer "
                                          "ranks or tokens, or a smaller hidden size",
                                          plan.num_ranks, plan.num_tokens, format_bytes(static_cast<double>(needed)),
                                          format_bytes(static_cast<double>(available)))};
}

std::string introduction(const BenchPlan& plan, const std::string& launch) {
  return fmt::format(
      "Ferry {} ({}), backend {}: {}\n{}\n"
      "{} hidden {}, top {} of {} experts{}{}, {}, routing {}{}, layout {}, {} memory, {} iterations after {} to warm "
      "up{}\n"
      "{}{}{}\n",
      version(), commit(), plan.backend, launch, describe(read_host_facts()), name_of(plan.op), plan.hidden,
      plan.num_topk, plan.num_experts, plan.num_replicas < 0 ? "" : fmt::format(" and {} replicas", plan.num_replicas),
      plan.counts_load ? " (load counted)" : "", name_of(plan.dtype), plan.routing_name,
      plan.cached && !plan.latency() ? "" : " (rebuilt for each dispatch)", name_of(plan.layout), name_of(plan.memory),
      plan.num_iterations, plan.num_warmup, plan.verify ? ", rows verified" : "",
      plan.latency() ? fmt::format("latency mode: quantize {}, combine order {}{}, {}\n", name_of(plan.quantize),
                                   name_of(plan.order),
                                   plan.wire_format == WireFormat::kFp8 ? ", sums of ranks travel as fp8" : "",
                                   fmt::format("{}{}{}", plan.split ? "split calls" : "whole calls",
                                               plan.late_weights ? ", weights given to combine" : "",
                                               plan.masks_lost_ranks ? ", lost ranks are masked" : ""))
                     : "",
      plan.on_gpu() ? fmt::format("kernels: {}, tuning file {}\n", describe(plan.kernels.front()),
                                  plan.tuning_file.empty() ? "none" : plan.tuning_file)
                    : "",
      formulas(plan));
}

int run_bench(const BenchOptions& options) {
  const auto fail = [](const Status& status, int exit_code) { return report_failure("bench", status, exit_code); };
  LaunchRequest request = options.common.launch_request();
  if (is_one_sided(options.plan.op)) request.default_num_ranks = kOneSidedRanks;
  auto launch = plan_launch(request);
  if (!launch) return fail(launch.status(), exit_code_of_launch(launch.status()));
  auto backend = resolve_backend(options.common, launch->num_nodes);
  if (!backend) return fail(backend.status(), kExitUsage);
  if (Status status = check_transport(options.common, launch->num_nodes); !status) return fail(status, kExitUsage);
  if (Status status = check_output(options.json_path, *launch); !status) return fail(status, kExitUsage);
  if (is_one_sided(options.plan.op)) {
    // Kernels make the calls only with an explicit --backend cuda: CPU ranks work on every machine.
    const bool on_gpu = options.common.backend == "cuda";
    return run_one_sided_bench({.op = options.plan.op,
                                .common = options.common,
                                .launch = *launch,
                                .backend = on_gpu ? "cuda" : "cpu",
                                .num_iterations = options.iterations_given ? options.plan.num_iterations
                                                  : on_gpu                 ? kGpuIterations
                                                                           : kOneSidedCalls,
                                .num_warmup = options.warmup_given ? options.plan.num_warmup
                                              : on_gpu             ? kGpuWarmup
                                                                   : kOneSidedWarmup,
                                .json_path = options.json_path});
  }
  BenchPlan plan = options.plan;
  plan.num_ranks = launch->num_ranks;
  plan.num_nodes = launch->num_nodes;
  plan.shares_clock = launch->num_hosts == 1;
  plan.transport = options.common.transport;
  plan.net_devices = options.common.net_devices;
  plan.ring_memory = options.common.ring_memory;
  plan.verify = options.common.verify;
  plan.backend = *backend;
  // Read the variable as a group would, so that the report names the file.
  if (const char* const file = std::getenv("FERRY_TUNING"); plan.tuning_file.empty() && file != nullptr) {
    plan.tuning_file = file;
  }
  plan.timeout_ns = options.common.timeout_ns();
  plan.arena_bytes = options.common.arena_bytes;
  plan.seed = options.common.seed;
  if (plan.on_gpu() && !options.iterations_given) plan.num_iterations = kGpuIterations;
  if (plan.on_gpu() && !options.warmup_given) plan.num_warmup = kGpuWarmup;
  plan.late_ns = options.late_us * kNsPerUs;
  plan.measures_limit = plan.late_ns == 0;  // copies do not wait for a late rank
  if (Status status = set_routing(options, &plan); !status) return fail(status, kExitUsage);
  if (Status status = check_shape(plan); !status) return fail(status, kExitUsage);
  const bool sweeps = !options.sweep_tokens.empty();
  if (sweeps && launch->from_environment) {
    return fail({ErrorCode::kUnsupported, "--sweep-tokens needs ranks that this command forks (--launch fork)"},
                kExitUsage);
  }

  if (launch->reports_here()) {
    Status status = print(text_stream(options.json_path), introduction(plan, launch->description));
    // A launcher's other ranks do not see this failure: with them the run continues, and its end reports it.
    if (!status && !launch->from_environment) return fail(status, kExitFailed);
  }
  std::vector<BenchReport> reports;
  for (std::int64_t num_tokens : sweeps ? options.sweep_tokens : std::vector<std::int64_t>{plan.num_tokens}) {
    plan.num_tokens = num_tokens;
    if (Status status = check_memory(plan); !status) return fail(status, kExitFailed);
    const RunOptions run_options{*launch, BenchArea::size_bytes(plan), plan.timeout_ns};
    auto outcome = run_ranks(run_options, [&](RankContext& context) { return run_bench_rank(plan, context); });
    if (!outcome) return fail(outcome.status(), kExitFailed);
    reports.push_back({plan, summarise(plan, *outcome), BenchArea(plan, outcome->result(0)).device(),
                       BenchArea(plan, outcome->result(0)).wire().names});
  }
  if (!launch->reports_here()) return kExitOk;
  if (Status status = print(text_stream(options.json_path), to_text(reports)); !status)
    return fail(status, kExitFailed);
  if (options.json_path.empty()) return kExitOk;
  Status status = write_json(options.json_path, to_json(reports, launch->description));
  return status ? kExitOk : fail(status, kExitFailed);
}

void add_shape_options(CLI::App& command, BenchOptions* options) {
  BenchPlan& plan = options->plan;
  plan.num_tokens = 512;
  plan.hidden = 7168;  // the MoE layer of DeepSeek-V3
  plan.num_topk = 8;
  plan.num_experts = 256;
  command.add_option("--tokens", plan.num_tokens, "Tokens of each rank")
      ->check(whole_number(std::int64_t{1}, kMaxTokens))
      ->capture_default_str();
  add_whole_numbers(command, "--sweep-tokens", &options->sweep_tokens, {1, kMaxTokens},
                    "Measure several token counts, e.g. 512,1024,2048");
  command.add_option("--hidden", plan.hidden, "Channels of a token")
      ->check(whole_number(std::int64_t{1}, kMaxHidden))
      ->capture_default_str();
  command.add_option("--topk", plan.num_topk, "Experts of a token")
      ->check(whole_number(1, kMaxTopk))
      ->capture_default_str();
  command.add_option("--experts", plan.num_experts, "Experts of all ranks")
      ->check(whole_number(std::int64_t{1}, kMaxExperts))
      ->capture_default_str();
}

}  // namespace

void add_bench_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<BenchOptions>();
  BenchPlan& plan = options->plan;
  plan.num_iterations = 20;
  plan.num_warmup = 3;
  CLI::App* command =
      app.add_subcommand("bench", "Time route, dispatch and combine, next to plain copies on this machine");
  add_common_options(*command, &options->common);
  add_verify_option(*command, &options->common);
  add_choice<BenchOp>(*command, "--op", &plan.op,
                      {{"route", BenchOp::kRoute},
                       {"dispatch", BenchOp::kDispatch},
                       {"combine", BenchOp::kCombine},
                       {"pair", BenchOp::kPair},
                       {"latency-dispatch", BenchOp::kLatencyDispatch},
                       {"latency-combine", BenchOp::kLatencyCombine},
                       {"latency-pair", BenchOp::kLatencyPair},
                       {"put", BenchOp::kPut},
                       {"get", BenchOp::kGet},
                       {"signal", BenchOp::kSignal},
                       {"fadd", BenchOp::kFetchAdd}},
                      "What to time (default pair: dispatch and combine; put, get, signal, fadd: of the one-sided "
                      "layer, between two ranks)");
  add_shape_options(*command, options.get());
  command->add_option("--replicas", plan.num_replicas, "With --op route: number of experts with a second home")
      ->check(whole_number(std::int64_t{0}, kMaxExperts));
  command->add_flag("--count-load", plan.counts_load,
                    "Timed routes add the load of experts to counters (so do dispatches with --no-cached)");
  add_choice<BenchDType>(*command, "--dtype", &plan.dtype, {{"bf16", BenchDType::kBfloat16}, {"fp8", BenchDType::kFp8}},
                         "Payload of dispatch (default bf16); combine is always bf16");
  add_choice<WireFormat>(*command, "--combine-wire", &plan.wire_format,
                         {{"as-given", WireFormat::kAsGiven}, {"fp8", WireFormat::kFp8}},
                         "Rows of combine on their way (default as-given): as they are, or quantised to FP8; in "
                         "latency mode with --order rank_sums");
  add_choice<Layout>(*command, "--layout", &plan.layout,
                     {{"tokens", Layout::kTokens}, {"experts", Layout::kExperts}, {"slab", Layout::kSlab}},
                     "Layout of received rows (default tokens); combine is weighted in the other two");
  add_choice<BenchMemory>(*command, "--memory", &plan.memory,
                          {{"symmetric", BenchMemory::kSymmetric}, {"plain", BenchMemory::kPlain}},
                          "Where tokens and rows live (default symmetric: memory of the group)");
  command->add_flag("--return-weights", plan.returns_weights,
                    "Also combine weights, from memory of the group, where dispatch leaves them");
  command->add_flag("--cached,!--no-cached", plan.cached,
                    "Reuse one Routing for every dispatch (the default), or route before each");
  add_latency_options(*command, &plan);
  add_kernel_options(*command, &plan.kernels.front());
  command->add_option(
      "--tuning-file", plan.tuning_file,
      "CUDA: kernel settings that `ferry tune --out` wrote, or builtin (default: FERRY_TUNING, else none)");
  command
      ->add_option(
          "--network-rate", plan.network_gbps,
          "Several nodes: GB/s that the network of a rank carries each way; prints the wire's time beside each "
          "operation's")
      ->check(CLI::Range(kMinNetworkRate, kMaxNetworkRate))
      ->check(is_number)
      ->option_text("FLOAT");
  command->add_option("--routing", options->routing, "random, zipf, one-hot or trace:FILE")->capture_default_str();
  command->add_option("--iterations", plan.num_iterations, fmt::format("Timed iterations (on GPUs {})", kGpuIterations))
      ->check(whole_number(1, kMaxIterations))
      ->capture_default_str();
  command
      ->add_option("--warmup", plan.num_warmup,
                   fmt::format("Iterations before the first timed one (on GPUs {})", kGpuWarmup))
      ->check(whole_number(0, kMaxIterations))
      ->capture_default_str();
  command
      ->add_option("--late-us", options->late_us,
                   "Delay of the last rank at the start of every timed call, in microseconds (default 0)")
      ->check(whole_number(std::int64_t{0}, kMaxLateUs));
  command->add_option("--json", options->json_path, "Write the results to this file as JSON (-: only JSON, to stdout)")
      ->check(path());
  command->callback([options, command, exit_code] {
    options->topk_given = command->count("--topk") > 0;
    options->experts_given = command->count("--experts") > 0;
    options->iterations_given = command->count("--iterations") > 0;
    options->warmup_given = command->count("--warmup") > 0;
    Status status = settle_latency_options(*command, &options->plan);
    *exit_code = status ? run_bench(*options) : report_failure("bench", status, kExitUsage);
  });
}

}  // namespace ferry::tools
