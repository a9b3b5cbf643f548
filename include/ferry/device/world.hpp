#ifndef FERRY_DEVICE_WORLD_HPP
#define FERRY_DEVICE_WORLD_HPP

/// Values of a OneSided for kernels: OneSided::device_world and OneSided::device_team return them, and the program
/// passes them to kernels. Valid as long as the OneSided. ferry/device/one_sided.cuh has the calls.

#include <cstddef>
#include <cstdint>

#include "ferry/device/proxy_request.hpp"

namespace ferry::device {

/// Result of a call in a kernel. Every code but kOk is also in the error record, for OneSided::poll_errors.
enum class Code : std::int32_t {
  kOk = 0,
  kInvalidArgument = 1,  ///< nothing was sent and nothing changed
  kTimeout = 2,
  kPeerLost = 3,  ///< a rank that this call needs or may need is lost, or the OneSided has ended during the wait
};

/// Calls, for error records.
enum class Call : std::int32_t {
  kPut,
  kGet,
  kSignal,
  kFetchAdd,
  kCompareSwap,
  kWaitUntil,
  kFence,
  kQuiet,
  kBarrier,
  kSwap,
  kFetchAnd,
  kFetchOr,
  kFetchXor,
};

/// Values of the host's stop word, for kernels that wait.
namespace stop_word {
/// A rank is lost. Ends waits for other ranks' writes, since the writer may be lost; the proxy itself ends requests to
/// that rank.
inline constexpr std::uint64_t kRankLost = 1;
inline constexpr std::uint64_t kOver = 2;  ///< the OneSided ends and no longer serves kernels: ends all waits
}  // namespace stop_word

/// First error of kernels that the host has not read yet, in pinned host memory, initially zero.
///
///   field   writer                                   reader   order
///   state   a kernel, 1: the other fields are valid; both     release / acquire
///           the host, 0: it has read them
///   stop    the host, see stop_word; never decreases kernels  release / acquire
struct ErrorRecord {
  std::uint64_t state;
  std::int32_t code;
  std::int32_t call;
  std::int32_t rank;  ///< rank that the call names; -1: none
  std::int32_t comparison;
  std::uint64_t offset;  ///< in symmetric memory; for a pointer outside it, the pointer itself
  std::uint64_t num_bytes;
  std::uint64_t seen;
  std::uint64_t expected;
  std::uint64_t timeout_ns;
  alignas(128) std::uint64_t stop;
};

/// State of the kernels of one rank, in its GPU's memory, initially zero.
struct KernelState {
  std::uint64_t reporting;    ///< a thread fills the error record
  std::uint64_t ring_broken;  ///< a ticket was taken for a request that will not be written
  RequestRingState ring;
};

/// Number of ranks of the node, the first ones, whose memory is found through the World itself. Calls find it in the
/// constant memory of a kernel's parameters; GPU memory would be read again after every wait. A power of two.
inline constexpr int kNumNearRanks = 16;

/// Pass it on unchanged: wait_until and calls that the proxy serves read the stored copy (below), so a change of a
/// field such as timeout_ns has no effect on them.
struct World {
  int rank = 0;
  int num_ranks = 1;
  int ranks_per_node = 1;
  int num_near_words = 0;     ///< near ranks (below) whose words this GPU changes: num_near or 0
  int first_in_node = 0;      ///< the lowest rank of this node
  int num_near = 0;           ///< ranks from first_in_node on whose memory is in near_shifts
  std::byte* heap = nullptr;  ///< this rank's symmetric memory
  std::uint64_t heap_bytes = 0;
  std::byte* const* peer_heaps = nullptr;  ///< by index in the node, in memory of the GPU
  /// Words are in memory where atomics of GPUs are atomic for every accessor. Otherwise the proxy changes words.
  bool gpu_words = true;
  std::uint64_t timeout_ns = 0;
  ErrorRecord* errors = nullptr;
  KernelState* state = nullptr;
  /// Byte distance from this rank's memory to a near rank's, by rank modulo kNumNearRanks. Multiples of 16.
  std::int64_t near_shifts[kNumNearRanks] = {};
  RequestRing ring;  ///< without slots if all ranks are on one node and gpu_words
  /// The same World in GPU memory, for functions that are not inlined: given the address of a kernel's parameters, the
  /// compiler would load those again after every barrier and every look at a word.
  const World* stored = nullptr;
};

/// One rank of a barrier's team.
struct alignas(8) TeamMate {
  std::int32_t rank = 0;  ///< global rank
  /// Index, from TeamView::arrived on, of the word in that rank's memory that this rank writes. Each rank places the
  /// words of a team wherever it has room.
  std::int32_t word = 0;
};

/// Team of ranks that meet at a barrier.
struct TeamView {
  int num_ranks = 0;
  int rank = 0;                      ///< this rank's index in the team
  const TeamMate* mates = nullptr;   ///< [num_ranks] by index in the team, in GPU memory
  std::uint64_t* arrived = nullptr;  ///< [num_ranks] words here: barriers that the rank at this index has reached
  std::uint64_t* epoch = nullptr;    ///< barriers completed here, in GPU memory
};

}  // namespace ferry::device

#endif  // FERRY_DEVICE_WORLD_HPP
