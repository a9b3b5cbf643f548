#ifndef FERRY_TOOLS_BENCH_BENCH_RESULT_HPP
#define FERRY_TOOLS_BENCH_BENCH_RESULT_HPP

/// Results of each rank, and the figures computed from all of them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bench/bench_plan.hpp"
#include "bench/device_report.hpp"
#include "report/wire.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

/// Series of start and end times that a rank records, one pair per iteration. On a CUDA group dispatch and combine
/// start at 0 and end at the time between their events, and have two series of their calls' host times: a call after a
/// wait, and calls in a row. Calls of latency mode use the series of dispatch and combine. These have series of their
/// own: a pair of calls of latency mode, their reference calls, the time until a send half is done, and a replayed
/// graph of many pairs (CUDA).
enum class Series {
  kRoute = 0,
  kDispatch,
  kDispatchLimit,
  kCombine,
  kCombineLimit,
  kRouteEvents,
  kDispatchHost,
  kCombineHost,
  kDispatchInRow,
  kCombineInRow,
  kPair,
  kPairHost,
  kPairInRow,
  kReference,
  kReferenceHost,
  kDispatchSend,
  kCombineSend,
  kPairInGraph
};
inline constexpr std::size_t kNumSeries = 18;

struct Interval {
  std::int64_t start_ns;
  std::int64_t end_ns;
};

/// Rows of one rank. Every dispatched row returns by combine.
struct RankRows {
  std::int64_t num_sent;  ///< including rows to itself
  std::int64_t num_sent_remote;
  std::int64_t num_received;  ///< including rows from itself
  std::int64_t num_received_remote;
};

/// Network traffic of one call of each kind, and the network's name. All zero on one node.
struct RankWire {
  WireFigures route;
  WireFigures dispatch;
  WireFigures combine;
  WireNames names;
};

/// A rank's result area: [ rows | wire | device | series by kernel options, kind and iteration ].
class BenchArea {
 public:
  static std::size_t size_bytes(const BenchPlan& plan);
  BenchArea(const BenchPlan& plan, std::span<const std::byte> bytes) : plan_(plan), bytes_(bytes) {}
  const RankRows& rows() const { return *reinterpret_cast<const RankRows*>(bytes_.data()); }
  const RankWire& wire() const;
  const DeviceReport& device() const;
  std::span<const Interval> series(Series which, std::size_t kernel_idx = 0) const;

 private:
  const BenchPlan& plan_;
  std::span<const std::byte> bytes_;
};

/// Writable view of the same area.
class MutableBenchArea {
 public:
  MutableBenchArea(const BenchPlan& plan, std::span<std::byte> bytes) : plan_(plan), bytes_(bytes) {}
  RankRows& rows() { return *reinterpret_cast<RankRows*>(bytes_.data()); }
  RankWire& wire();
  DeviceReport& device();
  std::span<Interval> series(Series which, std::size_t kernel_idx = 0);

 private:
  const BenchPlan& plan_;
  std::span<std::byte> bytes_;
};

/// Result of one raw exchange, over all ranks.
struct LimitResult {
  LimitMethod method = LimitMethod::kPush;
  int num_sms = 0;
  std::int64_t time_p50_ns = 0;
  double gbps = 0.0;  ///< per rank
};

/// Result of one operation, over all ranks.
struct OpResult {
  BenchOp op = BenchOp::kRoute;
  std::int64_t time_p50_ns = 0;
  std::int64_t time_p99_ns = 0;
  std::int64_t logical_bytes = 0;  ///< rows received by all ranks, their own included, times the bytes of a row
  /// Same, without rows that stayed on their rank. Latency mode: the minimum that must cross between ranks.
  std::int64_t wire_bytes = 0;
  /// Bytes that the busiest rank sends to others or receives from them, whichever is more.
  std::int64_t busiest_rank_bytes = 0;
  std::optional<std::int64_t> busiest_limit_p50_ns;  ///< CUDA: time of these bytes at the limit, a lower bound
  std::optional<std::int64_t> limit_p50_ns;          ///< time of the compared bytes at the limit; absent for route
  bool limit_is_wire = false;                 ///< the limit moves rows between ranks only, so the ratio compares those
  std::optional<std::int64_t> host_p50_ns;    ///< CUDA: host time of the call, after a wait
  std::optional<std::int64_t> in_row_p50_ns;  ///< CUDA, if cached: host time of calls in a row, on the slowest rank
  std::optional<std::int64_t> events_p50_ns;  ///< CUDA, route: time between events on the stream
  /// Latency mode, split: time until the send half returned (CPU) or was done on the stream (CUDA).
  std::optional<std::int64_t> send_p50_ns;
  std::optional<std::int64_t> graph_p50_ns;  ///< latency mode, CUDA: time of a pair in a replayed graph of many
  std::optional<std::int64_t> graph_p99_ns;
  std::optional<std::int64_t> reference_p50_ns;  ///< latency mode: time of the reference calls
  std::vector<LimitResult> limits;               ///< CUDA: all raw exchanges; the fastest is the limit
  std::vector<KernelLaunch> kernels;             ///< CUDA: kernels of one call on rank 0
  std::optional<WireTotal> wire;                 ///< several nodes: network traffic of one call

  /// Gigabytes per second and rank; absent without bytes.
  std::optional<double> logical_gbps(int num_ranks) const;
  std::optional<double> wire_gbps(int num_ranks) const;
  std::optional<double> network_gbps(int num_ranks) const;
  /// Time in which a network of this rate carries what the rank that sends most sends; absent without a rate, and on
  /// one node.
  std::optional<std::int64_t> wire_limit_ns(double network_gbps) const;
  /// That time over the operation's.
  std::optional<double> ratio_to_wire(double network_gbps) const;
  std::optional<double> limit_gbps(int num_ranks) const;
  std::optional<double> ratio_to_limit() const;
  /// CUDA: blocks of the call's largest kernel; absent if it launches none.
  std::optional<int> num_sms() const;
  /// CUDA: multiprocessors times the time for which the call holds them, on the slowest rank, which may wait for
  /// others.
  std::optional<std::int64_t> held_sm_ns() const;
  /// Time relative to that of the reference calls.
  std::optional<double> ratio_to_reference() const;
  /// Skewed routing: share of the operation's time that the limit would need for the busiest rank alone.
  std::optional<double> ratio_to_busiest_limit() const;
};

/// Results of the operations of `plan`, also of a pair as a whole, and in latency mode, at the end, of the reference
/// calls. An iteration lasts from the first rank's start to the last rank's end; on several hosts, whose clocks differ,
/// as long as its slowest rank.
std::vector<OpResult> summarise(const BenchPlan& plan, const RunOutcome& outcome, std::size_t kernel_idx = 0);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_BENCH_RESULT_HPP
