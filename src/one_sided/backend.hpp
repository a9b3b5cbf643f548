#ifndef FERRY_ONE_SIDED_BACKEND_HPP
#define FERRY_ONE_SIDED_BACKEND_HPP

/// What a backend of the one-sided layer provides. Core (one_sided.cpp) checks arguments and turns symmetric addresses
/// into offsets in the heap; a backend moves bytes. Offsets and sizes in the structs below are inside one block of the
/// heap, words are aligned, ranks and teams exist.
///
/// Shared by all backends: the *fabric* (fabric.hpp), which is the host's side of things: topology, links to the
/// processes of the node, a host heap that they map, the network engine with the thread that drives it (driver.hpp),
/// barriers and exchanges between hosts, and who is lost. A CPU backend is little more than that. A CUDA backend
/// creates a fabric too: for its host collectives, and over several nodes for its driver, to which it attaches the
/// rings that its kernels write (RequestSource), with the fabric's host heap as the memory that the network reaches.

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

/// What ranks show each other in a collective call of hosts. Plain bytes.
inline constexpr std::size_t kEntryBytes = 64;
using Entry = std::array<std::byte, kEntryBytes>;

/// How far a rank is in an exchange: two barriers of the team, between which it shows its entry.
enum class ExchangeStep { kNone, kBegun, kMet, kShown };

/// A team as its ranks see it. The words of a team are in one slot of each of its ranks, which each chooses by itself
/// and uses for no other team ever, so that splits need not agree on a number: those of different teams may overlap,
/// and one that failed on some ranks takes nothing from later ones.
struct TeamState {
  std::vector<int> ranks{};  ///< of the world, by place
  std::vector<int> slots{};  ///< theirs, by place: below kMaxTeams
  int my_place = 0;
  const void* owner = nullptr;  ///< the OneSided it belongs to, for checks

  int my_slot() const { return slots[static_cast<std::size_t>(my_place)]; }

  /// Barriers of the host that this rank has begun on it. The last may have ended by its deadline: then the next call
  /// goes on with it, behind the steps in which this rank has told its mate that it has come.
  mutable std::uint64_t num_barriers = 0;
  mutable std::size_t num_told = 0;
  mutable bool in_barrier = false;
  mutable std::uint64_t kinds = 0;  ///< of Fabric::Meeting, that ranks have met for as far as this one has heard
  /// The same of the last exchange, and what this rank shows in it.
  mutable ExchangeStep exchange_step = ExchangeStep::kNone;
  mutable Entry shown{};
};

/// put and get. `offset` is that of the range in the heap of `rank`.
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
};

/// fetch_add and compare_swap.
struct FetchCall {
  int rank = 0;
  std::size_t offset = 0;
  bool swap = false;  ///< compare_swap
  std::uint64_t value = 0;
  std::uint64_t expected = 0;
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
  /// Whether `Stream::handle` may be non-null.
  virtual bool takes_streams() const = 0;

  /// This rank's heap: what `allocate` hands out. The same size on every rank.
  virtual std::byte* heap() const = 0;
  virtual std::size_t heap_bytes() const = 0;
  /// The heap of `rank` for loads and stores of this rank; null where it cannot reach it. This rank's own: heap().
  virtual std::byte* peer_heap(int rank) const = 0;
  /// Zeroes a range of this rank's heap. Blocks the host until it is done.
  virtual Status zero(std::size_t offset, std::size_t num_bytes) = 0;

  virtual Status put(const PutCall& call) = 0;
  virtual Status get(const GetCall& call) = 0;
  /// The signal is seen only after the bytes. `put.rank` is `signal.rank`.
  virtual Status put_signal(const PutCall& put, const SignalCall& signal) = 0;
  virtual Status signal(const SignalCall& call) = 0;
  /// `fetched` is any memory that this rank's processor (CUDA: GPU, in stream order) can write.
  virtual Status fetch(const FetchCall& call, std::uint64_t* fetched) = 0;
  /// The same with the result on the host, which waits for it.
  virtual Result<std::uint64_t> fetch_now(const FetchCall& call) = 0;
  virtual Status wait_until(const WaitCall& call) = 0;
  virtual Result<bool> test(const WaitCall& call) = 0;
  /// `rank`: kEveryRank for all.
  virtual Status fence(int rank, Stream stream) = 0;
  virtual Status quiet(Stream stream) = 0;
  virtual Status barrier(const TeamState& team, Stream stream) = 0;

  /// Between hosts, once everything that this rank has started on any stream is complete: every rank of the team gives
  /// an entry and gets all of them, by place. Collective. Blocks the host. Refused where another collective call of
  /// the team ended by its deadline: see Fabric.
  virtual Result<std::vector<Entry>> exchange(const TeamState& team, const Entry& mine) = 0;

  /// The last call: quiet, then a meeting of all ranks, then closes what the network reaches. Blocks the host.
  virtual Status leave(const TeamState& world) = 0;
  /// See OneSided::device_world and ::device_team; of backends whose calls are made on streams.
  virtual Result<device::World> device_world();
  virtual Result<device::TeamView> device_team(const TeamState& team);

  /// See OneSided::poll_errors.
  virtual Status poll_errors() { return {}; }
};

/// What a backend is created from. `base.options` has ranks_per_node, timeout_ns, transport, net_devices and device of
/// the OneSidedOptions; all ranks have agreed on it and on `heap_bytes`, which is a multiple of a page.
struct Context {
  BackendContext base;
  std::size_t heap_bytes = 0;
};

/// One entry of the registry.
struct BackendFactory {
  std::string_view name;
  /// Ok if the backend can run on this machine, else why not. No side effects.
  Status (*probe)();
  /// Collective: succeeds on all ranks or fails on all. Its heap is zeroed.
  Result<std::unique_ptr<Backend>> (*create)(const Context& context);
};

/// The backends of this build, best first. Defined in src/registry.cpp.
std::span<const BackendFactory> backend_factories();

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_BACKEND_HPP
