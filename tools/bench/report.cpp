#include "bench/report.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/gpu_report.hpp"
#include "ferry/version.hpp"
#include "report/host_facts.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

constexpr double kNsPerUs = 1000.0;

std::string two_decimals(const std::optional<double>& value) { return value ? fmt::format("{:.2f}", *value) : "-"; }

Json nullable(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

/// Type of the rows of this operation as they cross: returned rows are bf16, unless combine quantises them.
std::string_view dtype_of(const BenchPlan& plan, BenchOp op) {
  if (op != plan.combine_op() && op != BenchOp::kCombine) return name_of(plan.dtype);
  const bool quantises = op == plan.combine_op() && plan.wire_format == WireFormat::kFp8;
  return name_of(quantises ? BenchDType::kFp8 : BenchDType::kBfloat16);
}

/// Replaces the limits: copies in memory do not bound a network.
std::string nodes_formulas(const BenchPlan& plan) {
  std::string text = fmt::format("nodes          {}; no limit measured for several nodes\n",
                                 describe_nodes(plan.num_nodes, plan.ranks_per_node()));
  if (plan.measures_dispatch()) {
    text += fmt::format(
        "dispatch sends (tokens x other nodes that own one of their experts) x {} B = payload {} + {}\n",
        plan.dispatch_wire_row_bytes(), plan.payload_bytes(), plan.dispatch_wire_row_bytes() - plan.payload_bytes());
  }
  if (plan.measures_combine()) {
    text += fmt::format("combine sends  as many rows x {} B{}\n", plan.combine_wire_row_bytes(),
                        plan.combine_is_weighted()
                            ? fmt::format(" = payload {} + weights {}", plan.combine_sent_row_bytes(),
                                          plan.combine_wire_row_bytes() - plan.combine_sent_row_bytes())
                            : std::string());
  }
  return text +
         "               plus chunk headers and a notice to each rail peer per call; sent: as the group counts it\n";
}

/// Table of the network traffic; empty on one node.
std::string wire_to_text(const std::vector<BenchReport>& reports) {
  const BenchReport& first = reports.front();
  if (first.plan.num_nodes == 1) return "";
  std::vector<std::string> header = {"one call", "tokens"};
  const auto columns = wire_header();
  header.insert(header.end(), columns.begin(), columns.end());
  header.emplace_back("GB/s sent");
  const double network_gbps = first.plan.network_gbps;
  if (network_gbps > 0) header.insert(header.end(), {"wire's time", "ratio"});
  Table table(std::move(header));
  for (const BenchReport& report : reports) {
    for (const OpResult& result : report.results) {
      if (!result.wire) continue;
      std::vector<std::string> row = {std::string(name_of(result.op)), fmt::to_string(report.plan.num_tokens)};
      const auto cells = wire_row(*result.wire);
      row.insert(row.end(), cells.begin(), cells.end());
      row.push_back(two_decimals(result.network_gbps(report.plan.num_ranks)));
      if (network_gbps > 0) {
        const std::optional<std::int64_t> limit_ns = result.wire_limit_ns(network_gbps);
        row.push_back(limit_ns ? format_ns(*limit_ns) : "-");
        row.push_back(two_decimals(result.ratio_to_wire(network_gbps)));
      }
      table.add_row(std::move(row));
    }
  }
  const std::string limit =
      network_gbps > 0 ? fmt::format(", the wire's time that of the most a rank sends at {:.6g} GB/s", network_gbps)
                       : "";
  return fmt::format("\nover the network between {} ({}{}{}); GB/s are those of one rank{}\n{}",
                     describe_nodes(first.plan.num_nodes, first.plan.ranks_per_node()), first.wire.transport.data(),
                     first.wire.route[0] == '\0' ? "" : ": ", first.wire.route.data(), limit, table.to_string());
}

Json microseconds(const std::optional<std::int64_t>& ns) {
  return ns ? Json(static_cast<double>(*ns) / kNsPerUs) : Json(nullptr);
}

Json network_to_json(const BenchReport& report, const OpResult& result) {
  if (!result.wire) return nullptr;
  Json json = to_json(*result.wire);
  json["gbps"] = nullable(result.network_gbps(report.plan.num_ranks));
  const double rate = report.plan.network_gbps;
  json["rate_gbps"] = rate > 0 ? Json(rate) : Json(nullptr);
  json["wire_us"] = microseconds(result.wire_limit_ns(rate));
  json["ratio_to_wire"] = nullable(result.ratio_to_wire(rate));
  return json;
}

/// Adds the results of latency mode.
void add_latency_result(const BenchPlan& plan, const OpResult& result, Json* json) {
  (*json)["quantize"] = name_of(plan.quantize);
  (*json)["order"] = name_of(plan.order);
  (*json)["combine_wire"] = name_of(plan.wire_format);
  (*json)["split"] = plan.split;
  (*json)["late_weights"] = plan.late_weights;
  (*json)["mask_lost_ranks"] = plan.masks_lost_ranks;
  (*json)["send_time_us_p50"] = microseconds(result.send_p50_ns);
  if (plan.on_gpu()) {
    (*json)["graph_time_us_p50"] = microseconds(result.graph_p50_ns);
    (*json)["graph_time_us_p99"] = microseconds(result.graph_p99_ns);
  }
  (*json)["reference_time_us_p50"] = microseconds(result.reference_p50_ns);
  (*json)["ratio_to_reference"] = nullable(result.ratio_to_reference());
}

std::string latency_formulas(const BenchPlan& plan) {
  return fmt::format(
      "logical bytes  rows received by all ranks x bytes of a row; wire bytes: what has to cross between ranks at the\n"
      "               least, a token once to each other rank that owns one of its experts{}\n"
      "vs. calls      time / that of {} of the same batch, in turn with it\n",
      plan.measures_combine() && plan.order == CombineOrder::kExact
          ? ",\n               and every row back: they are added one by one"
          : "",
      name_of(plan.reference_op()));
}

}  // namespace

std::string formulas(const BenchPlan& plan) {
  if (plan.op == BenchOp::kRoute) {
    return plan.on_gpu()
               ? "route: p50 and p99 by the host's clock until it returns (counts known on the host), events\n"
                 "by the stream; it carries counts only, so there are no bytes to compare\n"
               : "route carries counts only: it has a time, and no bytes to compare\n" +
                     (plan.num_nodes > 1 ? nodes_formulas(plan) : "");
  }
  std::string text;
  if (plan.measures_dispatch()) {
    text += fmt::format("dispatch row   {} B = payload {} + scales {} + ids and weights {}\n",
                        plan.dispatch_row_bytes(), plan.payload_bytes(), plan.scale_bytes(), plan.metadata_bytes());
  }
  if (plan.measures_combine()) {
    const std::int64_t sent_bytes = plan.combine_sent_row_bytes();
    text += fmt::format(
        "combine row    {} B, bf16{}{}\n", plan.combine_row_bytes(),
        sent_bytes != plan.combine_row_bytes() ? fmt::format("; quantised to {} B to cross", sent_bytes) : "",
        plan.dtype == BenchDType::kFp8 ? " (expert outputs return as bf16 whatever came out as fp8)" : "");
  }
  text += plan.latency() ? latency_formulas(plan)
                         : "logical bytes  rows received by all ranks x bytes of a row; wire bytes leave out rows from "
                           "the own rank\n";
  if (plan.on_gpu()) return text + gpu_formulas() + (plan.num_nodes > 1 ? nodes_formulas(plan) : "");
  text += "GB/s           bytes / ranks / p50 time; a time is that of an iteration's slowest rank\n";
  if (plan.num_nodes > 1) return text + nodes_formulas(plan);
  return text +
         "limit          all ranks at once memcpy, row by row, the bytes that the operation moves (dispatch: each "
         "token\n"
         "               written once per destination; combine: (rows + T) / 2 rows read and as many written), on the\n"
         "               same buffers, in turn with the operation; ratio = limit's time / operation's time\n";
}

std::string to_text(const std::vector<BenchReport>& reports) {
  std::vector<std::string> header = {"op",   "tokens",       "p50",       "p99",        "logical",
                                     "wire", "GB/s logical", "GB/s wire", "GB/s limit", "ratio"};
  const bool on_gpu = reports.front().plan.on_gpu();
  const bool latency = reports.front().plan.latency();
  if (latency) header.insert(header.end(), {"send half", "vs. calls"});
  if (on_gpu)
    header.insert(header.end(),
                  {"busiest", "SMs", "SM time", "host call", "in a row", latency ? "in a graph" : "events"});
  Table table(std::move(header));
  for (const BenchReport& report : reports) {
    const int num_ranks = report.plan.num_ranks;
    for (const OpResult& result : report.results) {
      std::vector<std::string> row = {std::string(name_of(result.op)),
                                      fmt::to_string(report.plan.num_tokens),
                                      format_ns(result.time_p50_ns),
                                      format_ns(result.time_p99_ns),
                                      format_bytes(static_cast<double>(result.logical_bytes)),
                                      format_bytes(static_cast<double>(result.wire_bytes)),
                                      two_decimals(result.logical_gbps(num_ranks)),
                                      two_decimals(result.wire_gbps(num_ranks)),
                                      two_decimals(result.limit_gbps(num_ranks)),
                                      two_decimals(result.ratio_to_limit())};
      if (latency) {
        row.push_back(result.send_p50_ns ? format_ns(*result.send_p50_ns) : "-");
        row.push_back(two_decimals(result.ratio_to_reference()));
      }
      if (on_gpu) {
        row.push_back(two_decimals(result.ratio_to_busiest_limit()));
        const std::optional<int> num_sms = result.num_sms();
        row.push_back(num_sms ? fmt::to_string(*num_sms) : "-");
        const std::optional<std::int64_t> held_ns = result.held_sm_ns();
        row.push_back(held_ns ? format_ns(*held_ns) : "-");
        const auto& last = latency ? result.graph_p50_ns : result.events_p50_ns;
        for (const auto& ns : {result.host_p50_ns, result.in_row_p50_ns, last}) {
          row.push_back(ns ? format_ns(*ns) : "-");
        }
      }
      table.add_row(std::move(row));
    }
  }
  return table.to_string() + (on_gpu ? limits_to_text(reports) : "") + wire_to_text(reports);
}

Json to_json(const std::vector<BenchReport>& reports, const std::string& launch) {
  const HostFacts host = read_host_facts();
  const BenchPlan& first = reports.front().plan;
  Json json;
  json["command"] = "bench";
  json["version"] = version();
  json["commit"] = commit();
  json["host"] = to_json(host);
  json["run"] = {{"launch", launch},
                 {"iterations", first.num_iterations},
                 {"warmup", first.num_warmup},
                 {"layout", name_of(first.layout)},
                 {"memory", name_of(first.memory)},
                 {"cached", first.cached},
                 {"returns_weights", first.returns_weights},
                 {"verify", first.verify},
                 {"seed", first.seed},
                 {"counts_load", first.counts_load},
                 {"late_us", static_cast<double>(first.late_ns) / kNsPerUs},
                 {"network_route", first.num_nodes > 1 ? Json(reports.front().wire.route.data()) : Json(nullptr)},
                 {"ring_memory", first.num_nodes > 1 ? Json(reports.front().wire.ring_memory.data()) : Json(nullptr)}};
  if (first.on_gpu()) add_gpu_run(reports.front(), &json);
  json["results"] = Json::array();
  for (const BenchReport& report : reports) {
    const BenchPlan& plan = report.plan;
    for (const OpResult& result : report.results) {
      json["results"].push_back({{"op", name_of(result.op)},
                                 {"backend", plan.backend},
                                 {"ranks", plan.num_ranks},
                                 {"nodes", plan.num_nodes},
                                 {"transport", plan.num_nodes > 1 ? Json(report.wire.transport.data()) : Json(nullptr)},
                                 {"tokens", plan.num_tokens},
                                 {"hidden", plan.hidden},
                                 {"topk", plan.num_topk},
                                 {"experts", plan.num_experts},
                                 {"replicas", plan.num_replicas < 0 ? Json(nullptr) : Json(plan.num_replicas)},
                                 {"dtype", dtype_of(plan, result.op)},
                                 {"routing", plan.routing_name},
                                 {"time_us_p50", static_cast<double>(result.time_p50_ns) / kNsPerUs},
                                 {"time_us_p99", static_cast<double>(result.time_p99_ns) / kNsPerUs},
                                 {"logical_bytes", result.logical_bytes},
                                 {"wire_bytes", result.wire_bytes},
                                 {"busiest_rank_bytes", result.busiest_rank_bytes},
                                 {"logical_gbps", nullable(result.logical_gbps(plan.num_ranks))},
                                 {"wire_gbps", nullable(result.wire_gbps(plan.num_ranks))},
                                 {"limit_gbps", nullable(result.limit_gbps(plan.num_ranks))},
                                 {"ratio_to_limit", nullable(result.ratio_to_limit())},
                                 {"network", network_to_json(report, result)},
                                 {"commit", commit()},
                                 {"host", describe(host)}});
      if (plan.latency()) add_latency_result(plan, result, &json["results"].back());
      if (plan.on_gpu()) add_gpu_result(result, &json["results"].back());
    }
  }
  return json;
}

}  // namespace ferry::tools
