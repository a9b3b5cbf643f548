#include "bench/gpu_timer.hpp"

#include <algorithm>
#include <utility>

#include "common/timing.hpp"
#include "device/device_facts.hpp"

namespace ferry::tools {

namespace {

/// Time from the last rank's arrival to the common start: longer than any rank needs to wake and to put a call of
/// several kernels on its stream (tens of microseconds each).
constexpr std::int64_t kStartDelayNs = 400'000;
/// Bytes written before every timed call, as a multiple of the second-level cache's size.
constexpr std::int64_t kFlushFactor = 2;
/// Number of calls put on a stream between waits: a stream takes about a thousand launches before it blocks the host.
constexpr std::size_t kCallsInRow = 64;

}  // namespace

Status GpuTimer::set_up(RankContext& context, const RankDevice& device) {
  context_ = &context;
  device_ = &device;
  auto facts = read_device_facts(device.ordinal());
  if (!facts) return facts.status();
  num_flushed_bytes_ = static_cast<std::size_t>(kFlushFactor * facts->l2_bytes);
  auto memory = allocate_device_memory(num_flushed_bytes_ + 1);
  if (!memory) return memory.status();
  flushed_ = std::move(*memory);
  auto start = DeviceEvent::create();
  if (!start) return start.status();
  start_ = std::move(*start);
  auto sent = DeviceEvent::create();
  if (!sent) return sent.status();
  sent_ = std::move(*sent);
  auto end = DeviceEvent::create();
  if (!end) return end.status();
  end_ = std::move(*end);
  return {};
}

Status GpuTimer::flush() const {
  if (Status status = fill_device_bytes(flushed_.get(), 0, num_flushed_bytes_, device_->stream()); !status) {
    return status;
  }
  return device_->wait();
}

Result<GpuTimer::Times> GpuTimer::time(const Call& call) const {
  if (Status status = flush(); !status) return status;
  auto lined_up_ns = context_->line_up();
  if (!lined_up_ns) return lined_up_ns.status();
  const std::int64_t start_ns = *lined_up_ns + kStartDelayNs + call.late_ns;
  if (call.blocks_host) {
    while (now_ns() < start_ns) {  // too short to sleep
    }
  } else if (const std::int64_t left_ns = start_ns - now_ns(); left_ns > 0) {
    if (Status status = delay_stream(device_->stream(), left_ns); !status) return status;
  }
  Times times{};
  if (Status status = start_->record(device_->stream()); !status) return status;
  times.host.start_ns = now_ns();
  if (Status status = call.enqueue(); !status) return status;
  times.host.end_ns = now_ns();
  if (Status status = end_->record(device_->stream()); !status) return status;
  if (Status status = call.finish(); !status) return status;
  auto elapsed_ns = end_->elapsed_ns_since(*start_);
  if (!elapsed_ns) return elapsed_ns.status();
  times.events_ns = *elapsed_ns;
  if (!call.has_halves) return times;
  auto sent_ns = sent_->elapsed_ns_since(*start_);
  if (!sent_ns) return sent_ns.status();
  times.sent_ns = *sent_ns;
  return times;
}

Status GpuTimer::time_in_row(const Call& call, std::span<Interval> calls) const {
  for (std::size_t first = 0; first < calls.size(); first += kCallsInRow) {
    if (auto lined_up_ns = context_->line_up(); !lined_up_ns) return lined_up_ns.status();
    for (Interval& interval : calls.subspan(first, std::min(kCallsInRow, calls.size() - first))) {
      interval.start_ns = now_ns();
      if (Status status = call.enqueue(); !status) return status;
      interval.end_ns = now_ns();
    }
    if (Status status = call.finish(); !status) return status;
  }
  return {};
}

}  // namespace ferry::tools
