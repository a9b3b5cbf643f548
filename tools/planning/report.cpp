#include "planning/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/table.hpp"
#include "report/wire.hpp"

namespace ferry::tools {

namespace {

constexpr double kNsPerMicro = 1000.0;
/// Multiprocessors of the GPUs that Ferry has run on.
constexpr int kUsualSms = 132;

std::string time_text(double us) { return format_ns(std::llround(us * kNsPerMicro)); }

std::string bytes_text(double bytes) { return bytes > 0 ? format_bytes(bytes) : "-"; }

/// "measured", "assumed" or "both", over the rates of a term.
std::string origin_text(const Term& term, const Rates& rates) {
  const auto assumed = std::count_if(term.rates.begin(), term.rates.end(), [&rates](Rate Rates::*rate) {
    return (rates.*rate).origin == RateOrigin::kAssumed;
  });
  if (assumed == 0) return "measured";
  return assumed == static_cast<std::ptrdiff_t>(term.rates.size()) ? "assumed" : "both";
}

Json rate_keys(const Term& term) {
  Json keys = Json::array();
  for (Rate Rates::*rate : term.rates) keys.push_back(key_of(rate));
  return keys;
}

std::string call_name(const CallPlan& call) {
  return call.call == "latency-pair" ? "latency-pair, in a graph" : std::string(call.call);
}

}  // namespace

std::vector<std::string> notes_on(const PlanShape& shape) {
  std::vector<std::string> notes;
  if (shape.num_nodes > 1) {
    notes.emplace_back(
        "no run between hosts has been made: all that concerns the network is arithmetic over runs on one host");
    notes.emplace_back(
        "latency mode over nodes: what its kernels take besides bytes was measured over a stand-in for a card, whose "
        "locks it contains; all else of it is arithmetic");
  }
  if (shape.num_nodes > 1 && shape.rings == PlanRings::kGpu) {
    notes.emplace_back("rings in GPU memory have run over a stand-in for a card only");
  }
  if (shape.num_nodes > kMaxGroupNodes) {
    notes.push_back(
        fmt::format("{} nodes: groups of GPU ranks have at most {} so far", shape.num_nodes, kMaxGroupNodes));
  }
  if (shape.ranks_per_node > kMaxNodeRanks) {
    notes.push_back(fmt::format("{} ranks in a node: groups of GPU ranks have at most {} so far", shape.ranks_per_node,
                                kMaxNodeRanks));
  }
  if (dispatch_sms(shape) > kUsualSms) {
    notes.push_back(
        fmt::format("a call takes {} multiprocessors, two for each other node and one; H100 and H200 have {}",
                    dispatch_sms(shape), kUsualSms));
  }
  if (shape.ranks_per_node > 4) {
    notes.emplace_back("no run with more than 4 GPUs in a node has been made");
  }
  return notes;
}

std::string plan_text(const PlanShape& shape, const Rates& rates, bool with_terms) {
  std::string text = fmt::format("{}, EP{}\n",
                                 shape.num_nodes == 1 ? fmt::format("one node of {} ranks", shape.ranks_per_node)
                                                      : describe_nodes(shape.num_nodes, shape.ranks_per_node),
                                 shape.num_ranks());
  Table table({"call", "time", "limit", "its time", "its rates", "network", "NVLink"});
  const std::vector<CallPlan> calls = plan_calls(shape, rates);
  for (const CallPlan& call : calls) {
    const Term& limit = call.limit();
    table.add_row({call_name(call), time_text(call.time_us()), std::string(limit.name), time_text(limit.us),
                   origin_text(limit, rates), bytes_text(call.network_bytes), bytes_text(call.link_bytes)});
  }
  text += table.to_string();
  if (with_terms) {
    for (const CallPlan& call : calls) {
      text += "\n";
      Table terms({call_name(call), "time", "bytes", "", "rates"});
      for (const Term& term : call.terms) {
        terms.add_row({std::string(term.name), time_text(term.us), bytes_text(term.bytes),
                       term.overlaps ? "overlaps" : "adds", origin_text(term, rates)});
      }
      text += terms.to_string();
    }
  }
  const PlanMemory memory = memory_of(shape);
  text +=
      fmt::format("memory of a GPU about {}: tensors {}, staging {}{}, tables {}{}", format_bytes(memory.gpu_bytes()),
                  bytes_text(memory.tensors), shape.num_nodes > 1 ? "at most " : "", bytes_text(memory.staging),
                  format_bytes(memory.tables), memory.gpu_rings > 0 ? ", rings " + format_bytes(memory.gpu_rings) : "");
  if (memory.host_rings > 0) text += fmt::format("; of its host {} for rings", format_bytes(memory.host_rings));
  text += "\n";
  for (const std::string& note : notes_on(shape)) text += fmt::format("note: {}\n", note);
  return text + "\n";
}

Json plan_json(const PlanShape& shape, const Rates& rates) {
  Json json;
  json["nodes"] = shape.num_nodes;
  json["ranks_per_node"] = shape.ranks_per_node;
  json["ranks"] = shape.num_ranks();
  json["busiest_rank"] = {{"items_sent", shape.load.items_sent},
                          {"items_held", shape.load.items_held},
                          {"rows_received", shape.load.rows_received},
                          {"rows_over_links", shape.load.rows_over_links},
                          {"entries", shape.load.entries}};
  json["calls"] = Json::array();
  for (const CallPlan& call : plan_calls(shape, rates)) {
    Json one = {{"call", call.call},
                {"time_us", call.time_us()},
                {"limit", call.limit().name},
                {"network_bytes", call.network_bytes},
                {"nvlink_bytes", call.link_bytes},
                {"terms", Json::array()}};
    for (const Term& term : call.terms) {
      one["terms"].push_back({{"name", term.name},
                              {"time_us", term.us},
                              {"bytes", term.bytes > 0 ? Json(term.bytes) : Json(nullptr)},
                              {"overlaps", term.overlaps},
                              {"rates", rate_keys(term)}});
    }
    json["calls"].push_back(std::move(one));
  }
  const PlanMemory memory = memory_of(shape);
  json["memory"] = {{"gpu_bytes", memory.gpu_bytes()},    {"tensor_bytes", memory.tensors},
                    {"staging_bytes", memory.staging},    {"table_bytes", memory.tables},
                    {"gpu_ring_bytes", memory.gpu_rings}, {"host_ring_bytes", memory.host_rings}};
  json["notes"] = notes_on(shape);
  return json;
}

std::string rates_text(const std::vector<PlanShape>& shapes, const Rates& rates) {
  std::vector<Rate Rates::*> used;
  for (const PlanShape& shape : shapes) {
    for (const CallPlan& call : plan_calls(shape, rates)) {
      for (const Term& term : call.terms) used.insert(used.end(), term.rates.begin(), term.rates.end());
    }
  }
  std::string text = fmt::format("rates: {}\n", rates.name);
  for (const RateField& field : rate_fields()) {
    if (std::find(used.begin(), used.end(), field.member) == used.end()) continue;
    const Rate& rate = rates.*(field.member);
    text += fmt::format("  {:<20} {:>7.5g} {:<6} {:<8} {}\n", field.key, rate.value, field.unit, name_of(rate.origin),
                        rate.source);
  }
  return text;
}

}  // namespace ferry::tools
