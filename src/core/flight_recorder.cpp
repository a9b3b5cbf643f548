#include "core/flight_recorder.hpp"

#include <time.h>

#include <algorithm>
#include <limits>

#include "core/process_identity.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry {
namespace {

std::int64_t now_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * kNsPerSecond + now.tv_nsec;
}

/// CLOCK_MONOTONIC as of the system's last tick. Reading it takes a fifth of the time of the exact clock on the
/// machine of docs/experiments-cpu.md, and what a record is read for lasts longer than a tick.
std::int64_t tick_ns() { return now_ns(CLOCK_MONOTONIC_COARSE); }

template <typename Narrow>
Narrow clamp_to(std::int64_t value) {
  return static_cast<Narrow>(
      std::clamp<std::int64_t>(value, std::numeric_limits<Narrow>::min(), std::numeric_limits<Narrow>::max()));
}

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

void FlightRecorder::open(const RecordOwner& owner) {
  const ProcessIdentity process = this_process();
  record_->rank = owner.rank;
  record_->num_ranks = owner.num_ranks;
  record_->ranks_per_node = owner.ranks_per_node;
  record_->timeout_ns = owner.timeout_ns;
  record_->created_ns = now_ns(CLOCK_MONOTONIC);
  record_->created_wall_ns = now_ns(CLOCK_REALTIME);
  record_->pid = process.pid;
  record_->pid_namespace = process.pid_namespace;
  record_->start_time_ticks = process.start_time_ticks;
  record_->group_id.store(owner.group_id, std::memory_order_release);
}

void FlightRecorder::begin(RecordedOperation operation) {
  in_call_ = true;
  num_waits_ = 0;
  if (is_collective(operation)) ++num_calls_;
  FlightEntry& mine = entry();
  mine.sequence.store(0, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  mine.number.store(num_calls_, kRelaxed);
  mine.num_tokens.store(-1, kRelaxed);
  mine.called_ns.store(tick_ns(), kRelaxed);
  mine.ended_ns.store(0, kRelaxed);
  mine.row_bytes.store(0, kRelaxed);
  mine.peer.store(-1, kRelaxed);
  mine.num_topk.store(-1, kRelaxed);
  mine.operation.store(static_cast<std::uint8_t>(operation), kRelaxed);
  mine.phase.store(static_cast<std::uint8_t>(CallPhase::kCalled), kRelaxed);
  mine.dtype.store(0, kRelaxed);
  mine.code.store(0, kRelaxed);
  mine.sequence.store(num_entries_ + 1, std::memory_order_release);
  record_->num_calls.store(num_entries_ + 1, std::memory_order_release);
}

void FlightRecorder::describe(const RecordedShape& shape) {
  if (!in_call_) return;
  FlightEntry& mine = entry();
  mine.num_tokens.store(shape.num_tokens, kRelaxed);
  mine.num_topk.store(clamp_to<std::int16_t>(shape.num_topk), kRelaxed);
  mine.row_bytes.store(clamp_to<std::int32_t>(shape.row_bytes), kRelaxed);
  mine.dtype.store(static_cast<std::uint8_t>(shape.dtype), kRelaxed);
}

void FlightRecorder::end(const Status& status, CallPhase done) {
  if (!in_call_) return;
  FlightEntry& mine = entry();
  mine.ended_ns.store(tick_ns(), kRelaxed);
  if (!status.ok()) {
    mine.code.store(static_cast<std::uint8_t>(status.code()), kRelaxed);
    mine.peer.store(status.peer(), kRelaxed);
  }
  reach(status.ok() ? done : CallPhase::kFailed);
  in_call_ = false;
  ++num_entries_;
}

void FlightRecorder::show_wait(std::size_t which, std::span<const int> missing, std::string_view reason,
                               std::int64_t since_ns) {
  FlightWait& wait = record_->waits[which];
  const std::uint64_t before = wait.sequence.load(kRelaxed);
  wait.sequence.store(before + 1, kRelaxed);
  std::atomic_thread_fence(std::memory_order_release);
  wait.num_missing.store(static_cast<std::int32_t>(missing.size()), kRelaxed);
  for (std::size_t i = 0; i < std::min(missing.size(), kNumRecordedPeers); ++i) {
    wait.ranks[i].store(missing[i], kRelaxed);
  }
  wait.step.store(which == kHostWait ? num_waits_ : 0, kRelaxed);
  wait.since_ns.store(since_ns, kRelaxed);
  std::array<std::uint64_t, kWaitReasonWords> words{};
  reason.copy(reinterpret_cast<char*>(words.data()), sizeof(words));
  for (std::size_t i = 0; i < words.size(); ++i) wait.reason[i].store(words[i], kRelaxed);
  wait.sequence.store(before + 2, std::memory_order_release);
}

void FlightRecorder::end_wait(std::size_t which) {
  FlightWait& wait = record_->waits[which];
  if (wait.num_missing.load(kRelaxed) != 0) show_wait(which, {}, {}, 0);
}

}  // namespace ferry
