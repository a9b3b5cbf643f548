#include "demo/demo.hpp"

#include <fmt/format.h>

#include <CLI/Validators.hpp>
#include <limits>
#include <memory>
#include <utility>

#include "common/timing.hpp"
#include "demo/demo_rank.hpp"
#include "demo/demo_run.hpp"
#include "demo/dense_layer.hpp"
#include "demo/picture.hpp"
#include "demo/report.hpp"
#include "report/json_report.hpp"
#include "report/output.hpp"
#include "report/progress.hpp"
#include "run/exit_code.hpp"
#include "run/launcher.hpp"
#include "run/option_types.hpp"
#include "run/run_options.hpp"

namespace ferry::tools {

namespace {

/// Keep the default run within seconds on two slow cores.
constexpr std::int64_t kDefaultTokensPerRank = 512;
constexpr std::int64_t kDefaultScale = 16;
constexpr std::int64_t kMaxTokensPerRank = 1 << 20;
constexpr std::int64_t kMaxScale = 1024;
/// Decode batches have as many tokens as a rank has requests.
constexpr std::int64_t kDefaultTokensPerStep = 16;
/// More tokens are a case for `route` and `dispatch`; slabs for the worst case would fill the memory.
constexpr std::int64_t kMaxTokensPerStep = 1024;
constexpr int kDefaultSteps = 8;
constexpr int kMaxSteps = 10'000;
constexpr std::int64_t kMaxReplicas = 1 << 16;

struct DemoOptions {
  CommonOptions common;
  DemoMode mode = DemoMode::kThroughput;
  ExpertsMode experts = ExpertsMode::kFixed;
  std::optional<std::int64_t> num_spare;
  std::optional<int> num_steps;
  std::optional<std::int64_t> tokens_per_rank;
  std::optional<std::string> model;
  std::int64_t scale = kDefaultScale;
  PayloadType payload = PayloadType::kBfloat16;
  std::string text_path;
  std::string trace_path;
  std::string report_path;
  std::string picture_path;
  std::int64_t spoiled_token = -1;
};

/// The requested model, else the one that the trace names, else the first of the list.
const ModelPreset& choose_preset(const DemoOptions& options, const std::optional<Trace>& trace) {
  if (options.model) return *find_preset(*options.model);
  const ModelPreset* recorded = trace ? recognise_preset(trace->model) : nullptr;
  return recorded != nullptr ? *recorded : model_presets().front();
}

Status check_mode(const DemoOptions& options) {
  if (options.experts == ExpertsMode::kBalance && options.mode != DemoMode::kThroughput) {
    return {ErrorCode::kInvalidArgument, "--experts balance is for --mode throughput; leave --mode out"};
  }
  if (options.num_spare && options.experts != ExpertsMode::kBalance) {
    return {ErrorCode::kInvalidArgument, "--replicas is for --experts balance; without it every expert has one place"};
  }
  if (options.mode == DemoMode::kThroughput) {
    if (!options.num_steps) return {};
    return {ErrorCode::kInvalidArgument, "--steps is for --mode latency; the other mode has one step"};
  }
  const std::int64_t num_tokens = options.tokens_per_rank.value_or(kDefaultTokensPerStep);
  if (num_tokens <= kMaxTokensPerStep) return {};
  return {ErrorCode::kInvalidArgument,
          fmt::format("--tokens {} with --mode latency: expected at most {} for each step; leave --mode out for large "
                      "batches",
                      num_tokens, kMaxTokensPerStep)};
}

Result<DemoPlan> make_plan(const DemoOptions& options, int num_ranks) {
  if (Status status = check_mode(options); !status) return status;
  DemoPlan plan;
  plan.mode = options.mode;
  const bool latency = plan.latency();
  plan.experts = options.experts;
  if (plan.balances()) plan.num_steps = static_cast<int>(kNumHalves);
  if (latency) plan.num_steps = options.num_steps.value_or(kDefaultSteps);
  plan.num_ranks = num_ranks;
  plan.payload = options.payload;
  plan.seed = options.common.seed;
  plan.timeout_ns = options.common.timeout_ns();
  plan.arena_bytes = options.common.arena_bytes;
  plan.spoiled_token = options.spoiled_token;
  if (!options.trace_path.empty()) {
    auto trace = read_trace(options.trace_path);
    if (!trace) return trace.status();
    plan.trace = std::move(*trace);
  }
  plan.shape = scaled_shape(choose_preset(options, plan.trace), options.scale);
  const std::int64_t most_tokens =
      num_ranks * (latency ? plan.num_steps : 1) *
      options.tokens_per_rank.value_or(latency ? kDefaultTokensPerStep : kDefaultTokensPerRank);
  auto text = load_text(options.text_path, plan.trace ? plan.trace->table.num_tokens : most_tokens);
  if (!text) return text.status();
  plan.text = std::move(*text);
  if (plan.trace) {
    const RoutingTable& table = plan.trace->table;
    plan.shape.num_experts = table.num_experts;
    plan.shape.gating.num_topk = table.num_topk;
    plan.num_tokens = options.tokens_per_rank || latency ? std::min(most_tokens, table.num_tokens) : table.num_tokens;
    while (static_cast<std::int64_t>(plan.text.bytes.size()) < plan.num_tokens) plan.text.bytes += plan.text.bytes;
  } else {
    plan.num_tokens = std::min(most_tokens, static_cast<std::int64_t>(plan.text.bytes.size()));
  }
  plan.num_places = plan.shape.num_experts;
  if (plan.balances()) {
    if (plan.trace) plan.trace->table = order_by_half(plan, plan.trace->table);
    // All ranks have equally many places.
    const std::int64_t num_wanted = plan.num_places + options.num_spare.value_or(0);
    plan.num_places = (num_wanted + num_ranks - 1) / num_ranks * num_ranks;
  }
  if (plan.spoiled_token >= plan.num_tokens) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("--spoil-token {}: the run has tokens 0 to {}", plan.spoiled_token, plan.num_tokens - 1));
  }
  return plan;
}

/// Computes the dense layer and the comparison, in the process that reports.
Status judge(const RunOutcome& outcome, DemoReport* report) {
  const DemoPlan& plan = *report->plan;
  Progress progress("demo", true);
  std::vector<std::uint16_t> got;
  report->expert_rows.assign(static_cast<std::size_t>(plan.shape.num_experts), 0);
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    const RankArea area(plan, outcome.result(rank));
    report->ranks.push_back(area.figures());
    const auto output = area.output();
    got.insert(got.end(), output.begin(), output.end());
    const auto rows_to_rank = area.rows_to_rank();
    report->rows_to_rank.emplace_back(rows_to_rank.begin(), rows_to_rank.end());
    const auto waits_ns = area.waits_ns();
    report->loads.waits_ns.emplace_back(waits_ns.begin(), waits_ns.end());
    report->loads.rows.push_back(area.figures().num_received_rows);
    for (std::size_t i = 0; i < report->expert_rows.size(); ++i) report->expert_rows[i] += area.expert_rows()[i];
  }

  const std::int64_t start_ns = now_ns();
  auto x = embed_run_tokens(plan, 0, plan.num_tokens);
  auto choice = choose_run_experts(plan, x, 0, plan.num_tokens);
  if (!choice) return choice.status();
  if (plan.balances()) {
    report->balance = compare_halves(plan, report->ranks, *choice);
    const auto placement = RankArea(plan, outcome.result(0)).placement();
    report->balance->placement.assign(placement.begin(), placement.end());
  }
  auto seen_by_experts = round_as_payload(plan, std::move(x));
  if (!seen_by_experts) return seen_by_experts.status();
  const DenseInput in{*seen_by_experts, &*choice, &plan.shape, LayerSeeds(plan.seed).experts};
  // At most four lines if progress is printed line by line.
  const std::int64_t experts_per_step = (plan.shape.num_experts + 3) / 4;
  const DenseOutput dense = compute_dense(in, [&](std::int64_t expert) {
    if (expert % experts_per_step == 0) {
      progress.step(fmt::format("dense layer in one process, expert {} of {}", expert, plan.shape.num_experts));
    }
  });
  report->dense_ns = now_ns() - start_ns;
  report->comparison = compare_with_dense(got, dense, plan.shape, plan.num_nodes);
  progress.clear();
  return {};
}

int report_outcome(const DemoOptions& options, const RunOutcome& outcome, DemoReport* report) {
  if (Status status = judge(outcome, report); !status) return report_failure("demo", status, kExitFailed);
  if (Status status = print(text_stream(options.report_path), to_text(*report)); !status) {
    return report_failure("demo", status, kExitFailed);
  }
  if (!options.report_path.empty()) {
    Status status = write_json(options.report_path, to_json(*report));
    if (!status) return report_failure("demo", status, kExitFailed);
  }
  if (!options.picture_path.empty()) {
    Status status = write_text(options.picture_path, draw_picture(*report), "the picture");
    if (!status) return report_failure("demo", status, kExitFailed);
  }
  return report->comparison.verified ? kExitOk : kExitFailed;
}

int run_demo(const DemoOptions& options) {
  const auto refuse = [](const Status& status) { return report_failure("demo", status, kExitUsage); };
  auto launch = plan_launch(options.common.launch_request());
  if (!launch) return report_failure("demo", launch.status(), exit_code_of_launch(launch.status()));
  auto backend = resolve_backend(options.common, launch->num_nodes);
  if (!backend) return refuse(backend.status());
  if (Status status = check_transport(options.common, launch->num_nodes); !status) return refuse(status);
  if (Status status = check_output(options.report_path, *launch); !status) return refuse(status);
  if (options.picture_path == "-") {
    return refuse({ErrorCode::kInvalidArgument, "--picture -: a picture goes to a file; name one that ends in .svg"});
  }
  if (!options.picture_path.empty() && options.picture_path == options.report_path) {
    return refuse({ErrorCode::kInvalidArgument, "--picture and --report name the same file; give each its own"});
  }
  Status writable = check_output(options.picture_path, *launch, "the picture");
  if (!writable) return refuse(writable);
  auto plan = make_plan(options, launch->num_ranks);
  if (!plan) return refuse(plan.status());
  plan->num_nodes = launch->num_nodes;
  plan->backend = *backend;
  plan->transport = options.common.transport;
  plan->net_devices = options.common.net_devices;
  plan->ring_memory = options.common.ring_memory;
  plan->verify = options.common.verify;

  DemoReport report;
  report.plan = &*plan;
  report.launch = launch->description;
  if (launch->reports_here()) {
    Status status = print(text_stream(options.report_path), introduction(*plan, launch->description));
    // A launcher's other ranks do not see this failure: with them the run continues, and its end reports it.
    if (!status && !launch->from_environment) return report_failure("demo", status, kExitFailed);
  }
  const std::int64_t start_ns = now_ns();
  const RunOptions run_options{*launch, RankArea::size_bytes(*plan), plan->timeout_ns};
  auto outcome = run_ranks(run_options, [&](RankContext& context) { return run_demo_rank(*plan, context); });
  if (!outcome) return report_failure("demo", outcome.status(), kExitFailed);
  report.ranks_ns = now_ns() - start_ns;

  const int exit_code = outcome->is_reporter() ? report_outcome(options, *outcome, &report) : kExitOk;
  auto shared = outcome->share_exit_code(exit_code);
  return shared ? *shared : report_failure("demo", shared.status(), kExitFailed);
}

CLI::IsMember selectable_models() {
  std::vector<std::string> names;
  for (const ModelPreset& preset : model_presets()) {
    if (preset.selectable) names.emplace_back(preset.name);
  }
  return CLI::IsMember(names);
}

}  // namespace

void add_demo_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand(
      "demo", "Run a Mixture-of-Experts layer over several ranks on real text and check it against one process");
  add_common_options(*command, &options->common);
  add_verify_option(*command, &options->common);
  add_choice<DemoMode>(*command, "--mode", &options->mode,
                       {{"throughput", DemoMode::kThroughput}, {"latency", DemoMode::kLatency}},
                       "All tokens at once, or a few per step as in decoding (default throughput)");
  add_choice<ExpertsMode>(*command, "--experts", &options->experts,
                          {{"fixed", ExpertsMode::kFixed}, {"balance", ExpertsMode::kBalance}},
                          "fixed, or balance: after half of the tokens experts move to even out the load");
  command
      ->add_option("--replicas", options->num_spare,
                   "With --experts balance: places for replicas, beyond one for each expert (default: as many as make "
                   "ranks equal)")
      ->check(whole_number(std::int64_t{0}, kMaxReplicas));
  command->add_option("--steps", options->num_steps, fmt::format("Latency mode: steps (default {})", kDefaultSteps))
      ->check(whole_number(1, kMaxSteps));
  command
      ->add_option("--tokens", options->tokens_per_rank,
                   fmt::format("Most tokens per rank (default {}; with --trace, the whole trace), in latency mode per "
                               "rank and step (default {})",
                               kDefaultTokensPerRank, kDefaultTokensPerStep))
      ->check(whole_number(std::int64_t{1}, kMaxTokensPerRank));
  command
      ->add_option("--model", options->model,
                   "Model whose layer is computed (default: the one that the trace names, else deepseek-v3)")
      ->check(selectable_models());
  command->add_option("--scale", options->scale, "Divide the model's hidden and intermediate sizes by this")
      ->check(whole_number(std::int64_t{1}, kMaxScale))
      ->capture_default_str();
  add_choice<PayloadType>(*command, "--dtype", &options->payload,
                          {{"bf16", PayloadType::kBfloat16}, {"fp8", PayloadType::kFp8}},
                          "Type of the rows that dispatch sends (default bf16)");
  command->add_option("--text", options->text_path, "Text whose bytes are the tokens (default: Ferry's documents)")
      ->check(path());
  command
      ->add_option("--trace", options->trace_path,
                   "Recorded router decisions in place of the router: JSON lines with topk_ids and topk_weights")
      ->check(path());
  command
      ->add_option("--report", options->report_path,
                   "Write everything that is printed to this file as JSON (-: only JSON, to stdout)")
      ->check(path());
  command
      ->add_option("--picture", options->picture_path,
                   "Draw the rows sent between ranks and the load of each expert into this file (SVG)")
      ->check(path());
  command->add_option("--spoil-token", options->spoiled_token, "Spoil this token's result, to see the check fail")
      ->check(whole_number(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()));
  command->callback([options, exit_code] { *exit_code = run_demo(*options); });
}

}  // namespace ferry::tools
