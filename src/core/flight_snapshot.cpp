#include "core/flight_snapshot.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <system_error>

#include "core/process_identity.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry {
namespace {

using std::memory_order_relaxed;
/// Tries to read a wait that its writer rewrites meanwhile.
constexpr int kNumTries = 16;

std::string_view to_string(RecordedOperation operation) {
  switch (operation) {
    case RecordedOperation::kLatencyReceive:
      return "latency_receive";
    case RecordedOperation::kWait:
      return "wait";
    default:
      return to_string(static_cast<Operation>(operation));
  }
}

/// `value` as an enumerator, `other` if it is none.
template <typename Enum>
Enum enumerator_of(std::uint8_t value, Enum last, Enum other) {
  return value <= static_cast<std::uint8_t>(last) ? static_cast<Enum>(value) : other;
}

std::optional<RecordedCall> read_call(const FlightRecord& record, std::uint64_t number) {
  const FlightEntry& entry = record.calls[(number - 1) % kNumRecordedCalls];
  if (entry.sequence.load(std::memory_order_acquire) != number) return std::nullopt;
  RecordedCall call;
  call.phase = enumerator_of(entry.phase.load(std::memory_order_acquire), CallPhase::kFailed, CallPhase::kFailed);
  call.operation = to_string(
      enumerator_of(entry.operation.load(memory_order_relaxed), RecordedOperation::kWait, RecordedOperation::kWait));
  call.number = entry.number.load(memory_order_relaxed);
  call.num_tokens = entry.num_tokens.load(memory_order_relaxed);
  call.num_topk = entry.num_topk.load(memory_order_relaxed);
  call.row_bytes = entry.row_bytes.load(memory_order_relaxed);
  call.dtype = enumerator_of(entry.dtype.load(memory_order_relaxed), DType::kInt8, DType::kUint8);
  call.called_ns = entry.called_ns.load(memory_order_relaxed);
  if (call.phase >= CallPhase::kLaunched) {
    call.ended_ns = entry.ended_ns.load(memory_order_relaxed);
    call.code = enumerator_of(entry.code.load(memory_order_relaxed), ErrorCode::kDataCorrupt, ErrorCode::kInternal);
    call.peer = entry.peer.load(memory_order_relaxed);
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  if (entry.sequence.load(memory_order_relaxed) != number) return std::nullopt;
  return call;
}

std::optional<RecordedWait> read_wait(const FlightWait& wait, bool on_gpu) {
  for (int i = 0; i < kNumTries; ++i) {
    const std::uint64_t before = wait.sequence.load(std::memory_order_acquire);
    RecordedWait seen;
    seen.on_gpu = on_gpu;
    seen.num_missing = wait.num_missing.load(memory_order_relaxed);
    const auto num_named =
        std::clamp<std::size_t>(static_cast<std::size_t>(std::max(seen.num_missing, 0)), 0, kNumRecordedPeers);
    for (std::size_t j = 0; j < num_named; ++j) seen.ranks.push_back(wait.ranks[j].load(memory_order_relaxed));
    seen.step = wait.step.load(memory_order_relaxed);
    seen.since_ns = wait.since_ns.load(memory_order_relaxed);
    std::array<std::uint64_t, kWaitReasonWords> words{};
    for (std::size_t j = 0; j < words.size(); ++j) words[j] = wait.reason[j].load(memory_order_relaxed);
    const auto* const text = reinterpret_cast<const char*>(words.data());
    seen.reason.assign(text, strnlen(text, sizeof(words)));
    // A faulty record must not break the lines and the JSON that show it.
    std::ranges::replace_if(
        seen.reason, [](char one) { return one < ' ' || one > '~'; }, '?');
    std::atomic_thread_fence(std::memory_order_acquire);
    // A process that ended while it wrote leaves an odd number: its last wait is not known.
    if (before % 2 == 0 && wait.sequence.load(memory_order_relaxed) == before) {
      return seen.num_missing > 0 ? std::optional(std::move(seen)) : std::nullopt;
    }
  }
  return std::nullopt;
}

ProcessState state_of(const FlightRecord& record) try {
  struct stat info {};
  if (stat("/proc/self/ns/pid", &info) != 0 || info.st_ino != record.pid_namespace) return ProcessState::kUnknown;
  const ProcessStat seen = read_process_stat(record.pid);
  if (seen.state == 0 || seen.start_time_ticks != record.start_time_ticks) return ProcessState::kEnded;
  switch (seen.state) {
    case 'T':
    case 't':
      return ProcessState::kStopped;
    case 'Z':
    case 'X':
      return ProcessState::kEnded;
    default:
      return ProcessState::kRunning;
  }
} catch (const std::system_error&) {  // no file descriptor is left
  return ProcessState::kUnknown;
}

double seconds_between(std::int64_t from_ns, std::int64_t to_ns) {
  return static_cast<double>(std::max<std::int64_t>(to_ns - from_ns, 0)) / static_cast<double>(kNsPerSecond);
}

/// Call that does not count among those of all ranks, behind the one that does.
std::string describe_local(const RecordedCall& call, std::int64_t now_ns) {
  if (call.ended_ns == 0) {
    return fmt::format(", has been in {} for {:.1f} s", call.operation, seconds_between(call.called_ns, now_ns));
  }
  const double ago_s = seconds_between(call.ended_ns, now_ns);
  if (call.code == ErrorCode::kOk) return fmt::format(", returned from {} {:.1f} s ago", call.operation, ago_s);
  return fmt::format(", got {} from {} {:.1f} s ago", to_string(call.code), call.operation, ago_s);
}

/// "rank 3", "ranks 1, 2", "ranks 1, 2, … (12 in all)".
std::string name_missing(const RecordedWait& wait) {
  const bool cut = static_cast<std::size_t>(wait.num_missing) > wait.ranks.size();
  return fmt::format("rank{} {}{}", wait.num_missing > 1 ? "s" : "", fmt::join(wait.ranks, ", "),
                     cut ? fmt::format(", … ({} in all)", wait.num_missing) : "");
}

std::string describe_call(const RecordedCall& call, std::int64_t now_ns) {
  const std::string name = fmt::format("{} (call {})", call.operation, call.number);
  switch (call.phase) {
    case CallPhase::kLaunched:
      if (call.ended_ns == 0) {
        return fmt::format("launched {} and has been in it for {:.1f} s", name,
                           seconds_between(call.called_ns, now_ns));
      }
      return fmt::format("launched {} {:.1f} s ago and has made no call since", name,
                         seconds_between(call.ended_ns, now_ns));
    case CallPhase::kReturned:
      return fmt::format("returned from {} {:.1f} s ago and has made no call since", name,
                         seconds_between(call.ended_ns, now_ns));
    case CallPhase::kFailed:
      return fmt::format("got {} from {} {:.1f} s ago", to_string(call.code), name,
                         seconds_between(call.ended_ns, now_ns));
    default:
      return fmt::format("has been in {} for {:.1f} s", name, seconds_between(call.called_ns, now_ns));
  }
}

}  // namespace

RecordedRank take_snapshot(const FlightRecord& record, std::size_t num_calls) {
  RecordedRank rank;
  rank.rank = record.rank;
  rank.pid = record.pid;
  rank.process = state_of(record);
  const std::uint64_t last = record.num_calls.load(std::memory_order_acquire);
  const std::uint64_t num_kept = std::min<std::uint64_t>({last, num_calls, kNumRecordedCalls});
  for (std::uint64_t number = last - num_kept + 1; number <= last; ++number) {
    if (std::optional<RecordedCall> call = read_call(record, number)) rank.calls.push_back(*call);
  }
  for (const bool on_gpu : {false, true}) {
    std::optional<RecordedWait> wait = read_wait(record.waits[on_gpu ? kGpuWait : kHostWait], on_gpu);
    if (wait) rank.waits.push_back(std::move(*wait));
  }
  return rank;
}

bool is_collective(std::string_view operation) {
  return operation != to_string(RecordedOperation::kWait) && operation != to_string(RecordedOperation::kLatencyReceive);
}

std::string name_ranks(std::span<const int> ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

std::string RecordedRank::describe(std::int64_t now_ns) const {
  std::string text = fmt::format("rank {} ", rank);
  const auto last = std::find_if(calls.rbegin(), calls.rend(),
                                 [](const RecordedCall& call) { return is_collective(call.operation); });
  text += last == calls.rend() ? "has made no call" : describe_call(*last, now_ns);
  if (!calls.empty() && !is_collective(calls.back().operation)) text += describe_local(calls.back(), now_ns);
  for (const RecordedWait& wait : waits) {
    text += fmt::format(", {} for {} {} for {:.1f} s", wait.on_gpu ? "its GPU has waited" : "has waited",
                        name_missing(wait), wait.reason, seconds_between(wait.since_ns, now_ns));
  }
  if (process == ProcessState::kStopped) text += fmt::format("; its process {} is stopped", pid);
  if (process == ProcessState::kEnded) text += fmt::format("; its process {} has ended", pid);
  return text;
}

std::string_view to_string(CallPhase phase) {
  switch (phase) {
    case CallPhase::kCalled:
      return "called";
    case CallPhase::kEntered:
      return "entered";
    case CallPhase::kMoving:
      return "moving";
    case CallPhase::kLaunched:
      return "launched";
    case CallPhase::kReturned:
      return "returned";
    case CallPhase::kFailed:
      return "failed";
  }
  return "?";
}

std::string_view to_string(ProcessState state) {
  switch (state) {
    case ProcessState::kRunning:
      return "running";
    case ProcessState::kStopped:
      return "stopped";
    case ProcessState::kEnded:
      return "ended";
    case ProcessState::kUnknown:
      return "unknown";
  }
  return "?";
}

}  // namespace ferry
