#ifndef FERRY_TOOLS_BENCH_GPU_TIMER_HPP
#define FERRY_TOOLS_BENCH_GPU_TIMER_HPP

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "bench/bench_result.hpp"
#include "device/device_memory.hpp"
#include "device/rank_device.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

/// Measures the time of a call on a stream; all ranks start it together with cold second-level caches:
///
///   flush | line up | delay until T0 | event | every kernel of the call | event
///
/// The host puts the call on the stream during the delay, so that the time does not include the host's work.
class GpuTimer {
 public:
  struct Call {
    std::function<Status()> enqueue;  ///< puts the measured work on the stream
    std::function<Status()> finish;   ///< waits for the stream and returns the error, if any
    /// The call waits on the host: start by the host's clock, with nothing on the stream before it.
    bool blocks_host = false;
    std::int64_t late_ns = 0;  ///< delay of this rank's start after the other ranks'
    bool has_halves = false;   ///< calls `mark_sent` between its halves
  };
  struct Times {
    Interval host;           ///< from before `enqueue` to after it
    std::int64_t events_ns;  ///< between the events around the call
    std::int64_t sent_ns;    ///< part of events_ns until the send half was done; 0 without halves
  };

  /// `context` and `device` must outlive this.
  Status set_up(RankContext& context, const RankDevice& device);
  /// Collective.
  Result<Times> time(const Call& call) const;
  /// Work put on the stream after this belongs to the receive half of the timed call.
  Status mark_sent() const { return sent_->record(device_->stream()); }
  /// Measures the host time of each of `calls.size()` calls in a row. Not for calls that wait on the host. Collective.
  Status time_in_row(const Call& call, std::span<Interval> calls) const;

 private:
  Status flush() const;

  RankContext* context_ = nullptr;
  const RankDevice* device_ = nullptr;
  DeviceMemory flushed_;
  std::size_t num_flushed_bytes_ = 0;
  std::optional<DeviceEvent> start_;
  std::optional<DeviceEvent> sent_;
  std::optional<DeviceEvent> end_;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_GPU_TIMER_HPP
