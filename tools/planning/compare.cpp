#include "planning/compare.hpp"

#include <fmt/format.h>

#include <optional>
#include <string_view>
#include <utility>

#include "common/read_file.hpp"
#include "planning/load.hpp"

namespace ferry::tools {

namespace {

constexpr std::size_t kMaxReportBytes = std::size_t{16} << 20;
constexpr int kMostComparedRanks = 1 << 16;

/// A member of an object if it has the type of `otherwise`, else `otherwise`.
template <typename T>
T member(const Json& json, const char* key, T otherwise) {
  if (!json.is_object() || !json.contains(key)) return otherwise;
  const Json& value = json.at(key);
  if constexpr (std::is_same_v<T, std::string>) {
    return value.is_string() ? value.get<T>() : otherwise;
  } else if constexpr (std::is_same_v<T, bool>) {
    return value.is_boolean() ? value.get<T>() : otherwise;
  } else {
    return value.is_number() ? value.get<T>() : otherwise;
  }
}

const Json& child(const Json& json, const char* key) {
  static const Json no_value;
  return json.is_object() && json.contains(key) ? json.at(key) : no_value;
}

bool is_fp8_combine(const Json& result) { return member<std::string>(result, "combine_wire", "as-given") == "fp8"; }

/// The shape of a result of `ferry bench`, unless the model has none for it.
std::optional<PlanShape> shape_of(const Json& run, const Json& result) {
  PlanShape shape;
  shape.num_tokens = shape.latency_tokens = member<std::int64_t>(result, "tokens", 0);
  shape.hidden = member<std::int64_t>(result, "hidden", 0);
  shape.num_topk = member<int>(result, "topk", 0);
  shape.num_experts = member<std::int64_t>(result, "experts", 0);
  shape.num_nodes = member<int>(result, "nodes", 0);
  const int num_ranks = member<int>(result, "ranks", 0);
  if (shape.num_tokens < 1 || shape.hidden < 1 || shape.num_topk < 1 || shape.num_experts < 1 || shape.num_nodes < 1 ||
      num_ranks < 2 || num_ranks > kMostComparedRanks) {
    return std::nullopt;
  }
  shape.ranks_per_node = num_ranks / shape.num_nodes;
  const std::string quantize = member<std::string>(result, "quantize", "none");
  if (member<std::string>(result, "dtype", "") == "fp8" || quantize.starts_with("fp8")) shape.dtype = PlanDType::kFp8;
  if (member<std::string>(result, "order", "") == "rank_sums") shape.order = CombineOrder::kRankSums;
  shape.fp8_sums = is_fp8_combine(result) && shape.order == CombineOrder::kRankSums;
  shape.plain = member<std::string>(run, "memory", "") == "plain";
  if (member<std::string>(run, "ring_memory", "") == "gpu") shape.rings = PlanRings::kGpu;
  shape.num_sms = member<int>(child(run, "kernel_options"), "num_sms", 0);
  if (!check(shape)) return std::nullopt;
  const auto routing = member<std::string>(result, "routing", "random");
  if (routing.starts_with("trace:")) return std::nullopt;  // a file of another machine
  const Result<PlanLoad> load = busiest_load(shape, routing, member<std::uint64_t>(run, "seed", 1));
  if (!load) return std::nullopt;
  shape.load = *load;
  return shape;
}

std::string name_of(const std::string& op, const PlanShape& shape, const std::string& more) {
  return fmt::format("{} {}, {} x {} ranks, T = {}, H = {}, K = {}{}{}", op,
                     shape.dtype == PlanDType::kFp8 ? "fp8" : "bf16", shape.num_nodes, shape.ranks_per_node,
                     shape.num_tokens, shape.hidden, shape.num_topk, shape.plain ? ", plain" : "", more);
}

void compare_result(const Json& run, const Json& result, const Rates& rates, std::vector<PlanComparison>* all) {
  const auto shape = shape_of(run, result);
  if (!shape || member<double>(run, "late_us", 0) > 0 || member<bool>(result, "split", false)) return;
  if (is_fp8_combine(result) && !shape->fp8_sums) return;  // outside latency mode
  const Json& kernels = child(run, "kernel_options");
  if (member<std::string>(kernels, "copy_path", "auto") != "auto" || member<int>(kernels, "chunk_tokens", 0) > 0)
    return;
  const auto op = member<std::string>(result, "op", "");
  const auto routing = member<std::string>(result, "routing", "random");
  const std::string name = name_of(op, *shape, routing == "random" ? "" : ", " + routing);
  const auto add = [all](const std::string& call, const char* unit, double measured, double predicted) {
    if (measured > 0) all->push_back({call, unit, measured, predicted});
  };
  const double p50 = member<double>(result, "time_us_p50", 0);
  const bool by_token = member<std::string>(run, "layout", "") == "tokens";
  const bool on_gpu = member<std::string>(result, "backend", "") == "cuda";
  if (on_gpu && op == "latency-pair") {
    const double pair = plan_latency_pair(*shape, rates).time_us();
    add(name + ", in a graph", "us", member<double>(result, "graph_time_us_p50", 0), pair);
    add(name + ", called", "us", p50, pair + rates.latency_host_us.value);
  }
  if (on_gpu && op == "route" && by_token) {
    add(name, "us", member<double>(result, "events_time_us_p50", 0), plan_route(*shape, rates).time_us());
  }
  if (!by_token || (op != "dispatch" && op != "combine")) return;
  const CallPlan call = op == "dispatch" ? plan_dispatch(*shape, rates) : plan_combine(*shape, rates);
  if (on_gpu) add(name, "us", p50, call.time_us());
  if (routing != "random") return;  // the mean over ranks is known, not that of the busiest
  add(name, "bytes", member<double>(child(result, "network"), "sent_bytes_per_rank_mean", 0), call.network_bytes);
}

/// A network of benchmarks/nodes.py: the link that a copy is held to, or what `ucx_perftest` reaches there.
void compare_network(const Json& run, const Json& result, const Rates& rates, std::vector<PlanComparison>* all) {
  constexpr double kGbitOfBothWays = 4.0;  // GB/s of both directions together to Gbit/s of one
  Rates own = rates;
  const double link = member<double>(result, "link_gbps", 0);
  const double puts = member<double>(child(child(result, "puts"), "chunks_one_pair_each_way"), "gbps", 0);
  if (link <= 0 && puts <= 0) return;
  own.network_gbit = {(link > 0 ? link : puts) * kGbitOfBothWays, RateOrigin::kMeasured, "the same run"};
  if (link <= 0) own.network_share.value = 1;
  const std::string network = link > 0 ? fmt::format(", a copy at {} Gbit/s", link * kGbitOfBothWays)
                                       : ", " + member<std::string>(result, "transport", "?");
  const Json& calls = child(result, "calls");
  for (const char* op : {"dispatch", "combine"}) {
    for (const char* dtype : {"bf16", "fp8"}) {
      const Json& measured = child(calls, fmt::format("{}_{}", op, dtype).c_str());
      if (!measured.is_object()) continue;
      Json as_result = run;
      as_result["dtype"] = dtype;
      const auto shape = shape_of(run, as_result);
      if (!shape) continue;
      const bool is_dispatch = op == std::string_view("dispatch");
      const CallPlan call = is_dispatch ? plan_dispatch(*shape, own) : plan_combine(*shape, own);
      const std::string name = name_of(op, *shape, network);
      const double sent = member<double>(measured, "sent_bytes", 0) / shape->num_ranks();
      all->push_back({name, "us", member<double>(measured, "time_us_p50", 0), call.time_us()});
      all->push_back({name, "bytes", sent, call.network_bytes});
    }
  }
}

}  // namespace

std::vector<PlanComparison> compare(const Json& report, const Rates& rates) {
  std::vector<PlanComparison> all;
  const Json& run = child(report, "run");
  const bool of_networks = member<std::string>(report, "command", "") == "nodes";
  for (const Json& result : child(report, "results")) {
    if (of_networks) {
      compare_network(run, result, rates, &all);
    } else {
      compare_result(run, result, rates, &all);
    }
  }
  return all;
}

std::string rates_for(const Json& report) {
  const auto gpu = member<std::string>(child(report, "gpu"), "name", "");
  if (gpu.find("H100") != std::string::npos) return "h100";
  return gpu.find("H200") != std::string::npos ? "h200" : "";
}

Result<Json> read_report(const std::string& path) {
  auto text = read_file(path, "the report", kMaxReportBytes);
  if (!text) return text.status();
  Result<Json> report = parse_json(*text);
  if (!report) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("--compare {}: {}", path, report.status().message()));
  }
  const auto command = member<std::string>(*report, "command", "");
  if ((command == "bench" || command == "nodes") && child(*report, "results").is_array()) return report;
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format("--compare {}: expected a report of ferry bench --json or benchmarks/nodes.py --json, whose "
                  "\"command\" is \"bench\" or \"nodes\" and which has \"results\"",
                  path));
}

}  // namespace ferry::tools
