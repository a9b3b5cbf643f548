#ifndef FERRY_TOOLS_REPORT_WIRE_HPP
#define FERRY_TOOLS_REPORT_WIRE_HPP

/// Bytes between nodes: those that a group reports to have sent, and those expected from the ids alone.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// Traffic of one rank in one call. Plain bytes, for the process that reports.
struct WireFigures {
  std::int64_t sent_bytes;
  std::int64_t max_rail_bytes;  ///< to the rail peer that received most
  std::int64_t num_messages;    ///< puts and notifications
  std::int64_t formula_bytes;   ///< this rank's share of the rows and their metadata; 0: there is no formula

  /// Adds a later call; the maxima are added too.
  WireFigures& operator+=(const WireFigures& other);
};

/// The difference between a group's counters at two times.
class WireMeter {
 public:
  explicit WireMeter(const Group& group) : group_(group), before_(group.network_usage()) {}
  /// Traffic since this meter was created; `formula_bytes` is left 0.
  WireFigures sent() const;

 private:
  const Group& group_;
  NetworkUsage before_;
};

/// Network of a rank. Plain bytes; all texts end with a null character and are empty on one node.
struct WireNames {
  std::array<char, 16> transport;   ///< e.g. "ucx"
  std::array<char, 112> route;      ///< the path to the first rail peer, e.g. "tcp/eth0"
  std::array<char, 8> ring_memory;  ///< NetworkUsage::ring_memory
};
WireNames wire_names(const Group& group);

/// Traffic of one call, over all ranks.
struct WireTotal {
  int num_ranks = 1;
  std::int64_t sent_bytes = 0;
  std::int64_t max_rank_bytes = 0;
  std::int64_t max_rail_bytes = 0;
  std::int64_t num_messages = 0;
  std::int64_t formula_bytes = 0;

  void add(const WireFigures& figures);
  double mean_rank_bytes() const { return static_cast<double>(sent_bytes) / num_ranks; }
  /// Sent bytes relative to the formula; absent if there is no formula or it gives 0.
  std::optional<double> ratio_to_formula() const;
};
/// Sum of two consecutive calls; their maxima are added, even if they were on different ranks.
WireTotal operator+(WireTotal a, const WireTotal& b);

/// "2 nodes of 4 ranks"
std::string describe_nodes(int num_nodes, int ranks_per_node);

/// Columns "sent" to "sent/formula", for a table whose first columns the caller fills.
std::vector<std::string> wire_header();
std::vector<std::string> wire_row(const WireTotal& total);
Json to_json(const WireTotal& total);

/// Parameters that determine the owner of each expert.
struct WireShape {
  int num_ranks = 1;
  int ranks_per_node = 1;
  std::int64_t num_experts = 0;
  int num_topk = 0;
};

/// Sum over a rank's tokens of the number of other nodes that own at least one of the token's experts. This many rows
/// leave the node in a dispatch of this rank's tokens and return in a combine. `topk_idx` [T, K], -1: no expert.
std::int64_t count_rows_to_other_nodes(std::span<const std::int64_t> topk_idx, const WireShape& shape, int rank);

/// Metadata of a row, in multiples of 16 bytes: in a dispatch scales and, if weights are received, K ids (i32) and K
/// weights (f32); for a weighted combine, K weights sent beforehand to the forwarders.
std::int64_t dispatch_record_bytes(std::int64_t scale_bytes, int num_topk, bool weights);
std::int64_t combine_record_bytes(int num_topk, bool weighted);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_WIRE_HPP
