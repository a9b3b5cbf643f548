#ifndef FERRY_RECORDED_CALLS_HPP
#define FERRY_RECORDED_CALLS_HPP

/// The last calls of each rank, as every group records them in memory that survives the rank's process: which call a
/// hung or killed group was in, and which rank holds up the others. `ferry doctor --attach` prints the same.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Number of calls that a rank's record holds; older ones are overwritten.
inline constexpr std::size_t kNumRecordedCalls = 64;

/// Progress of a call on one rank.
enum class CallPhase : std::int32_t {
  kCalled = 0,    ///< the program has made the call
  kEntered = 1,   ///< CPU: the other ranks of the node see the call
  kMoving = 2,    ///< CPU: all ranks make the call
  kLaunched = 3,  ///< CUDA: the kernels are on the stream; a route that waits for its counts has not returned
  kReturned = 4,  ///< done on this rank
  kFailed = 5,    ///< returned an error
};

/// The enumerator's name in lower case, e.g. "launched".
FERRY_API std::string_view to_string(CallPhase phase);

/// One call of one rank. Times are those of CLOCK_MONOTONIC in nanoseconds, to a tick of the system (1 to 10 ms).
struct RecordedCall {
  /// route, dispatch, combine, latency_dispatch, latency_combine, latency_receive, wait, destroy.
  std::string_view operation;
  /// Calls of all ranks together are numbered from 1, alike on all ranks that make the same calls; latency_receive and
  /// wait have the number of the last such call.
  std::int64_t number = 0;
  CallPhase phase = CallPhase::kCalled;
  std::int64_t num_tokens = -1;  ///< T; -1: the call has none
  std::int64_t num_topk = -1;    ///< K; -1: the call has none
  std::int64_t row_bytes = 0;    ///< bytes of a token's row as passed by the program; 0: the call moves none
  DType dtype = DType::kUint8;   ///< of these rows
  std::int64_t called_ns = 0;
  std::int64_t ended_ns = 0;  ///< 0: the call has not returned
  ErrorCode code = ErrorCode::kOk;
  int peer = -1;  ///< Status::peer of its error
};

/// A wait that lasts, of a rank's thread or of its kernels.
struct RecordedWait {
  std::vector<int> ranks;  ///< missing ranks, ascending; the first 8 at most
  int num_missing = 0;
  std::string reason;         ///< "to make the same call", "to send its rows", …
  std::int64_t since_ns = 0;  ///< CLOCK_MONOTONIC
  bool on_gpu = false;        ///< kernels of the rank wait, and not its thread
  int step = 0;               ///< of a thread: number of the wait in its call, from 1; the same on all ranks
};

enum class ProcessState : std::int32_t {
  kRunning = 0,
  kStopped = 1,  ///< by a signal or a debugger
  kEnded = 2,
  kUnknown = 3,  ///< the process is in another namespace of process ids
};

/// "running", "stopped", "ended", "unknown".
FERRY_API std::string_view to_string(ProcessState state);

struct RecordedRank {
  int rank = 0;
  std::int64_t pid = 0;
  ProcessState process = ProcessState::kUnknown;
  bool has_left = false;              ///< the rank has left the group
  std::vector<RecordedCall> calls{};  ///< oldest first
  std::vector<RecordedWait> waits{};  ///< waits at this moment, or when the process ended or was stopped

  /// The last call, the waits, and the process if it does not run, in one line for people: "rank 2 has been in
  /// dispatch (call 18) for 5.0 s, has waited for rank 3 to stage its rows for 4.9 s; its process 4711 is stopped".
  /// `now_ns`: RecordedGroup::now_ns.
  FERRY_API std::string describe(std::int64_t now_ns) const;
};

enum class DiagnosisKind : std::int32_t {
  kHealthy = 0,    ///< no rank waits for another, and no rank's last call has failed
  kEnded = 1,      ///< the process of `rank` has ended
  kStopped = 2,    ///< the process of `rank` is stopped
  kOtherCall = 3,  ///< `rank` makes another call than the others
  kLate = 4,       ///< `rank` has not made the call that others wait for
  kBusyGpu = 5,    ///< `rank` has launched the call, and its GPU has not started it: other work is in front of it
  kSlowLink = 6,   ///< `rank` has done its part, and `peer` has not received it: the network between them is late
  kInCall = 7,     ///< `rank` is in the call that others wait for, and waits for no rank
  kUnclear = 8,    ///< ranks wait, or a last call has failed, and the records at hand do not show why
};

/// "healthy", "ended", "stopped", "other_call", "late", "busy_gpu", "slow_link", "in_call", "unclear".
FERRY_API std::string_view to_string(DiagnosisKind kind);

/// Cause of a hung or broken group, as far as the records show it.
struct Diagnosis {
  DiagnosisKind kind = DiagnosisKind::kHealthy;
  int rank = -1;     ///< -1: none
  int peer = -1;     ///< a rank that waits for `rank`, or was the first to blame it; -1: none
  std::string text;  ///< one line for people
};

/// Records of the ranks of one group.
struct RecordedGroup {
  std::string id;  ///< 16 hexadecimal digits, the same on all ranks; another after Group::renew
  int num_ranks = 0;
  int ranks_per_node = 0;
  std::int64_t timeout_ns = 0;  ///< GroupOptions::timeout_ns of the lowest rank at hand
  std::int64_t now_ns = 0;      ///< CLOCK_MONOTONIC when the records were read
  /// Wall-clock time minus CLOCK_MONOTONIC when the group was created, in nanoseconds since 1970 (UTC).
  std::int64_t wall_offset_ns = 0;
  std::vector<RecordedRank> ranks{};  ///< those whose records this host has, ascending
  Diagnosis diagnosis;

  /// One object with these members; docs/doctor.md has its form.
  FERRY_API std::string to_json() const;
};

/// Reads the records of the groups in which process `pid` has a rank, those of its peers on this host included, whether
/// they live, are stopped, or have ended since. For operators and programs that watch others; a process may pass its
/// own id. Local: it maps what the process holds open, and delays no rank. Groups are ordered by id; none: the list is
/// empty.
/// @errors kInvalidArgument: there is no such process; kSystem: this user may not look at it (/proc/PID/fd)
FERRY_API Result<std::vector<RecordedGroup>> recorded_calls(std::int64_t pid);

}  // namespace ferry

#endif  // FERRY_RECORDED_CALLS_HPP
