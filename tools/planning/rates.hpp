#ifndef FERRY_TOOLS_PLANNING_RATES_HPP
#define FERRY_TOOLS_PLANNING_RATES_HPP

/// Rates of a machine, each with its origin: everything in a prediction that is not counted from the shape.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "ferry/status.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

enum class RateOrigin {
  kMeasured = 0,  ///< `source` names the run
  kAssumed = 1,   ///< from a data sheet, or a guess; `source` says which
};

struct Rate {
  double value = 0;
  RateOrigin origin = RateOrigin::kAssumed;
  std::string source;
};

struct Rates {
  std::string name;  ///< of the preset, or the path of the file
  std::string base;  ///< the preset whose rates hold where a file has none
  // One node:
  Rate nvlink_push_gbps;
  Rate nvlink_pull_gbps;
  Rate sm_copy_gbps;
  Rate sm_sum_gbps;
  Rate hbm_gbps;
  Rate dispatch_us;
  Rate combine_us;
  Rate plain_dispatch_us;
  Rate plain_dispatch_gbps;
  Rate plain_combine_us;
  Rate route_counts_us;
  Rate route_tables_us;
  Rate route_entry_ns;
  // Latency mode:
  Rate latency_dispatch_us;
  Rate latency_combine_us;
  Rate latency_flags_us;
  Rate latency_gbps;
  Rate latency_host_us;
  // Several nodes:
  Rate network_gbit;
  Rate network_share;
  Rate network_us;
  Rate ring_gbps;
  Rate ring_chunk_us;
  Rate host_memory_gbps;
  Rate proxy_chunk_us;
  Rate node_dispatch_us;
  Rate node_combine_us;
  Rate near_dispatch_us;
  Rate near_combine_us;
  Rate node_route_us;
  // Latency mode over several nodes:
  Rate far_dispatch_us;
  Rate far_combine_us;
  Rate far_word_us;
  Rate far_message_us;
  Rate far_many_us;
};

/// One of the rates, as files and reports name it.
struct RateField {
  std::string_view key;
  std::string_view unit;
  std::string_view meaning;
  Rate Rates::*member;
};

/// All rates, in the order of reports.
std::span<const RateField> rate_fields();

/// Key of a rate.
std::string_view key_of(Rate Rates::*member);

std::string_view name_of(RateOrigin origin);

/// Built-in rates if `name` is "h100" or "h200", else those of the JSON file at that path (docs/plan.md).
/// @errors kInvalidArgument naming the file, the key, what it has and what was expected; kSystem: cannot be read
Result<Rates> find_rates(const std::string& name);

/// The form of rates files, with every rate.
Json to_json(const Rates& rates);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_PLANNING_RATES_HPP
