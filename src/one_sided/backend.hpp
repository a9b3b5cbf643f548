#ifndef FERRY_ONE_SIDED_BACKEND_HPP
#define FERRY_ONE_SIDED_BACKEND_HPP

/// Backend interface of the one-sided layer. Core (one_sided.cpp) checks arguments and converts symmetric addresses to
/// offsets in the heap; a backend moves bytes. Offsets and sizes in the structs below lie inside one block of the heap,
/// words are aligned, ranks and teams exist.
///
/// All backends share the *fabric* (fabric.hpp), the host's side: topology, links to the processes of the node, a host
/// heap that they map, the network engine with the thread that drives it (driver.hpp), barriers and exchanges between
/// hosts, and the detection of lost ranks. A CPU backend adds little to it. A CUDA backend creates a fabric too: for
/// its host collectives, and on several nodes for its driver, to which it attaches the rings that its kernels write
/// (RequestSource); the fabric's host heap is then the memory that the network reaches.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/backend.hpp"
#include "ferry/device/world.hpp"
#include "ferry/one_sided.hpp"
#include "ferry/status.hpp"

namespace ferry::one_sided {

/// Size of the entry that a rank shows to the others in a collective call of hosts. Plain bytes.
inline constexpr std::size_t kEntryBytes = 64;
using Entry = std::array<std::byte, kEntryBytes>;

/// Progress of a rank in an exchange: two barriers of the team, between which it shows its entry.
enum class ExchangeStep { kNone, kBegun, kMet, kShown };

/// A team, as its ranks see it. The words of a team are in one slot per rank. Each rank chooses its slot by itself and
/// never uses it for another team, so splits need not agree on a number: slots of different teams may overlap, and a
/// split that failed on some ranks uses up no slot of later ones.
struct TeamState {
  std::vector<int> ranks{};  ///< ranks in the world, by place
  std::vector<int> slots{};  ///< slots of these ranks, by place: below kMaxTeams
  int my_place = 0;
  const void* owner = nullptr;  ///< OneSided to which the team belongs, for checks

  int my_slot() const { return slots[static_cast<std::size_t>(my_place)]; }
  /// Number of the current meeting; between meetings, that of the next one.
  std::uint64_t number() const { return in_barrier ? num_barriers : num_barriers + 1; }

  /// Number of barriers of the host that this rank has begun on the team. The last one may have ended by its deadline:
  /// the next call then continues it after the steps in which this rank has already notified its mate.
  mutable std::uint64_t num_barriers = 0;
  mutable std::size_t num_told = 0;
  mutable bool in_barrier = false;
  mutable std::uint64_t kinds = 0;  ///< kinds of the current meeting (Fabric::Meeting) that this rank has heard of
  /// Announcements of the mates (notice.hpp), by place, at the end of a call by its deadline: they are out of date.
  mutable std::vector<std::uint64_t> stale_announcements{};
  /// Same state for the last exchange, and the entry that this rank shows in it.
  mutable ExchangeStep exchange_step = ExchangeStep::kNone;
  mutable Entry shown{};
};

/// put and get. `offset` is the offset of the range in the heap of `rank`.
struct PutCall {
  int rank = 0;
  std::size_t offset = 0;
  const std::byte* source = nullptr;
  std::size_t num_bytes = 0;
  bool blocking = true;  ///< the source may be reused when the call has returned
  Stream stream{};
};
struct GetCall {
  int rank = 0;
  std::size_t offset = 0;
  std::byte* dest = nullptr;
  std::size_t num_bytes = 0;
  bool blocking = true;
  Stream stream{};
};

struct SignalCall {
  int rank = 0;
  std::size_t offset = 0;
  std::uint64_t value = 0;
  SignalOp op = SignalOp::kSet;
  Stream stream{};
  std::size_t word_bytes = sizeof(std::uint64_t);  ///< 4 or 8
};

/// Atomics that return the previous value of the word.
enum class FetchOp : std::int32_t { kAdd, kCompareSwap, kSwap, kAnd, kOr, kXor };

/// Name of the call, for messages.
constexpr std::string_view name_of(FetchOp op) {
  constexpr std::array<std::string_view, 6> kNames = {"fetch_add", "compare_swap", "swap",
                                                      "fetch_and", "fetch_or",     "fetch_xor"};
  return kNames[static_cast<std::size_t>(op)];
}

struct FetchCall {
  int rank = 0;
  std::size_t offset = 0;
  FetchOp op = FetchOp::kAdd;
  std::size_t word_bytes = sizeof(std::uint64_t);  ///< 4 or 8; value and expected fit into the word
  std::uint64_t value = 0;
  std::uint64_t expected = 0;  ///< kCompareSwap
  Stream stream{};
};

struct WaitCall {
  std::size_t offset = 0;  ///< in this rank's heap
  Comparison comparison = Comparison::kEqual;
  std::uint64_t value = 0;
  std::int64_t timeout_ns = 0;
  Stream stream{};
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;
  /// True if `Stream::handle` may be non-null.
  virtual bool takes_streams() const = 0;

  /// This rank's heap, from which `allocate` takes blocks. It has the same size on every rank.
  virtual std::byte* heap() const = 0;
  virtual std::size_t heap_bytes() const = 0;
  /// Heap of `rank` for loads and stores of this rank; null if this rank cannot reach it. For this rank: heap().
  virtual std::byte* peer_heap(int rank) const = 0;
  /// Zeroes a range of this rank's heap. Blocks the host until the range is zero.
  virtual Status zero(std::size_t offset, std::size_t num_bytes) = 0;

  virtual Status put(const PutCall& call) = 0;
  virtual Status get(const GetCall& call) = 0;
  /// The signal is visible only after the bytes. `put.rank` is `signal.rank`.
  virtual Status put_signal(const PutCall& put, const SignalCall& signal) = 0;
  virtual Status signal(const SignalCall& call) = 0;
  /// `fetched` is memory for a word, aligned like one, that this rank's processor (CUDA: GPU, in stream order) can
  /// write.
  virtual Status fetch(const FetchCall& call, void* fetched) = 0;
  /// fetch with the result on the host, which waits for it.
  virtual Result<std::uint64_t> fetch_now(const FetchCall& call) = 0;
  virtual Status wait_until(const WaitCall& call) = 0;
  virtual Result<bool> test(const WaitCall& call) = 0;
  /// `rank`: kEveryRank for all.
  virtual Status fence(int rank, Stream stream) = 0;
  /// `rank`: kEveryRank for all.
  virtual Status quiet(int rank, Stream stream) = 0;
  virtual Status barrier(const TeamState& team, Stream stream) = 0;

  /// Exchanges an entry among the hosts of a team, after everything that this rank has started on any stream is
  /// complete: every rank gets all entries, by place. Collective. Blocks the host. Refused if another collective call
  /// of the team ended by its deadline: see Fabric.
  virtual Result<std::vector<Entry>> exchange(const TeamState& team, const Entry& mine) = 0;

  /// Last call: quiet, then a meeting of all ranks, then closes the memory that the network reaches. Blocks the host.
  virtual Status leave(const TeamState& world) = 0;
  /// See OneSided::device_world and ::device_team; for backends with calls on streams.
  virtual Result<device::World> device_world();
  virtual Result<device::TeamView> device_team(const TeamState& team);

  /// See OneSided::poll_errors.
  virtual Status poll_errors() { return {}; }
};

/// Parameters for the creation of a backend. `base.options` has ranks_per_node, timeout_ns, transport, net_devices and
/// device of the OneSidedOptions; all ranks have agreed on it and on `heap_bytes`, which is a multiple of a page.
struct Context {
  BackendContext base;
  std::size_t heap_bytes = 0;
};

/// One entry of the registry.
struct BackendFactory {
  std::string_view name;
  /// Ok if the backend can run on this machine, else the reason. No side effects.
  Status (*probe)();
  /// Collective: succeeds on all ranks or fails on all. The new backend's heap is zeroed.
  Result<std::unique_ptr<Backend>> (*create)(const Context& context);
};

/// The backends of this build, best first. Defined in src/registry.cpp.
std::span<const BackendFactory> backend_factories();

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_BACKEND_HPP
