#include "planning/plan_command.hpp"

#include <fmt/format.h>

#include <CLI/Validators.hpp>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ferry/routing.hpp"
#include "ferry/version.hpp"
#include "planning/compare.hpp"
#include "planning/load.hpp"
#include "planning/model.hpp"
#include "planning/rates.hpp"
#include "planning/report.hpp"
#include "report/output.hpp"
#include "report/table.hpp"
#include "run/exit_code.hpp"
#include "run/option_types.hpp"

namespace ferry::tools {

namespace {

constexpr std::int64_t kMostPlanTokens = 1 << 22;
constexpr std::int64_t kMostLatencyTokens = 1 << 16;
constexpr std::int64_t kMostHidden = 1 << 20;
constexpr std::int64_t kMostExperts = 1 << 16;
constexpr int kMostSms = 1024;
constexpr int kMostGbit = 1'000'000;

struct PlanOptions {
  PlanShape shape;
  std::vector<int> nodes{1};
  std::string rates = "h100";
  bool rates_given = false;
  int network_gbit = 0;
  bool with_terms = false;
  bool no_weights = false;
  std::string routing = "random";
  std::uint64_t seed = 1;
  std::string compare_path;
  std::string json_path;
};

Json shape_json(const PlanShape& shape, const std::string& routing) {
  return {{"tokens", shape.num_tokens},
          {"latency_tokens", shape.latency_tokens},
          {"hidden", shape.hidden},
          {"topk", shape.num_topk},
          {"experts", shape.num_experts},
          {"dtype", shape.dtype == PlanDType::kFp8 ? "fp8" : "bf16"},
          {"weights", shape.weights},
          {"memory", shape.plain ? "plain" : "symmetric"},
          {"order", shape.order == CombineOrder::kRankSums ? "rank_sums" : "exact"},
          {"combine_wire", shape.fp8_sums ? "fp8" : "as-given"},
          {"routing", routing},
          {"node_limit", shape.node_limit},
          {"num_sms", shape.num_sms},
          {"ring_memory", shape.rings == PlanRings::kGpu ? "gpu" : "host"}};
}

std::string introduction(const PlanShape& shape, const std::string& routing) {
  const std::string drawn =
      routing == "random" ? "at random" : fmt::format("by routing {}, of which the busiest rank counts", routing);
  return fmt::format(
      "Ferry {} ({}): predicted, not measured\n{} tokens a rank ({} in latency mode), hidden {}, {} out and bf16 "
      "back{}\n"
      "top {} of {} experts, {}{}\n\n",
      version(), commit(), shape.num_tokens, shape.latency_tokens, shape.hidden,
      shape.dtype == PlanDType::kFp8 ? "fp8" : "bf16", shape.rings == PlanRings::kGpu ? ", rings in GPU memory" : "",
      shape.num_topk, shape.num_experts, drawn,
      shape.node_limit > 0 ? fmt::format(" in at most {} nodes", shape.node_limit) : "");
}

Json report_head() {
  Json json;
  json["command"] = "plan";
  json["version"] = version();
  json["commit"] = commit();
  return json;
}

Result<Rates> rates_of(const PlanOptions& options, const std::string& name) {
  Result<Rates> rates = find_rates(name);
  if (rates && options.network_gbit > 0) {
    rates->network_gbit = {static_cast<double>(options.network_gbit), RateOrigin::kAssumed, "--network-gbit"};
  }
  return rates;
}

/// A report has shapes of its own.
Status check_compared(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    const bool serves = name == "--compare" || name == "--rates" || name == "--network-gbit" || name == "--json";
    if (serves || option->count() == 0) continue;
    return {
        ErrorCode::kInvalidArgument,
        fmt::format("{} with --compare: shapes and topologies are those of the report; leave the option out", name)};
  }
  return {};
}

/// Writes text and report where the options ask for them.
int finish(const PlanOptions& options, const std::string& text, const Json& json) {
  if (options.json_path != "-") {
    if (Status status = print(stdout, text); !status) return report_failure("plan", status, kExitFailed);
  }
  if (options.json_path.empty()) return kExitOk;
  const Status status = write_json(options.json_path, json);
  return status ? kExitOk : report_failure("plan", status, kExitFailed);
}

int run_compare(const CLI::App& command, const PlanOptions& options) {
  if (Status status = check_compared(command); !status) return report_failure("plan", status, kExitUsage);
  Result<Json> report = read_report(options.compare_path);
  if (!report) return report_failure("plan", report.status(), kExitUsage);
  std::string name = options.rates;
  if (!options.rates_given && !rates_for(*report).empty()) name = rates_for(*report);
  Result<Rates> rates = rates_of(options, name);
  if (!rates) return report_failure("plan", rates.status(), kExitUsage);
  Table table({"call", "", "measured", "predicted", "predicted/measured"});
  Json json = report_head();
  json["compared_with"] = options.compare_path;
  json["rates"] = to_json(*rates);
  json["comparisons"] = Json::array();
  for (const PlanComparison& one : compare(*report, *rates)) {
    table.add_row({one.call, one.unit, fmt::format("{:.5g}", one.measured), fmt::format("{:.5g}", one.predicted),
                   fmt::format("{:.2f}", one.ratio())});
    json["comparisons"].push_back({{"call", one.call},
                                   {"unit", one.unit},
                                   {"measured", one.measured},
                                   {"predicted", one.predicted},
                                   {"ratio", one.ratio()}});
  }
  if (json["comparisons"].empty()) {
    return report_failure("plan",
                          {ErrorCode::kInvalidArgument,
                           fmt::format("--compare {}: none of its results is predicted; expected dispatch, combine or "
                                       "route in layout tokens, or latency-pair, of backend cuda",
                                       options.compare_path)},
                          kExitUsage);
  }
  return finish(options, fmt::format("{}, rates {}\n{}", options.compare_path, rates->name, table.to_string()), json);
}

int run_plan(const CLI::App& command, const PlanOptions& options) {
  if (Status status = check_writable(options.json_path, "the report"); !status) {
    return report_failure("plan", status, kExitUsage);
  }
  if (!options.compare_path.empty()) return run_compare(command, options);
  Result<Rates> rates = rates_of(options, options.rates);
  if (!rates) return report_failure("plan", rates.status(), kExitUsage);
  std::vector<PlanShape> shapes;
  for (const int num_nodes : options.nodes) {
    PlanShape shape = options.shape;
    shape.weights = !options.no_weights;
    shape.num_nodes = num_nodes;
    if (Status status = check(shape); !status) return report_failure("plan", status, kExitUsage);
    const Result<PlanLoad> load = busiest_load(shape, options.routing, options.seed);
    if (!load) return report_failure("plan", load.status(), kExitUsage);
    shape.load = *load;
    shapes.push_back(shape);
  }
  std::string text = introduction(shapes.front(), options.routing);
  Json json = report_head();
  json["shape"] = shape_json(shapes.front(), options.routing);
  json["rates"] = to_json(*rates);
  json["plans"] = Json::array();
  for (const PlanShape& shape : shapes) {
    text += plan_text(shape, *rates, options.with_terms);
    json["plans"].push_back(plan_json(shape, *rates));
  }
  return finish(options, text + rates_text(shapes, *rates), json);
}

void add_shape_options(CLI::App& command, PlanOptions* options) {
  PlanShape& shape = options->shape;
  command.add_option("--tokens", shape.num_tokens, "Tokens of each rank (default 4096)")
      ->check(whole_number<std::int64_t>(1, kMostPlanTokens));
  command.add_option("--latency-tokens", shape.latency_tokens, "Tokens of each rank in latency mode (default 128)")
      ->check(whole_number<std::int64_t>(1, kMostLatencyTokens));
  command.add_option("--hidden", shape.hidden, "Elements of a token's row (default 7168)")
      ->check(whole_number<std::int64_t>(1, kMostHidden));
  command.add_option("--topk", shape.num_topk, "Experts of each token (default 8)")->check(whole_number(1, kMaxTopk));
  command.add_option("--experts", shape.num_experts, "Experts (default 256)")
      ->check(whole_number<std::int64_t>(1, kMostExperts));
  add_choice<PlanDType>(command, "--dtype", &shape.dtype, {{"bf16", PlanDType::kBfloat16}, {"fp8", PlanDType::kFp8}},
                        "Rows of dispatch; combine returns bf16 (default bf16)");
  command.add_flag("--no-weights", options->no_weights, "Dispatch no ids and weights with the rows");
  add_choice<bool>(command, "--memory", &shape.plain, {{"symmetric", false}, {"plain", true}},
                   "Memory of the tensors, as for ferry bench (default symmetric)");
  command.add_option("--routing", options->routing,
                     "Experts of tokens: random, zipf, one-hot or trace:FILE; other than random the busiest rank is "
                     "planned (default random)");
  command.add_option("--seed", options->seed, "Seed of zipf (default 1)")
      ->check(whole_number<std::uint64_t>(0, std::numeric_limits<std::uint64_t>::max()));
  add_choice<CombineOrder>(command, "--order", &shape.order,
                           {{"exact", CombineOrder::kExact}, {"rank_sums", CombineOrder::kRankSums}},
                           "Latency mode: order of combine's sums (default exact)");
  add_choice<bool>(command, "--combine-wire", &shape.fp8_sums, {{"as-given", false}, {"fp8", true}},
                   "Latency mode: how sums of ranks travel; fp8 with --order rank_sums (default as-given)");
  command.add_option("--sms", shape.num_sms, "Multiprocessors of a call (default: as many as Ferry takes)")
      ->check(whole_number(1, kMostSms));
}

}  // namespace

void add_plan_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = app.add_subcommand("plan", "Predict time and memory of calls on GPUs, and say what limits them");
  add_shape_options(*command, options.get());
  add_whole_numbers<int>(*command, "--nodes", &options->nodes, {1, kMaxPlanRanks},
                         "Nodes; several numbers, separated by commas, are planned one by one (default 1)");
  command->add_option("--ranks-per-node", options->shape.ranks_per_node, "GPUs of a node (default 8)")
      ->check(whole_number(1, kMaxPlanRanks));
  command
      ->add_option("--node-limit", options->shape.node_limit,
                   "Most nodes that experts of one token are in (default: any)")
      ->check(whole_number(1, kMaxPlanRanks));
  add_choice<PlanRings>(*command, "--ring-memory", &options->shape.rings,
                        {{"host", PlanRings::kHost}, {"gpu", PlanRings::kGpu}},
                        "Memory of the rings between nodes (default host)");
  CLI::Option* rates =
      command->add_option("--rates", options->rates,
                          "Rates: h100, h200 or a JSON file (default h100; with --compare those of the "
                          "report's GPU)");
  rates->check(path());
  command->add_option("--network-gbit", options->network_gbit, "Network of each GPU in Gbit/s, instead of the rates'")
      ->check(whole_number(1, kMostGbit));
  command->add_flag("--terms", options->with_terms, "Print every term of every call");
  command
      ->add_option("--compare", options->compare_path,
                   "Predict the results of this report of ferry bench --json or benchmarks/nodes.py instead")
      ->check(path());
  command->add_option("--json", options->json_path, "Write the plan to this file as JSON (-: only JSON, to stdout)")
      ->check(path());
  command->callback([options, rates, command, exit_code] {
    options->rates_given = rates->count() > 0;
    *exit_code = run_plan(*command, *options);
  });
}

}  // namespace ferry::tools
