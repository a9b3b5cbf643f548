#ifndef FERRY_CORE_FLIGHT_RECORD_HPP
#define FERRY_CORE_FLIGHT_RECORD_HPP

/// Flight record of a rank: its last calls and its present waits, in memory that its peers and `ferry doctor --attach`
/// read, also after the rank's process has ended. Writing it costs no system call and waits for no reader.
///
///   field              writer             order                     publishes
///   group_id           owner, once        release / acquire         the fields in front of it
///   num_calls          owner's calls      release / acquire         the entry of that call
///   calls[].sequence   owner's calls      release / acquire, fence  the entry (0 while it is rewritten)
///   calls[].phase      owner's calls      release / acquire         ended_ns, code and peer
///   waits[].sequence   thread that waits  release / acquire, fence  the wait (odd while it is rewritten)
///
/// Calls of a group run one at a time, so entries have one writer at a time. waits[kHostWait] is written by the thread
/// that makes the call, waits[kGpuWait] by the thread that watches the rank's kernels.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/agreement.hpp"
#include "ferry/recorded_calls.hpp"

namespace ferry {

/// Calls that are recorded: those of core/agreement.hpp under the same numbers, and two that no rank agrees on.
enum class RecordedOperation : std::uint8_t {
  kRoute = static_cast<std::uint8_t>(Operation::kRoute),
  kDispatch = static_cast<std::uint8_t>(Operation::kDispatch),
  kCombine = static_cast<std::uint8_t>(Operation::kCombine),
  kLatencyDispatch = static_cast<std::uint8_t>(Operation::kLatencyDispatch),
  kLatencyCombine = static_cast<std::uint8_t>(Operation::kLatencyCombine),
  kDestroy = static_cast<std::uint8_t>(Operation::kDestroy),
  kLatencyReceive = 6,
  kWait = 7,
};

/// Whether all ranks make the call together, so that it has a number of its own.
constexpr bool is_collective(RecordedOperation operation) {
  return operation != RecordedOperation::kLatencyReceive && operation != RecordedOperation::kWait;
}

/// Ranks that a recorded wait names; more are counted only.
inline constexpr std::size_t kNumRecordedPeers = 8;
/// Room for the reason of a wait; longer ones are cut. Words of eight bytes.
inline constexpr std::size_t kWaitReasonWords = 6;

/// One cache line.
struct alignas(64) FlightEntry {
  std::atomic<std::uint64_t> sequence{0};  ///< number of the entry, from 1; 0: being written
  std::atomic<std::int64_t> number{0};
  std::atomic<std::int64_t> num_tokens{0};
  std::atomic<std::int64_t> called_ns{0};
  std::atomic<std::int64_t> ended_ns{0};
  std::atomic<std::int32_t> row_bytes{0};
  std::atomic<std::int32_t> peer{0};
  std::atomic<std::int16_t> num_topk{0};
  std::atomic<std::uint8_t> operation{0};
  std::atomic<std::uint8_t> phase{0};
  std::atomic<std::uint8_t> dtype{0};
  std::atomic<std::uint8_t> code{0};
};
static_assert(sizeof(FlightEntry) == 64);

struct alignas(64) FlightWait {
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<std::int32_t> num_missing{0};  ///< 0: no wait
  std::atomic<std::int32_t> step{0};         ///< RecordedWait::step
  std::array<std::atomic<std::int32_t>, kNumRecordedPeers> ranks{};
  std::atomic<std::int64_t> since_ns{0};
  std::array<std::atomic<std::uint64_t>, kWaitReasonWords> reason{};
};

inline constexpr std::size_t kHostWait = 0;
inline constexpr std::size_t kGpuWait = 1;

struct FlightRecord {
  std::int32_t rank = -1;
  std::int32_t num_ranks = 0;
  std::int32_t ranks_per_node = 0;
  std::int64_t timeout_ns = 0;
  std::int64_t created_ns = 0;       ///< CLOCK_MONOTONIC
  std::int64_t created_wall_ns = 0;  ///< CLOCK_REALTIME at the same time
  std::int64_t pid = 0;
  std::uint64_t pid_namespace = 0;
  std::uint64_t start_time_ticks = 0;
  std::atomic<std::uint64_t> group_id{0};  ///< 0: the memory belongs to no group
  alignas(64) std::atomic<std::uint64_t> num_calls{0};
  std::array<FlightWait, 2> waits;
  std::array<FlightEntry, kNumRecordedCalls> calls;
};

}  // namespace ferry

#endif  // FERRY_CORE_FLIGHT_RECORD_HPP
