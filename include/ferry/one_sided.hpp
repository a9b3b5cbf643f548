#ifndef FERRY_ONE_SIDED_HPP
#define FERRY_ONE_SIDED_HPP

/// One-sided communication: memory that every rank has at the same offset, and calls by which a rank reads and writes
/// the memory of another without its help. docs/one-sided.md has the table of order and visibility, with the OpenSHMEM
/// and NVSHMEM names of the same operations.
///
///     auto shm = ferry::OneSided::create(bootstrap, {.ranks_per_node = 8}).value();        // collective
///     auto row = shm->allocate<float>(1024).value();                                       // collective
///     auto ready = shm->allocate<std::uint64_t>(1).value();
///     shm->put_signal<float>(next, row.data(), mine, ready.data(), 1, SignalOp::kAdd);     // into memory of `next`
///     shm->wait_until(ready.data(), Comparison::kGreaterEqual, 1);                         // for data sent here

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "ferry/bootstrap.hpp"
#include "ferry/export.hpp"
#include "ferry/group.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

namespace one_sided {
struct Core;       // private
struct TeamState;  // private
}  // namespace one_sided

namespace device {
struct World;     // ferry/device/world.hpp
struct TeamView;  // the same
}  // namespace device

/// Symmetric memory of each rank unless OneSidedOptions::heap_bytes sets another size.
inline constexpr std::size_t kDefaultSymmetricHeapBytes = std::size_t{64} << 20;

/// Teams that a rank can join in all, including the three initial ones: their words are reserved once. Failed splits
/// may count too.
inline constexpr int kMaxTeams = 64;

/// Options of OneSided::create. The same on every rank, except `device` and `net_devices`.
struct OneSidedOptions {
  /// "cpu": memory of the host. "cuda": memory of `device`. "auto": "cuda" if this build has it and it works here.
  std::string backend = "auto";
  /// Symmetric memory of each rank, rounded up to a page; taken from the system when the OneSided is created.
  std::size_t heap_bytes = kDefaultSymmetricHeapBytes;
  /// As GroupOptions::ranks_per_node.
  int ranks_per_node = 0;
  /// As GroupOptions::transport.
  std::string transport = "auto";
  /// As GroupOptions::net_devices.
  std::string net_devices{};
  /// Backend "cuda": ordinal of this rank's GPU, -1 for the calling thread's current one.
  int device = kCurrentDevice;
  /// Deadline of every wait, unless a call is given its own.
  std::int64_t timeout_ns = kDefaultCallTimeoutNs;
};

/// Condition of `wait_until`: the word, as an unsigned number, compared with the value.
enum class Comparison : std::int32_t {
  kEqual = 0,
  kNotEqual = 1,
  kGreater = 2,
  kGreaterEqual = 3,
  kLess = 4,
  kLessEqual = 5,
};

/// Change of a word by `signal` and `put_signal`, atomic for all ranks.
enum class SignalOp : std::int32_t {
  kSet = 0,  ///< the word becomes the value
  kAdd = 1,  ///< the value is added to the word, modulo 2^64, or 2^32 for a word of 4 bytes
};

/// Set of ranks that meet at a barrier. A value: cheap to copy, valid as long as its OneSided.
class FERRY_API Team {
 public:
  /// An invalid team, which every call refuses.
  Team() = default;
  explicit Team(std::shared_ptr<const one_sided::TeamState> state) : state_(std::move(state)) {}

  bool valid() const { return state_ != nullptr; }
  /// Ranks in the team; 0 in an invalid one.
  int num_ranks() const;
  /// This rank's index in the team, from 0; -1 in an invalid one.
  int rank() const;
  /// The global rank at index `team_rank`; -1 if there is no such index.
  int world_rank(int team_rank) const;

 private:
  friend class OneSided;
  std::shared_ptr<const one_sided::TeamState> state_;
};

/// Symmetric memory and the calls on it.
///
/// Addresses. A *symmetric address* is one inside this rank's own memory from `allocate`. `dest` of a put, `source` of
/// a get, and every word are given as symmetric addresses: the call uses the same offset in the memory of `rank`. The
/// other side of a copy is any memory of this rank (backend "cuda": any that its GPU reaches). Words are 8 bytes,
/// aligned to 8; those of `signal` and of atomics may be 4 bytes, aligned to 4. A word of 4 bytes and one of 8 that
/// contains it are not atomic with each other.
///
/// Streams. Backend "cpu": a call acts at once, and the stream must be null. Backend "cuda": a call is put on the
/// stream and returns; "on return" below means "for later work on the stream" there. Calls that involve the host say
/// so.
///
/// Order. Two operations of one rank are ordered for other ranks only by `fence`, `quiet`, a barrier, or put_signal.
/// See docs/one-sided.md.
///
/// Failure. kInvalidArgument: nothing was sent and nothing changed. kPeerLost and kTimeout name the rank if it is
/// known; operations not complete by then may or may not have happened, and operations between other ranks still work.
///
/// Threads. Any thread may call at any time, except that `allocate`, `free`, `split`, `barrier` and `destroy` are
/// called one at a time. `quiet` and `fence` cover the operations of all threads that returned before.
class FERRY_API OneSided {
 public:
  /// Collective over the ranks of `bootstrap`, which is used only during this call.
  /// @errors as Group::create; kSystem: no memory for `heap_bytes`
  [[nodiscard]] static Result<std::shared_ptr<OneSided>> create(std::shared_ptr<Bootstrap> bootstrap,
                                                                const OneSidedOptions& options = {});
  /// Leaves without waiting for other ranks.
  ~OneSided();
  OneSided(const OneSided&) = delete;
  OneSided& operator=(const OneSided&) = delete;

  int rank() const;
  int num_ranks() const;
  const Topology& topology() const;
  /// Name of the backend in use, e.g. "cpu".
  std::string_view backend() const;

  // Memory

  /// `bytes` of symmetric memory at the same offset on every rank, aligned to a page, zeroed. At least one page.
  /// @sync   collective, a meeting of all ranks: on return every rank may access the memory. Blocks the host
  /// @errors kInvalidArgument: ranks ask for different numbers of bytes (names both ranks and both numbers), or make
  ///         different calls; kCapacity: no such range is free (gives the free size). Both: on every rank, nothing is
  ///         allocated
  [[nodiscard]] Result<void*> allocate(std::size_t bytes);
  /// `count` elements, by the same rules.
  template <typename T>
  [[nodiscard]] Result<std::span<T>> allocate(std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (count > SIZE_MAX / sizeof(T)) return size_overflow("allocate", count, sizeof(T));
    Result<void*> data = allocate(count * sizeof(T));
    if (!data.ok()) return data.status();
    return std::span<T>(static_cast<T*>(*data), count);
  }
  /// Frees memory of `allocate`. Null: nothing happens, on every rank.
  /// @sync   collective, a meeting of all ranks, which waits for their operations as `barrier` does. Blocks the host
  /// @errors kInvalidArgument: not the address of a block, or another block on another rank: nothing is freed
  [[nodiscard]] Status free(void* data);

  /// Address at which this rank (backend "cuda": its GPU) loads and stores `rank`'s memory at symmetric address `data`;
  /// null if it cannot (a rank of another node, or no such rank or address). `fence` and `quiet` order stores through
  /// it like a put.
  void* peer_pointer(int rank, const void* data) const;
  template <typename T>
  T* peer_pointer(int rank, const T* data) const {
    return static_cast<T*>(peer_pointer(rank, static_cast<const void*>(data)));
  }

  // Copies

  /// Copy `num_bytes` at `source` to symmetric address `dest` of `rank`. On return `source` may be reused; the bytes
  /// have arrived after a later `quiet`. 4 or 8 bytes at an address aligned to their size arrive in one piece.
  /// @errors kInvalidArgument: no such rank, a range that is not inside one block of symmetric memory; kPeerLost
  [[nodiscard]] Status put(int rank, void* dest, const void* source, std::size_t num_bytes, Stream stream = {});
  /// put whose `source` may be reused only after a later `quiet`. After an error of `quiet`, or of `put`, `source` may
  /// still be read until this OneSided is gone.
  [[nodiscard]] Status put_nbi(int rank, void* dest, const void* source, std::size_t num_bytes, Stream stream = {});
  /// Copy `num_bytes` at symmetric address `source` of `rank` to `dest`, where they are on return.
  /// @errors as put; kTimeout
  [[nodiscard]] Status get(int rank, void* dest, const void* source, std::size_t num_bytes, Stream stream = {});
  /// get whose bytes are at `dest` only after a later `quiet`. After an error of `quiet`, `dest` may still be written
  /// until this OneSided is gone.
  [[nodiscard]] Status get_nbi(int rank, void* dest, const void* source, std::size_t num_bytes, Stream stream = {});

  /// put, then `signal`: a rank that sees the signal by `wait_until` or `test` also sees the bytes.
  /// @param  word  symmetric address, in the memory of `rank` like `dest`
  [[nodiscard]] Status put_signal(int rank, void* dest, const void* source, std::size_t num_bytes, std::uint64_t* word,
                                  std::uint64_t value, SignalOp op, Stream stream = {});
  /// put_signal whose `source` may be reused only after a later `quiet`.
  [[nodiscard]] Status put_signal_nbi(int rank, void* dest, const void* source, std::size_t num_bytes,
                                      std::uint64_t* word, std::uint64_t value, SignalOp op, Stream stream = {});

  template <typename T>
  [[nodiscard]] Status put(int rank, T* dest, std::span<const std::type_identity_t<T>> source, Stream stream = {}) {
    static_assert(std::is_trivially_copyable_v<T>);
    return put(rank, static_cast<void*>(dest), source.data(), source.size_bytes(), stream);
  }
  template <typename T>
  [[nodiscard]] Status put_nbi(int rank, T* dest, std::span<const std::type_identity_t<T>> source, Stream stream = {}) {
    static_assert(std::is_trivially_copyable_v<T>);
    return put_nbi(rank, static_cast<void*>(dest), source.data(), source.size_bytes(), stream);
  }
  template <typename T>
  [[nodiscard]] Status get(int rank, std::span<T> dest, const std::type_identity_t<T>* source, Stream stream = {}) {
    static_assert(std::is_trivially_copyable_v<T>);
    return get(rank, static_cast<void*>(dest.data()), source, dest.size_bytes(), stream);
  }
  template <typename T>
  [[nodiscard]] Status get_nbi(int rank, std::span<T> dest, const std::type_identity_t<T>* source, Stream stream = {}) {
    static_assert(std::is_trivially_copyable_v<T>);
    return get_nbi(rank, static_cast<void*>(dest.data()), source, dest.size_bytes(), stream);
  }
  template <typename T>
  [[nodiscard]] Status put_signal(int rank, T* dest, std::span<const std::type_identity_t<T>> source,
                                  std::uint64_t* word, std::uint64_t value, SignalOp op, Stream stream = {}) {
    static_assert(std::is_trivially_copyable_v<T>);
    return put_signal(rank, static_cast<void*>(dest), source.data(), source.size_bytes(), word, value, op, stream);
  }

  // Words

  /// Set or add to the word at symmetric address `word` of `rank`. Has taken effect there after a later `quiet`.
  /// @errors kInvalidArgument: no such rank, a word that is misaligned or not in symmetric memory; kPeerLost
  [[nodiscard]] Status signal(int rank, std::uint64_t* word, std::uint64_t value, SignalOp op, Stream stream = {});
  [[nodiscard]] Status signal(int rank, std::uint32_t* word, std::uint32_t value, SignalOp op, Stream stream = {});

  /// Add `value` to the word on `rank`, atomically for all ranks; `fetched` gets the previous value. CPU: it is written
  /// on return. CUDA: for later work on the stream, in any memory that the GPU reaches. After an error `fetched` is
  /// unchanged.
  /// @errors as signal; kTimeout
  [[nodiscard]] Status fetch_add(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched,
                                 Stream stream = {});
  [[nodiscard]] Status fetch_add(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched,
                                 Stream stream = {});
  /// If the word on `rank` is `expected`, replace it by `desired`, atomically; `fetched` gets the previous value.
  [[nodiscard]] Status compare_swap(int rank, std::uint64_t* word, std::uint64_t expected, std::uint64_t desired,
                                    std::uint64_t* fetched, Stream stream = {});
  [[nodiscard]] Status compare_swap(int rank, std::uint32_t* word, std::uint32_t expected, std::uint32_t desired,
                                    std::uint32_t* fetched, Stream stream = {});
  /// Replace the word on `rank` by `value`, or by its bitwise and, or, exclusive or with `value`, like fetch_add.
  [[nodiscard]] Status swap(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched,
                            Stream stream = {});
  [[nodiscard]] Status fetch_and(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched,
                                 Stream stream = {});
  [[nodiscard]] Status fetch_or(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched,
                                Stream stream = {});
  [[nodiscard]] Status fetch_xor(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched,
                                 Stream stream = {});
  [[nodiscard]] Status swap(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched,
                            Stream stream = {});
  [[nodiscard]] Status fetch_and(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched,
                                 Stream stream = {});
  [[nodiscard]] Status fetch_or(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched,
                                Stream stream = {});
  [[nodiscard]] Status fetch_xor(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched,
                                 Stream stream = {});
  /// The same with the result on the host. CUDA: blocks the host until it is there, and uses no stream.
  [[nodiscard]] Result<std::uint64_t> fetch_add(int rank, std::uint64_t* word, std::uint64_t value);
  [[nodiscard]] Result<std::uint64_t> swap(int rank, std::uint64_t* word, std::uint64_t value);
  [[nodiscard]] Result<std::uint64_t> fetch_and(int rank, std::uint64_t* word, std::uint64_t value);
  [[nodiscard]] Result<std::uint64_t> fetch_or(int rank, std::uint64_t* word, std::uint64_t value);
  [[nodiscard]] Result<std::uint64_t> fetch_xor(int rank, std::uint64_t* word, std::uint64_t value);
  [[nodiscard]] Result<std::uint64_t> compare_swap(int rank, std::uint64_t* word, std::uint64_t expected,
                                                   std::uint64_t desired);
  [[nodiscard]] Result<std::uint32_t> fetch_add(int rank, std::uint32_t* word, std::uint32_t value);
  [[nodiscard]] Result<std::uint32_t> swap(int rank, std::uint32_t* word, std::uint32_t value);
  [[nodiscard]] Result<std::uint32_t> fetch_and(int rank, std::uint32_t* word, std::uint32_t value);
  [[nodiscard]] Result<std::uint32_t> fetch_or(int rank, std::uint32_t* word, std::uint32_t value);
  [[nodiscard]] Result<std::uint32_t> fetch_xor(int rank, std::uint32_t* word, std::uint32_t value);
  [[nodiscard]] Result<std::uint32_t> compare_swap(int rank, std::uint32_t* word, std::uint32_t expected,
                                                   std::uint32_t desired);

  /// Wait until the word at symmetric address `word` of THIS rank compares so with `value`. Everything that a
  /// put_signal published with that value, or a rank's operations before a `fence` and a signal, is visible then.
  /// @param  timeout_ns  deadline; 0: OneSidedOptions::timeout_ns
  /// @errors kInvalidArgument; kTimeout; kPeerLost: a rank was lost (any, since any may be the writer). CUDA: the
  ///         kernel ends, and `poll_errors` reports it
  [[nodiscard]] Status wait_until(const std::uint64_t* word, Comparison comparison, std::uint64_t value,
                                  Stream stream = {}, std::int64_t timeout_ns = 0);
  /// Whether the word compares so now, with the same visibility. Never waits, and progresses the network. CUDA: on the
  /// host.
  [[nodiscard]] Result<bool> test(const std::uint64_t* word, Comparison comparison, std::uint64_t value);

  // Order and completion

  /// Earlier puts, signals and atomics of this rank to `rank` arrive there before all later ones. Does not wait for
  /// them; a later operation to `rank` may.
  [[nodiscard]] Status fence(int rank, Stream stream = {});
  /// fence for each rank.
  [[nodiscard]] Status fence(Stream stream = {});
  /// Wait until everything that this rank has started is complete: puts, signals and atomics are visible at their
  /// targets, gets have arrived here.
  /// @errors kTimeout, kPeerLost: naming a rank whose answer is missing; a loss is reported once. CUDA: by poll_errors
  [[nodiscard]] Status quiet(Stream stream = {});
  /// quiet for the operations to `rank` alone, which waits for no other rank.
  /// @errors as quiet; kInvalidArgument: no such rank
  [[nodiscard]] Status quiet(int rank, Stream stream = {});
  /// quiet, then wait until all ranks of the team have called it too. Everything that they did before is visible to all
  /// of them afterwards.
  /// @errors kInvalidArgument: a team of another OneSided, or an invalid one; another collective call on the team
  ///         reached its deadline, is not over, and other ranks may have finished it (a barrier after another call, or
  ///         another call after a barrier: backend "cpu"); other ranks made another collective call (likewise);
  ///         kPeerLost: names the lost rank on every other one, unless it was through this barrier; kTimeout: the call
  ///         is not over; repeat it to continue, as with all collective calls
  [[nodiscard]] Status barrier(const Team& team, Stream stream = {});
  [[nodiscard]] Status barrier(Stream stream = {}) { return barrier(world(), stream); }

  // Teams

  Team world() const;  ///< all ranks
  Team node() const;   ///< the ranks of this node
  Team rail() const;   ///< the ranks with this rank's index in each node
  /// The ranks of `parent` that pass the same `colour`, ordered by `key`, then by rank. A negative colour: this rank
  /// joins no team and gets an invalid one.
  /// @sync   collective over `parent`. Blocks the host
  /// @errors kCapacity: a rank that would join has already joined kMaxTeams; as barrier
  [[nodiscard]] Result<Team> split(const Team& parent, int colour, int key = 0);

  // From kernels

  /// Argument of kernels for the calls of ferry/device/one_sided.cuh. Valid until this OneSided is gone; kernels that
  /// use it must be done by then.
  /// @errors kUnsupported: backend "cpu"
  [[nodiscard]] Result<device::World> device_world() const;
  /// The team, for the barrier in kernels, which is the same barrier.
  [[nodiscard]] Result<device::TeamView> device_team(const Team& team) const;

  // Errors and the end

  /// Errors of work on streams that has run so far; ok on backend "cpu", whose calls report errors themselves.
  /// @errors errors of the calls; kTimeout, from then on and also for other calls: the ring of requests to other nodes
  ///         is broken; names the rank that held it up, if one did (docs/one-sided-kernels.md); create the OneSided
  ///         again
  [[nodiscard]] Status poll_errors();
  /// Collective, optional: quiet, a barrier, then the end. Always ends: an error only reports that a peer was lost or
  /// late. Later calls return kInvalidArgument.
  Status destroy();

 private:
  explicit OneSided(std::unique_ptr<one_sided::Core> core);
  static Status size_overflow(std::string_view operation, std::size_t count, std::size_t element_bytes);

  std::unique_ptr<one_sided::Core> core_;
};

}  // namespace ferry

#endif  // FERRY_ONE_SIDED_HPP
