#ifndef FERRY_TOOLS_REPORT_WIRE_HPP
#define FERRY_TOOLS_REPORT_WIRE_HPP

/// Bytes between nodes: what a group reports to have sent, and what follows from the ids alone.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// What one rank gave to the network in one call. Plain bytes, for the process that reports.
struct WireFigures {
  std::int64_t sent_bytes;
  std::int64_t max_rail_bytes;  ///< to the rail peer that got most
  std::int64_t num_messages;    ///< puts and notifications
  std::int64_t formula_bytes;   ///< this rank's share of the rows and their metadata; 0: there is no formula

  /// A later call; its maximum is added too.
  WireFigures& operator+=(const WireFigures& other);
};

/// The difference between a group's counters at two times.
class WireMeter {
 public:
  explicit WireMeter(const Group& group) : group_(group), before_(group.network_usage()) {}
  /// Since this meter was made; `formula_bytes` is left 0.
  WireFigures sent() const;

 private:
  const Group& group_;
  NetworkUsage before_;
};

/// The network of a rank. Plain bytes, both texts end with a null character and are empty with one node.
struct WireNames {
  std::array<char, 16> transport;  ///< e.g. "ucx"
  std::array<char, 112> route;     ///< the path to the first rail peer, e.g. "tcp/eth0"
};
WireNames wire_names(const Group& group);

/// One call, over all ranks.
struct WireTotal {
  int num_ranks = 1;
  std::int64_t sent_bytes = 0;
  std::int64_t max_rank_bytes = 0;
  std::int64_t max_rail_bytes = 0;
  std::int64_t num_messages = 0;
  std::int64_t formula_bytes = 0;

  void add(const WireFigures& figures);
  double mean_rank_bytes() const { return static_cast<double>(sent_bytes) / num_ranks; }
  /// Sent over formula; none where there is no formula or the formula gives 0.
  std::optional<double> ratio_to_formula() const;
};
/// Two calls, one after the other; their maxima are added, whichever ranks they were on.
WireTotal operator+(WireTotal a, const WireTotal& b);

/// "2 nodes of 4 ranks"
std::string describe_nodes(int num_nodes, int ranks_per_node);

/// Columns "sent" to "sent/formula", for a table whose first columns the caller fills.
std::vector<std::string> wire_header();
std::vector<std::string> wire_row(const WireTotal& total);
Json to_json(const WireTotal& total);

/// What decides which rank owns which expert.
struct WireShape {
  int num_ranks = 1;
  int ranks_per_node = 1;
  std::int64_t num_experts = 0;
  int num_topk = 0;
};

/// For each of a rank's tokens, the number of other nodes that own at least one of its experts; summed. That many rows
/// leave the node in a dispatch of this rank's tokens, and come back in a combine. `topk_idx` [T, K], -1: no expert.
std::int64_t count_rows_to_other_nodes(std::span<const std::int64_t> topk_idx, const WireShape& shape, int rank);

/// Metadata of a row: in a dispatch, scales and, where weights are received, K ids (i32) and K weights (f32),
/// in multiples of 16 bytes; for a weighted combine, K weights on the way out.
std::int64_t dispatch_record_bytes(std::int64_t scale_bytes, int num_topk, bool weights);
std::int64_t combine_record_bytes(int num_topk, bool weighted);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_WIRE_HPP
