#ifndef FERRY_NODE_CONTROL_BLOCK_HPP
#define FERRY_NODE_CONTROL_BLOCK_HPP

/// The first pages of a rank's arena: what ranks tell each other. All memory-order rules of the CPU backend are here.
///
/// Words that many ranks read have ONE writer, the owner, and only grow. Every collective call has a number (`call`,
/// from 1).
///
///   field             writer  readers  order                    publishes
///   posted[kTicket]   owner   all      release / acquire        tickets[call % 2]; rows and records staged before
///   posted[kRails]    owner   all      release / acquire        several nodes: what rail peers told the owner
///   posted[kStaged]   owner   all      release / acquire        payload rows staged after the tickets were read
///   posted[kDone]     owner   all      release / acquire        rows written into peers' memory by this rank (after a
///                                                               store fence where stores bypass the caches), and the
///                                                               end of its reads of theirs
///   verdict_set       owner   all      release / acquire        verdict
///   blocked           owner   all      relaxed                  nothing; only steers whom a timeout blames
///   moves             owner   all      relaxed                  nothing; the owner is slow, not stuck
///   left              owner   all      release / acquire        nothing; the owner posts no more
///   doorbell          all     owner    fetch_add seq_cst, futex nothing; wakes the owner to look at the flags
///   wake_at           owner   all      seq_cst                  nothing; ringers skip the wake-up below it
///
/// Tickets alternate between two places. A rank writes ticket c + 2 only after it saw posted[kTicket] >= c + 1 of
/// everybody, and everybody posts c + 1 only after reading the tickets of c, so nobody reads a ticket while it is
/// rewritten.
///
/// A lost wake-up cannot happen: the waiter reads `doorbell`, then the flags, then stores `wake_at = doorbell +
/// missing`, then sleeps only if `doorbell` has not moved (the kernel compares). Each missing peer rings after it sets
/// its flag, so the flags cannot be complete before `wake_at` rings; whoever rings that one sees `wake_at` (both
/// seq_cst) and wakes. A rank that drives the network itself waits for no flag meanwhile: it sleeps on the network's
/// descriptor, and looks for verdicts at least every 20 ms.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/agreement.hpp"

namespace ferry::node {

/// Steps of a call that ranks wait for.
enum class Phase : std::size_t { kTicket = 0, kRails = 1, kStaged = 2, kDone = 3 };
inline constexpr std::size_t kNumPhases = 4;

/// Where a rank's rows or records lie, as its peers should look for them.
struct Location {
  enum class Kind : std::int32_t {
    kNone = 0,     ///< nothing there
    kArena = 1,    ///< `value` is an offset in the owner's arena
    kProcess = 2,  ///< `value` is an address, good only inside the owner's process
  };
  Kind kind = Kind::kNone;
  std::int64_t value = 0;
  std::int64_t num_rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t stride_bytes = 0;
};

/// What a rank shows its peers at the start of a call.
struct Ticket {
  CallRecord record;
  Location input;                  ///< dispatch, combine: payload rows to read
  Location output;                 ///< dispatch: payload rows to write
  Location staged;                 ///< dispatch: staged copy of `input`, for peers that cannot reach that
  Location records;                ///< route: tables; dispatch: token records; combine: weights
  Location rails;                  ///< several nodes: what rail peers tell the owner of this call, by node
  std::int64_t max_recv_rows = 0;  ///< route
  std::int64_t num_entries = 0;    ///< route: T * K
};

inline constexpr std::size_t kVerdictMessageBytes = 512;

/// Why a rank gave up on the group. Written once, before `verdict_set`.
struct Verdict {
  ErrorCode code = ErrorCode::kOk;
  std::int32_t culprit = -1;
  std::int32_t message_bytes = 0;
  std::array<char, kVerdictMessageBytes> message{};
};

/// Two lines, since neighbouring lines are fetched in pairs (Intel optimisation manual, spatial prefetcher).
inline constexpr std::size_t kFlagAlignment = 128;

struct ControlBlock {
  static constexpr std::uint64_t kMagic = 0x464552525931;  // "FERRY1"

  std::uint64_t magic = kMagic;
  std::uint64_t size_bytes = sizeof(ControlBlock);

  alignas(kFlagAlignment) std::atomic<std::uint32_t> doorbell{0};
  alignas(kFlagAlignment) std::atomic<std::uint32_t> wake_at{0};
  std::atomic<std::uint32_t> blocked{0};
  std::atomic<std::uint32_t> left{0};
  std::atomic<std::uint32_t> verdict_set{0};
  std::atomic<std::uint64_t> moves{0};
  std::array<std::atomic<std::uint64_t>, kNumPhases> posted{};

  alignas(kFlagAlignment) Verdict verdict;
  alignas(kFlagAlignment) std::array<Ticket, 2> tickets;

  std::atomic<std::uint64_t>& flag(Phase phase) { return posted[static_cast<std::size_t>(phase)]; }
  const std::atomic<std::uint64_t>& flag(Phase phase) const { return posted[static_cast<std::size_t>(phase)]; }
};

// Processes share these words, so they must be plain words.
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);
static_assert(std::is_trivially_copyable_v<Ticket> && std::is_trivially_copyable_v<Verdict>);

}  // namespace ferry::node

#endif  // FERRY_NODE_CONTROL_BLOCK_HPP
