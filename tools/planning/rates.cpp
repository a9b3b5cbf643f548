#include "planning/rates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>

#include "common/read_file.hpp"
#include "planning/rate_presets.hpp"

namespace ferry::tools {

namespace {

constexpr int kRatesVersion = 1;
constexpr std::size_t kMaxRatesBytes = std::size_t{1} << 20;
constexpr const char* kVersionKey = "ferry_rates";
/// More than any machine's rate in any of the units.
constexpr double kMaxRate = 1e9;

constexpr std::array<RateField, 35> kFields = {{
    {"nvlink_push_gbps", "GB/s", "NVLink each way, rows that dispatch stores", &Rates::nvlink_push_gbps},
    {"nvlink_pull_gbps", "GB/s", "NVLink each way, rows that combine loads", &Rates::nvlink_pull_gbps},
    {"sm_copy_gbps", "GB/s", "rows that one multiprocessor copies", &Rates::sm_copy_gbps},
    {"sm_sum_gbps", "GB/s", "rows that one multiprocessor adds up", &Rates::sm_sum_gbps},
    {"hbm_gbps", "GB/s", "GPU memory, reads and writes together", &Rates::hbm_gbps},
    {"dispatch_us", "us", "a dispatch besides its bytes", &Rates::dispatch_us},
    {"combine_us", "us", "a combine besides its bytes", &Rates::combine_us},
    {"plain_dispatch_us", "us", "more of a dispatch of plain memory, besides copies", &Rates::plain_dispatch_us},
    {"plain_dispatch_gbps", "GB/s", "copies out of staging that a plain dispatch does not hide",
     &Rates::plain_dispatch_gbps},
    {"plain_combine_us", "us", "more of a combine of plain memory", &Rates::plain_combine_us},
    {"route_counts_us", "us", "a route until the host knows the counts", &Rates::route_counts_us},
    {"route_tables_us", "us", "from then until the tables are written", &Rates::route_tables_us},
    {"route_entry_ns", "ns", "each (token, expert) of a route", &Rates::route_entry_ns},
    {"latency_dispatch_us", "us", "a dispatch of latency mode besides its bytes", &Rates::latency_dispatch_us},
    {"latency_combine_us", "us", "a combine of latency mode besides its bytes", &Rates::latency_combine_us},
    {"latency_flags_us", "us", "a fence and flags behind the sums of a combine", &Rates::latency_flags_us},
    {"latency_gbps", "GB/s", "bytes of latency mode over NVLink, each way", &Rates::latency_gbps},
    {"latency_host_us", "us", "more of a pair that is called than of one in a graph", &Rates::latency_host_us},
    {"network_gbit", "Gbit/s", "network of a GPU each way", &Rates::network_gbit},
    {"network_share", "", "share of the network that rings reach", &Rates::network_share},
    {"network_us", "us", "network, one way, with the notification", &Rates::network_us},
    {"ring_gbps", "GB/s", "kernels at rings in host memory, each way, besides ring_chunk_us", &Rates::ring_gbps},
    {"ring_chunk_us", "us", "a chunk at the kernels of rings in host memory", &Rates::ring_chunk_us},
    {"host_memory_gbps", "GB/s", "memory of a host, reads and writes together", &Rates::host_memory_gbps},
    {"proxy_chunk_us", "us", "a chunk at a rank's proxy", &Rates::proxy_chunk_us},
    {"node_dispatch_us", "us", "more of a dispatch of one token over several nodes", &Rates::node_dispatch_us},
    {"node_combine_us", "us", "more of a combine of one token over several nodes", &Rates::node_combine_us},
    {"near_dispatch_us", "us", "more of a dispatch over several nodes of several ranks", &Rates::near_dispatch_us},
    {"near_combine_us", "us", "more of a combine over several nodes of several ranks", &Rates::near_combine_us},
    {"node_route_us", "us", "more of a route over several nodes", &Rates::node_route_us},
    {"far_dispatch_us", "us", "kernels for far ranks in a dispatch of few tokens of latency mode",
     &Rates::far_dispatch_us},
    {"far_combine_us", "us", "kernels for far ranks in a combine of few tokens of latency mode",
     &Rates::far_combine_us},
    {"far_word_us", "us", "until a word in host memory is seen at the other side of PCIe", &Rates::far_word_us},
    {"far_message_us", "us", "a message at the thread that drives a rank's network", &Rates::far_message_us},
    {"far_many_us", "us", "more of kernels for far ranks in a call of many tokens or ranks", &Rates::far_many_us},
}};

Status refuse(const std::string& path, const std::string& what) {
  return {ErrorCode::kInvalidArgument, fmt::format("the rates in {}: {}", path, what)};
}

std::string known_keys() {
  std::string keys;
  for (const RateField& field : kFields) keys += (keys.empty() ? "" : ", ") + std::string(field.key);
  return keys;
}

Result<Rate> read_rate(const std::string& path, const std::string& key, const Json& json) {
  constexpr const char* kForm = R"({"value": a number above 0, "origin": "measured" or "assumed", "source": a text})";
  const auto refuse_rate = [&](const std::string& observed) {
    return refuse(path, fmt::format("\"{}\" {}; expected {}", key, observed, kForm));
  };
  if (!json.is_object()) return refuse_rate(fmt::format("is {}", json.dump()));
  const Json value = json.value("value", Json());
  if (!value.is_number()) return refuse_rate(fmt::format("has the value {}", value.dump()));
  Rate rate;
  rate.value = value.get<double>();
  if (!std::isfinite(rate.value) || rate.value <= 0 || rate.value > kMaxRate) {
    return refuse_rate(fmt::format("has the value {}", value.dump()));
  }
  if (key == "network_share" && rate.value > 1) {
    return refuse(path, fmt::format("\"network_share\" is {}; expected a share from above 0 to 1", value.dump()));
  }
  const Json origin = json.value("origin", Json());
  if (origin != "measured" && origin != "assumed") return refuse_rate(fmt::format("has the origin {}", origin.dump()));
  rate.origin = origin == "measured" ? RateOrigin::kMeasured : RateOrigin::kAssumed;
  const Json source = json.value("source", Json());
  if (!source.is_string() || source.get<std::string>().empty()) {
    return refuse_rate(fmt::format("has the source {}", source.dump()));
  }
  rate.source = source.get<std::string>();
  return rate;
}

Result<Rates> read_rates(const std::string& path) {
  auto text = read_file(path, "the rates", kMaxRatesBytes);
  if (!text) return text.status();
  Result<Json> parsed = parse_json(*text);
  if (!parsed) return refuse(path, std::string(parsed.status().message()));
  const Json file = *std::move(parsed);
  if (!file.is_object()) return refuse(path, fmt::format("the file holds {}; expected an object", file.type_name()));
  if (file.value(kVersionKey, Json()) != kRatesVersion) {
    return refuse(path, fmt::format("\"{}\" is {}; expected {}", kVersionKey, file.value(kVersionKey, Json()).dump(),
                                    kRatesVersion));
  }
  const Json base = file.value("base", Json());
  std::optional<Rates> rates = preset_rates(base.is_string() ? base.get<std::string>() : "");
  if (!rates) {
    return refuse(path, fmt::format("\"base\" is {}; expected h100 or h200, whose rates hold where the file has none",
                                    base.dump()));
  }
  const Json given = file.value("rates", Json());
  if (!given.is_object()) return refuse(path, fmt::format("\"rates\" is {}; expected an object", given.dump()));
  rates->name = path;
  for (const auto& [key, value] : given.items()) {
    const std::string name = key;
    const auto* const field =
        std::find_if(kFields.begin(), kFields.end(), [&name](const RateField& known) { return known.key == name; });
    if (field == kFields.end()) {
      return refuse(path, fmt::format("\"{}\" is no rate; expected one of {}", name, known_keys()));
    }
    Result<Rate> rate = read_rate(path, name, value);
    if (!rate) return rate.status();
    (*rates).*(field->member) = std::move(*rate);
  }
  return std::move(*rates);
}

}  // namespace

std::span<const RateField> rate_fields() { return kFields; }

std::string_view key_of(Rate Rates::*member) {
  for (const RateField& field : kFields) {
    if (field.member == member) return field.key;
  }
  return "?";
}

std::string_view name_of(RateOrigin origin) { return origin == RateOrigin::kMeasured ? "measured" : "assumed"; }

Result<Rates> find_rates(const std::string& name) {
  if (std::optional<Rates> preset = preset_rates(name)) return std::move(*preset);
  return read_rates(name);
}

Json to_json(const Rates& rates) {
  Json json;
  json[kVersionKey] = kRatesVersion;
  json["base"] = rates.base;
  for (const RateField& field : kFields) {
    const Rate& rate = rates.*(field.member);
    json["rates"][std::string(field.key)] = {{"value", rate.value},
                                             {"unit", field.unit},
                                             {"meaning", field.meaning},
                                             {"origin", name_of(rate.origin)},
                                             {"source", rate.source}};
  }
  return json;
}

}  // namespace ferry::tools
