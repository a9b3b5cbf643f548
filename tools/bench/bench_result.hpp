#ifndef FERRY_TOOLS_BENCH_BENCH_RESULT_HPP
#define FERRY_TOOLS_BENCH_BENCH_RESULT_HPP

/// What each rank hands back, and what follows from all of them.

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

/// Series of start and end times that a rank takes, one pair per iteration. On a CUDA group dispatch and combine start
/// at 0 and end at the time between their events, and have two series of what their calls took on the host: one call
/// after a wait, and calls in a row. Those of latency mode use the series of dispatch and combine; a pair of them and
/// the calls they are compared with have their own, and so have what passes until a send half
/// is done and a replayed graph of many pairs (CUDA).
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

/// Rows of one rank. What goes out by dispatch comes back by combine.
struct RankRows {
  std::int64_t num_sent;  ///< own included
  std::int64_t num_sent_remote;
  std::int64_t num_received;  ///< own included
  std::int64_t num_received_remote;
};

/// What crossed the network in one call of each, and which network it is. All zero with one node.
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

/// The same, to be filled.
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

/// One raw exchange, over all ranks.
struct LimitResult {
  LimitMethod method = LimitMethod::kPush;
  int num_sms = 0;
  std::int64_t time_p50_ns = 0;
  double gbps = 0.0;  ///< of one rank
};

/// One operation, over all ranks.
struct OpResult {
  BenchOp op = BenchOp::kRoute;
  std::int64_t time_p50_ns = 0;
  std::int64_t time_p99_ns = 0;
  std::int64_t logical_bytes = 0;  ///< rows received by all ranks, own ones included, times the bytes of a row
  /// The same without rows that stayed on their rank. Latency mode: what has to cross between ranks at the least.
  std::int64_t wire_bytes = 0;
  /// What the rank with most traffic sends to others, or gets from them, whichever is more.
  std::int64_t busiest_rank_bytes = 0;
  std::optional<std::int64_t> busiest_limit_p50_ns;  ///< CUDA: of those bytes at the limit, which no order can beat
  std::optional<std::int64_t> limit_p50_ns;          ///< of the same bytes at the limit; none for route
  bool limit_is_wire = false;                 ///< the limit moves rows between ranks only, so the ratio compares those
  std::optional<std::int64_t> host_p50_ns;    ///< CUDA: what the call took on the host, after a wait
  std::optional<std::int64_t> in_row_p50_ns;  ///< CUDA, if cached: the same of calls in a row, on the slowest rank
  std::optional<std::int64_t> events_p50_ns;  ///< CUDA, route: between events on the stream
  /// Latency mode, split: until the send half returned (CPU), or was done on the stream (CUDA).
  std::optional<std::int64_t> send_p50_ns;
  std::optional<std::int64_t> graph_p50_ns;  ///< latency mode, CUDA: of a pair in a replayed graph of many
  std::optional<std::int64_t> graph_p99_ns;
  std::optional<std::int64_t> reference_p50_ns;  ///< latency mode: of the calls that it is compared with
  std::vector<LimitResult> limits;               ///< CUDA: all raw exchanges; the fastest is the limit
  std::vector<KernelLaunch> kernels;             ///< CUDA: what one call launches on rank 0
  std::optional<WireTotal> wire;                 ///< several nodes: what crossed the network in one call

  /// Gigabytes per second and rank; none where there are no bytes.
  std::optional<double> logical_gbps(int num_ranks) const;
  std::optional<double> wire_gbps(int num_ranks) const;
  std::optional<double> network_gbps(int num_ranks) const;
  std::optional<double> limit_gbps(int num_ranks) const;
  std::optional<double> ratio_to_limit() const;
  /// CUDA: blocks of its largest kernel; none if it launches nothing.
  std::optional<int> num_sms() const;
  /// CUDA: how long it holds multiprocessors, times how many: of the rank that takes longest, which may wait for
  /// others.
  std::optional<std::int64_t> held_sm_ns() const;
  /// How much longer this takes than the calls that it is compared with.
  std::optional<double> ratio_to_reference() const;
  /// Of a skewed routing: the limit would need this share of the operation's time for the busiest rank alone.
  std::optional<double> ratio_to_busiest_limit() const;
};

/// The operations of `plan`, a pair also as a whole, and in latency mode at last what they are compared with. An
/// iteration takes from the first rank's start to the last one's end, and on several hosts, whose clocks differ, as
/// long as its slowest rank.
std::vector<OpResult> summarise(const BenchPlan& plan, const RunOutcome& outcome, std::size_t kernel_idx = 0);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_BENCH_RESULT_HPP
