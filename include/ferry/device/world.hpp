#ifndef FERRY_DEVICE_WORLD_HPP
#define FERRY_DEVICE_WORLD_HPP

/// What kernels need to know of a OneSided: values that OneSided::device_world and ::device_team return, to be passed
/// to kernels. They are good as long as the OneSided. ferry/device/one_sided.cuh has the calls.

#include <cstddef>
#include <cstdint>

#include "ferry/device/request.hpp"

namespace ferry::device {

/// How a call in a kernel ended. Whatever is not kOk is also in the error record, for OneSided::poll_errors.
enum class Code : std::int32_t {
  kOk = 0,
  kInvalidArgument = 1,  ///< nothing was sent and nothing changed
  kTimeout = 2,
  kPeerLost = 3,  ///< a rank is lost that this call needs, or may need, or its OneSided has ended while it waited
};

/// Calls, for error records.
enum class Call : std::int32_t { kPut, kGet, kSignal, kFetchAdd, kCompareSwap, kWaitUntil, kFence, kQuiet, kBarrier };

/// What the host tells kernels that wait.
namespace stop_word {
/// One is lost. Ends waits for what others write, who may be that one; the proxy itself ends what it was asked of it.
inline constexpr std::uint64_t kRankLost = 1;
inline constexpr std::uint64_t kOver = 2;  ///< the OneSided ends: nobody serves kernels any more. Ends all waits
}  // namespace stop_word

/// The first error of kernels that the host has not read yet, in pinned host memory, initially zero.
///
///   field   writer                                reader   order
///   state   a kernel, 1: the rest is valid; the   both     release / acquire
///           host, 0: it has read it
///   stop    the host, see stop_word; never less   kernels  release / acquire
struct ErrorRecord {
  std::uint64_t state;
  std::int32_t code;
  std::int32_t call;
  std::int32_t rank;  ///< whom the call names; -1: nobody
  std::int32_t comparison;
  std::uint64_t offset;  ///< in symmetric memory; of a pointer that is not there, the pointer
  std::uint64_t num_bytes;
  std::uint64_t seen;
  std::uint64_t expected;
  std::uint64_t timeout_ns;
  alignas(128) std::uint64_t stop;
};

/// Of the kernels of one rank, in its GPU's memory, initially zero.
struct KernelState {
  std::uint64_t reporting;    ///< a thread fills the error record
  std::uint64_t ring_broken;  ///< a ticket was taken for a request that will not be written
  RequestRingState ring;
};

/// Ranks of the node whose memory is found by the World itself, the first of them. Calls find it in the constant memory
/// of a kernel's parameters; memory of the GPU would be read again after every wait. A power of two.
inline constexpr int kNumNearRanks = 16;

/// To be passed on as it was returned: wait_until and calls that the proxy serves read the stored copy (below), so a
/// field that a program changes, such as timeout_ns, has no effect on them.
struct World {
  int rank = 0;
  int num_ranks = 1;
  int ranks_per_node = 1;
  int num_near_words = 0;     ///< near ranks (below) whose words this GPU changes: all or none of them
  int first_in_node = 0;      ///< the lowest rank of this node
  int num_near = 0;           ///< ranks from that one on whose memory is in near_shifts
  std::byte* heap = nullptr;  ///< this rank's symmetric memory
  std::uint64_t heap_bytes = 0;
  std::byte* const* peer_heaps = nullptr;  ///< by index in the node, in memory of the GPU
  /// Words are in memory on which GPUs work in one step for all who reach it. Otherwise the proxy changes them.
  bool gpu_words = true;
  std::uint64_t timeout_ns = 0;
  ErrorRecord* errors = nullptr;
  KernelState* state = nullptr;
  /// Bytes from this rank's memory to that of a near rank, by its number modulo kNumNearRanks. Multiples of 16.
  std::int64_t near_shifts[kNumNearRanks] = {};
  RequestRing ring;  ///< without slots where all ranks are of one node and gpu_words
  /// The same World in memory of the GPU. Functions that are not inlined are given this one: if they had the address of
  /// a kernel's parameters, the compiler would load those again after every barrier and every look at a word.
  const World* stored = nullptr;
};

/// One of the ranks that meet at a barrier.
struct alignas(8) TeamMate {
  std::int32_t rank = 0;  ///< of the world
  /// Where its memory has the word that this rank writes: so many words behind TeamView::arrived. Each rank keeps the
  /// words of a team wherever it has room.
  std::int32_t word = 0;
};

/// Ranks that meet at a barrier.
struct TeamView {
  int num_ranks = 0;
  int rank = 0;                      ///< this rank's place
  const TeamMate* mates = nullptr;   ///< [num_ranks] by place, in memory of the GPU
  std::uint64_t* arrived = nullptr;  ///< [num_ranks] words here: barriers that the rank at this place has come to
  std::uint64_t* epoch = nullptr;    ///< barriers that are over here, in memory of the GPU
};

}  // namespace ferry::device

#endif  // FERRY_DEVICE_WORLD_HPP
