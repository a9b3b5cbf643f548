#include "demo/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "ferry/version.hpp"
#include "report/host_facts.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

/// With more bars the chart does not fit a screen; neighbouring experts then share one.
constexpr std::int64_t kMaxBars = 32;
constexpr int kBarWidth = 50;

std::string rank_table(const DemoReport& report) {
  const std::string experts = report.plan->balances() ? "places" : "experts";
  std::vector<std::string> header = {"rank",      experts,    "tokens", "sent rows",
                                     "recv rows", "own rows", "sent",   "received"};
  for (std::size_t phase = 0; phase < kNumPhases; ++phase) {
    if (has_phase(*report.plan, phase)) header.emplace_back(kPhaseNames[phase]);
  }
  Table table(std::move(header));
  const std::int64_t row_bytes = report.plan->row_bytes();
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const RankFigures& figures = report.ranks[rank];
    std::vector<std::string> row = {fmt::to_string(rank),
                                    fmt::to_string(figures.num_experts),
                                    fmt::to_string(figures.num_tokens),
                                    fmt::to_string(figures.num_sent_rows),
                                    fmt::to_string(figures.num_received_rows),
                                    fmt::to_string(figures.num_own_rows),
                                    format_bytes(static_cast<double>(figures.num_sent_rows * row_bytes)),
                                    format_bytes(static_cast<double>(figures.num_received_rows * row_bytes))};
    for (std::size_t phase = 0; phase < kNumPhases; ++phase) {
      if (has_phase(*report.plan, phase)) row.push_back(format_ns(figures.phase_ns[phase]));
    }
    table.add_row(std::move(row));
  }
  return table.to_string();
}

std::string load_chart(const DemoReport& report) {
  const auto num_experts = static_cast<std::int64_t>(report.expert_rows.size());
  const std::int64_t experts_per_bar = (num_experts + kMaxBars - 1) / kMaxBars;
  std::vector<Bar> bars;
  for (std::int64_t first = 0; first < num_experts; first += experts_per_bar) {
    const std::int64_t last = std::min(first + experts_per_bar, num_experts) - 1;
    const auto begin = report.expert_rows.begin() + first;
    bars.push_back({first == last ? fmt::to_string(first) : fmt::format("{}-{}", first, last),
                    std::accumulate(begin, begin + (last - first + 1), std::int64_t{0})});
  }
  const std::int64_t total = std::accumulate(report.expert_rows.begin(), report.expert_rows.end(), std::int64_t{0});
  const std::int64_t busiest = *std::max_element(report.expert_rows.begin(), report.expert_rows.end());
  return fmt::format("expert load, rows per {} (mean {:.1f} rows per expert, busiest {})\n{}",
                     experts_per_bar == 1 ? std::string("expert") : fmt::format("{} experts", experts_per_bar),
                     static_cast<double>(total) / static_cast<double>(num_experts), busiest,
                     bar_chart(bars, kBarWidth, locale_is_utf8()));
}

/// Phases in which a rank calls the group.
constexpr Phase kCalls[] = {Phase::kRoute, Phase::kDispatch, Phase::kCombine};

/// Table of the network traffic and the bytes expected from the ids; empty on one node.
std::string wire_table(const DemoReport& report) {
  const DemoPlan& plan = *report.plan;
  if (plan.num_nodes == 1) return "";
  std::vector<std::string> header = {"call"};
  const auto columns = wire_header();
  header.insert(header.end(), columns.begin(), columns.end());
  Table table(std::move(header));
  for (const Phase phase : kCalls) {
    if (!has_phase(plan, static_cast<std::size_t>(phase))) continue;
    std::vector<std::string> row = {std::string(kPhaseNames[static_cast<std::size_t>(phase)])};
    const auto cells = wire_row(wire_of(report, phase));
    row.insert(row.end(), cells.begin(), cells.end());
    table.add_row(std::move(row));
  }
  const WireNames& names = report.ranks.front().wire_names;
  return fmt::format(
      "over the network between {} ({}{}{})\n{}"
      "  (formula: for each token, other nodes that own one of its experts, x {} B out and {} B back; the rest is "
      "chunk\n"
      "  headers, and a notice to each rail peer and call)\n\n",
      describe_nodes(plan.num_nodes, plan.ranks_per_node()), names.transport.data(), names.route[0] == '\0' ? "" : ": ",
      names.route.data(), table.to_string(), plan.dispatch_wire_row_bytes(), plan.combine_wire_row_bytes());
}

/// null on one node
Json wire_to_json(const DemoReport& report) {
  if (report.plan->num_nodes == 1) return nullptr;
  const WireNames& names = report.ranks.front().wire_names;
  Json json = {{"transport", names.transport.data()}, {"route", names.route.data()}};
  for (const Phase phase : kCalls) {
    if (!has_phase(*report.plan, static_cast<std::size_t>(phase))) continue;
    json[std::string(kPhaseNames[static_cast<std::size_t>(phase)])] = to_json(wire_of(report, phase));
  }
  return json;
}

std::string verdict(const Comparison& comparison, const DemoPlan& plan) {
  std::string text = fmt::format(
      "largest error {:.3g} (bound there {:.3g}); at most {:.3g} of an element's bound\n"
      "bound: {}\n",
      comparison.largest_error, comparison.bound_at_largest_error, comparison.largest_share,
      bound_formula(plan.num_nodes));
  if (comparison.verified)
    return text + fmt::format("verified: {} tokens{} agree with the dense layer\n", plan.num_tokens,
                              plan.latency() ? fmt::format(" of {} steps", plan.num_steps) : "");
  return text + fmt::format(
                    "MISMATCH: {} of {} tokens differ; the first is token {}, channel {}: expected {:.6g}, got "
                    "{:.6g}, bound {:.3g}\n",
                    comparison.num_bad_tokens, plan.num_tokens, comparison.first_bad_token,
                    comparison.first_bad_channel, comparison.expected, comparison.got, comparison.bound);
}

std::string payload_name(const DemoPlan& plan) { return plan.payload == PayloadType::kFp8 ? "fp8" : "bf16"; }

std::string router_of(const DemoPlan& plan) {
  if (plan.trace) return fmt::format("recorded ({})", plan.trace->model.empty() ? "no model named" : plan.trace->model);
  const GatingOptions& gating = plan.shape.gating;
  std::string text =
      fmt::format("{}, top {}", gating.score == GatingScore::kSigmoid ? "sigmoid" : "softmax", gating.num_topk);
  if (gating.num_groups > 1) {
    text += fmt::format(" from {} of {} groups", gating.num_selected_groups, gating.num_groups);
  }
  return text;
}

}  // namespace

WireTotal wire_of(const DemoReport& report, Phase phase) {
  WireTotal total;
  total.num_ranks = report.plan->num_ranks;
  for (const RankFigures& figures : report.ranks) total.add(figures.wire[static_cast<std::size_t>(phase)]);
  return total;
}

std::string introduction(const DemoPlan& plan, const std::string& launch) {
  const LayerShape& shape = plan.shape;
  return fmt::format(
      "Ferry {} ({}), backend {}: {}\n"
      "layer   {} at 1/{} size: hidden {}, intermediate {}, {} experts, router: {}\n"
      "tokens  {} bytes of {}; payload {}, {} bytes a row\n{}{}{}",
      version(), commit(), plan.backend, launch, shape.model, shape.scale, shape.hidden, shape.intermediate,
      shape.num_experts, router_of(plan), plan.num_tokens, plan.text.origin, payload_name(plan), plan.row_bytes(),
      plan.latency()
          ? fmt::format("mode    latency: {} steps of up to {} tokens a rank, each dispatched into slabs and combined "
                        "by split calls;\n        the router decides about the next step between the halves of a "
                        "dispatch\n",
                        plan.num_steps, plan.max_tokens_per_step())
          : "",
      plan.balances() ? fmt::format("experts balanced after half of the tokens: {} places for {} experts\n",
                                    plan.num_places, shape.num_experts)
                      : "",
      plan.backend == "cuda"
          ? "GPUs    route, dispatch and combine run on the GPUs; router and experts run on the host, "
            "and phases\n        include the copies between the two\n"
          : "");
}

std::string to_text(const DemoReport& report) {
  std::int64_t num_rows = 0;
  std::int64_t num_own_rows = 0;
  for (const RankFigures& figures : report.ranks) {
    num_rows += figures.num_sent_rows;
    num_own_rows += figures.num_own_rows;
  }
  const double own_share = num_rows == 0 ? 0.0 : static_cast<double>(num_own_rows) / static_cast<double>(num_rows);
  return fmt::format(
      "\n{}  (a row is one token for one of its experts; own rows, {:.0f} % of all, stay on their rank)\n\n{}{}{}{}\n"
      "ranks {}, dense layer in one process {}\n{}",
      rank_table(report), own_share * 100.0, to_text(*report.plan, report.loads), wire_table(report),
      report.balance ? to_text(*report.plan, *report.balance) : "", load_chart(report), format_ns(report.ranks_ns),
      format_ns(report.dense_ns), verdict(report.comparison, *report.plan));
}

Json to_json(const DemoReport& report) {
  const DemoPlan& plan = *report.plan;
  Json json;
  json["command"] = "demo";
  json["version"] = version();
  json["commit"] = commit();
  json["host"] = to_json(read_host_facts());
  json["launch"] = report.launch;
  json["backend"] = plan.backend;
  json["ranks"] = plan.num_ranks;
  json["nodes"] = plan.num_nodes;
  json["seed"] = plan.seed;
  json["model"] = {{"name", plan.shape.model},          {"scale", plan.shape.scale},
                   {"hidden", plan.shape.hidden},       {"intermediate", plan.shape.intermediate},
                   {"experts", plan.shape.num_experts}, {"topk", plan.shape.num_topk()},
                   {"router", router_of(plan)}};
  json["mode"] = plan.latency() ? "latency" : "throughput";
  json["steps"] = plan.num_steps;
  json["tokens"] = plan.num_tokens;
  json["text"] = plan.text.origin;
  json["dtype"] = payload_name(plan);
  json["row_bytes"] = plan.row_bytes();
  json["per_rank"] = Json::array();
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const RankFigures& figures = report.ranks[rank];
    Json entry = {{"rank", rank},
                  {"experts", figures.num_experts},
                  {"tokens", figures.num_tokens},
                  {"sent_rows", figures.num_sent_rows},
                  {"received_rows", figures.num_received_rows},
                  {"own_rows", figures.num_own_rows},
                  {"sent_bytes", figures.num_sent_rows * plan.row_bytes()},
                  {"received_bytes", figures.num_received_rows * plan.row_bytes()},
                  {"rows_to_rank", report.rows_to_rank[rank]}};
    for (std::size_t phase = 0; phase < kNumPhases; ++phase) {
      if (has_phase(plan, phase)) entry[fmt::format("{}_ns", kPhaseNames[phase])] = figures.phase_ns[phase];
    }
    json["per_rank"].push_back(std::move(entry));
  }
  json["load"] = to_json(report.loads);
  json["network"] = wire_to_json(report);
  json["rows_per_expert"] = report.expert_rows;
  json["experts"] = report.balance ? to_json(*report.balance) : Json("fixed");
  json["ranks_ns"] = report.ranks_ns;
  json["dense_ns"] = report.dense_ns;
  const Comparison& comparison = report.comparison;
  json["verified"] = comparison.verified;
  json["largest_error"] = comparison.largest_error;
  json["bound_at_largest_error"] = comparison.bound_at_largest_error;
  json["largest_share_of_bound"] = comparison.largest_share;
  json["bound_formula"] = bound_formula(plan.num_nodes);
  json["mismatched_tokens"] = comparison.num_bad_tokens;
  if (!comparison.verified) {
    json["first_mismatch"] = {{"token", comparison.first_bad_token},
                              {"channel", comparison.first_bad_channel},
                              {"expected", comparison.expected},
                              {"got", comparison.got},
                              {"bound", comparison.bound}};
  }
  return json;
}

}  // namespace ferry::tools
