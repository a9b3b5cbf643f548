#ifndef FERRY_NODE_CONTROL_BLOCK_HPP
#define FERRY_NODE_CONTROL_BLOCK_HPP

/// First pages of a rank's arena: the words that the ranks of a node publish to each other. The words of a ring between
/// nodes are in net/ring_words.hpp, those of kernels in the CUDA backend.
///
/// Words that many ranks read have ONE writer, the owner, and only grow. Every collective call has a number (`call`,
/// from 1).
///
///   field               writer  readers  order                    publishes
///   posted[kDescribed]  owner   all      release / acquire        descriptors[call % 2] and the memory they locate
///   posted[kCollected]  owner   all      release / acquire        headers that the owner collected from other nodes
///                                                                 (CallDescriptor::collected)
///   posted[kStaged]     owner   all      release / acquire        data staged after the descriptors were read
///   posted[kDone]       owner   all      release / acquire        rows the owner wrote into peers' memory (after a
///                                                                 store fence if stores bypass the caches), and the
///                                                                 end of its reads of their memory
///   posted[kWritten]    owner   all      release / acquire        rows the owner wrote into peers' memory, as kDone
///                                                                 does, where their owners verify them before kDone
///   error_set           owner   all      release / acquire        error
///   beats               owner   all      relaxed                  nothing; the owner waits (call/silence_watch.hpp)
///   progress            owner   all      relaxed                  nothing; the owner is slow, not stuck
///   left                owner   all      release / acquire        nothing; the owner posts no more
///   doorbell            all     owner    fetch_add seq_cst, futex nothing; wakes the owner to poll the flags
///   wake_at             owner   all      seq_cst                  nothing; ringers below it skip the wake-up
///   flight              owner   anyone   core/flight_record.hpp   the rank's last calls and present waits
///
/// Descriptors alternate between two entries. A rank writes the descriptor of call c + 2 only after it saw
/// posted[kDescribed] >= c + 1 of all ranks, and each rank posts c + 1 only after it has read the descriptors of c, so
/// no descriptor is rewritten while it is read.
///
/// No wake-up is lost: the waiter reads `doorbell`, then the flags, then stores `wake_at = doorbell + missing`, then
/// sleeps only if `doorbell` has not moved (the kernel compares). Each missing peer rings after it sets its flag, so
/// the flags are complete only once `doorbell` reaches `wake_at`; the rank whose ring reaches it sees `wake_at` (both
/// seq_cst) and wakes the waiter. A rank that sleeps on anything other than the doorbell must poll for errors itself.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/agreement.hpp"
#include "core/error_record.hpp"
#include "core/flight_record.hpp"

namespace ferry::node {

/// Steps of a call for which ranks wait.
enum class Phase : std::size_t { kDescribed = 0, kCollected = 1, kStaged = 2, kDone = 3, kWritten = 4 };
inline constexpr std::size_t kNumPhases = 5;

/// Location of memory of a rank, for its peers.
struct Location {
  enum class Kind : std::int32_t {
    kNone = 0,     ///< no memory
    kArena = 1,    ///< `value` is an offset in the owner's arena
    kProcess = 2,  ///< `value` is an address, valid only inside the owner's process
  };
  Kind kind = Kind::kNone;
  std::int64_t value = 0;
  std::int64_t num_rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t stride_bytes = 0;
};

/// Arguments of a call that a rank publishes to its peers at its start.
struct CallDescriptor {
  CallRecord record;
  Location input;                  ///< dispatch, combine: payload rows to read
  Location output;                 ///< dispatch: payload rows to write
  Location staged;                 ///< published by kStaged: a copy of `input`, or forward tables (route)
  Location tables;                 ///< route: counts and tokens
  Location records;                ///< dispatch: token records; combine that is verified: checksums of rows
  Location weights;                ///< combine: weights that are summed back
  Location collected;              ///< published by kCollected
  std::int64_t max_recv_rows = 0;  ///< route
  std::int64_t num_entries = 0;    ///< route: T * K
};

/// Two cache lines, since neighbouring lines are fetched in pairs (Intel optimisation manual, spatial prefetcher).
inline constexpr std::size_t kFlagAlignment = 128;

struct ControlBlock {
  static constexpr std::uint64_t kMagic = 0x464552525931;  // "FERRY1"

  std::uint64_t magic = kMagic;
  std::uint64_t size_bytes = sizeof(ControlBlock);

  alignas(kFlagAlignment) std::atomic<std::uint32_t> doorbell{0};
  alignas(kFlagAlignment) std::atomic<std::uint32_t> wake_at{0};
  std::atomic<std::uint32_t> left{0};
  std::atomic<std::uint32_t> error_set{0};
  std::atomic<std::uint64_t> beats{0};
  std::atomic<std::uint64_t> progress{0};
  std::array<std::atomic<std::uint64_t>, kNumPhases> posted{};

  alignas(kFlagAlignment) ErrorRecord error;
  alignas(kFlagAlignment) std::array<CallDescriptor, 2> descriptors;
  alignas(kFlagAlignment) FlightRecord flight;

  std::atomic<std::uint64_t>& flag(Phase phase) { return posted[static_cast<std::size_t>(phase)]; }
  const std::atomic<std::uint64_t>& flag(Phase phase) const { return posted[static_cast<std::size_t>(phase)]; }
};

// Processes share these words, so the atomics must be lock-free and have the size of the plain types.
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);
static_assert(std::is_trivially_copyable_v<CallDescriptor>);

}  // namespace ferry::node

#endif  // FERRY_NODE_CONTROL_BLOCK_HPP
