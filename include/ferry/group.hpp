#ifndef FERRY_GROUP_HPP
#define FERRY_GROUP_HPP

/// The ranks that exchange tokens, their memory, and the three calls: route, dispatch, combine.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/channel_tables.hpp"
#include "ferry/exchange.hpp"
#include "ferry/export.hpp"
#include "ferry/latency.hpp"
#include "ferry/memory.hpp"
#include "ferry/routing.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

class Backend;           // private
class CallGate;          // private
class CallNumbers;       // private
class CallPass;          // private
class ErrorLog;          // private
class ExpertPlacements;  // private
class LatencyCalls;      // private

/// Size of each rank's arena unless an option sets another. Address space only: memory is taken as it is allocated.
/// Room for a batch of 16,384 tokens of 14 KiB in and out at K = 8 (2.1 GB in, at most 15 GB out).
inline constexpr std::size_t kDefaultArenaBytes = std::size_t{32} << 30;

/// Deadline of a group's waits unless an option sets another. A rank that dies or leaves is noticed in a fraction of a
/// second whatever the deadline, so the deadline matters only for ranks that live but never make the call, and for
/// hosts that vanish. Ten minutes are longer than a healthy rank takes between two calls in which it loads a model,
/// compiles kernels or captures graphs, and are what most collective libraries allow.
inline constexpr std::int64_t kDefaultCallTimeoutNs = 600 * kNsPerSecond;

/// GroupOptions::mask_timeout_ns unless an option sets another: long enough for a rank that compiles or loads in the
/// middle of serving, and the time other libraries wait before they mask a rank.
inline constexpr std::int64_t kDefaultMaskTimeoutNs = 100 * kNsPerSecond;

/// GroupOptions::ranks_per_node: as 0, for hosts with different numbers of ranks, and ranks in any order. Nodes are as
/// large as can be so that all are equal and none is on two hosts; 7 ranks on one host and 8 on another are 15 nodes.
inline constexpr int kDividedHosts = -1;

/// GroupOptions::device: the GPU that is current on the thread that calls Group::create.
inline constexpr int kCurrentDevice = -1;

/// GroupOptions::num_reserved_sms: the variable FERRY_RESERVED_SMS if it is set, else 32.
inline constexpr int kDefaultReservedSms = -1;

/// GroupOptions::network_poll_ns: the variable FERRY_NETWORK_POLL if it is set, else a second.
inline constexpr std::int64_t kDefaultNetworkPoll = 0;
/// GroupOptions::network_poll_ns: without end.
inline constexpr std::int64_t kAlwaysPoll = -1;

/// GroupOptions::network_service_level: the network library's choice.
inline constexpr int kDefaultServiceLevel = -1;
/// InfiniBand's largest service level (InfiniBand Architecture Specification: four bits).
inline constexpr int kMaxServiceLevel = 15;
/// Most connections of GroupOptions::network_paths: as many as UCX makes to a peer.
inline constexpr int kMaxNetworkPaths = 16;

/// Options of Group::create. The same on every rank, except `arena_bytes`, `device`, `num_reserved_sms`,
/// `network_poll_ns`, `net_devices`, `network_service_level`, `network_paths`, `tuning_file` and `interrupted`.
struct GroupOptions {
  std::string backend = "auto";  ///< "auto" (best that works here) or a name from `ferry::backends()`
  /// Number of ranks that can load and store each other's memory; ranks are node-major. 0: the ranks of each host,
  /// which must be consecutive and equally many on all hosts; containers that do not share a network count as hosts.
  /// kDividedHosts (-1): hosts may differ.
  int ranks_per_node = 0;
  std::size_t arena_bytes = kDefaultArenaBytes;  ///< most symmetric memory this rank can allocate, staging included
  /// Deadline of every wait inside create, route, dispatch, combine and destroy, and of allocate's wait for the peers.
  std::int64_t timeout_ns = kDefaultCallTimeoutNs;
  /// Backend "cuda": ordinal of this rank's GPU, -1 for the calling thread's current one. Several ranks may share a
  /// GPU.
  int device = kCurrentDevice;
  /// Backend "cuda": multiprocessors of the GPU on which no block of Ferry waits for other ranks, so that kernels of
  /// other libraries that wait for other ranks too, such as NCCL's, always get to run beside Ferry's. Without them a
  /// rank whose Ferry call waits for a rank whose NCCL kernel came first, and which waits for this rank's NCCL kernel,
  /// would wait until the deadline. -1: the variable FERRY_RESERVED_SMS if it is set, else 32, which is as many as an
  /// NCCL kernel takes unless NCCL_MIN_CTAS asks for more, or half of the GPU's if that is less, or 0 where ranks share
  /// a GPU, which NCCL refuses. 0: none. Each rank keeps at least two of its multiprocessors. A call whose
  /// KernelOptions::num_sms is not 0 takes that number instead. Less than -1, or a variable that is no number, is
  /// kInvalidArgument.
  int num_reserved_sms = kDefaultReservedSms;
  /// Network between nodes, if there are several: "auto" (best that works here) or a name from `ferry::transports()`.
  /// "loopback" joins threads of one process, for tests; "auto" never chooses it.
  std::string transport = "auto";
  /// Backend "cuda", several nodes: memory of the rings between nodes, and of rows of latency mode that cross them.
  /// "host": pinned memory. "gpu": GPU memory that network cards read and write (GPUDirect, not yet run on a card);
  /// if it is not available, create returns kUnsupported and lists what is missing, as does `gpu_direct_facts`. "auto":
  /// the variable FERRY_RING_MEMORY if it is set, else "gpu" where every rank has a card near its GPU and these cards
  /// prove to reach the GPUs, else "host", the same on all ranks, for rings and for rows; NetworkUsage says why.
  std::string ring_memory = "auto";
  /// Backend "cuda", several nodes: how long the thread that drives the network polls after the last movement. Later a
  /// replayed graph waits up to 20 ms until the thread is awake again; calls that the host makes wake it themselves.
  /// kAlwaysPoll (-1): it never sleeps, and takes a core of the host from the first call until the group ends; for
  /// programs that replay graphs after pauses. kDefaultNetworkPoll (0): the variable FERRY_NETWORK_POLL, which is a
  /// number of seconds or "always", if it is set, else a second. Other negative numbers and more than a day are
  /// kInvalidArgument.
  std::int64_t network_poll_ns = kDefaultNetworkPoll;
  /// Devices through which ranks of other hosts may reach this rank, separated by commas: "eth0", "mlx5_0:1,mlx5_1:1";
  /// "all": every one. For InfiniBand or RoCE name the card's ports, since an interface ("ib0") only carries TCP.
  /// Empty: the variable FERRY_NET_DEVICES, else the active port of an RDMA card that is nearest to the rank's GPU (for
  /// CPU ranks every active port), among the fastest of the link layer that all ranks have, and the one interface that
  /// leads to rank 0. Ranks whose ports have no layer in common are kUnsupported. The variable UCX_NET_DEVICES
  /// overrides all of them. Ranks of one host use shared memory and the loopback interface among themselves, never
  /// these devices.
  std::string net_devices{};
  /// InfiniBand service level of what this rank sends to other hosts, 0 to 15; on RoCE v2 the Ethernet priority. Only
  /// network cards have one: between ranks of a host, over TCP and on one node it has no effect, and
  /// NetworkUsage::service_level says so. kDefaultServiceLevel (-1): UCX's choice. The variable UCX_IB_SL overrides it.
  /// Has run over a stand-in for a card alone.
  int network_service_level = kDefaultServiceLevel;
  /// Connections (queue pairs) of a card to each rank of another host that puts are spread over, 1 to 16. UCX may make
  /// fewer; RailUsage::route lists them. Effect and NetworkUsage::num_paths as for `network_service_level`. 0: UCX's
  /// choice. With a card it takes UCX 1.15, else create returns kUnsupported. The variables UCX_IB_NUM_PATHS and
  /// UCX_MAX_RMA_RAILS override it.
  int network_paths = 0;
  /// Backend "cuda": a file that `ferry tune --out` wrote. Its settings replace the built-in defaults wherever a call's
  /// KernelOptions are 0, if it has settings for this GPU, number of ranks and row size. They change no result. Empty:
  /// the file that the variable FERRY_TUNING names, if it is set; "builtin": no file. Read by Group::create on every
  /// backend; a missing or malformed file is kInvalidArgument.
  std::string tuning_file{};
  /// Backend "cuda": symmetric memory that receives latency mode's rows, taken when the group is created; a multiple of
  /// a page is used. `latency_bytes_required` computes the size; calls that need more are kCapacity. 0: the group makes
  /// no such calls. Over several nodes a group of at most 128 ranks may have it, and takes memory of the host besides,
  /// or of the GPU (`ring_memory`, docs/latency-gpus.md). Other backends need none and take none.
  std::size_t latency_bytes = 0;
  /// Latency mode continues without lost ranks: a call that waits in vain for a rank masks it (see
  /// Group::latency_update_mask) instead of breaking the group. All other calls still need every rank. Calls of latency
  /// mode take longer in such a group; docs/latency-masks.md says how much. Ranks of one node only, else create is
  /// kUnsupported.
  bool mask_lost_ranks = false;
  /// With `mask_lost_ranks`, the deadline of every wait inside a call of latency mode, in place of `timeout_ns`: a rank
  /// that has not arrived by then is masked. A rank that has died, left or given up is masked as soon as that is
  /// noticed, in a fraction of a second. A rank that is itself waiting for others gets twice that time, on GPUs four
  /// times. Must be far longer than the usual delay between ranks at the start of a call.
  std::int64_t mask_timeout_ns = kDefaultMaskTimeoutNs;
  /// Ranks of the group, of which only `present_ranks` have a process. 0: as many as the bootstrap has.
  int num_ranks = 0;
  /// [members] rank in the group of each rank of the bootstrap, ascending. The other ranks are *absent* until
  /// Group::renew brings them in: calls of latency mode are made without them, others are kInvalidArgument. Empty: all
  /// ranks are present, in order.
  std::vector<int> present_ranks{};
  /// Checksums on request: each row that a call moves, with its scales, ids and weights, carries a checksum from its
  /// source to its final row, and so does each row that combine sums. A difference breaks the group with kDataCorrupt,
  /// which names the hop, the call, the first wrong row and how many there are. Costs time and memory
  /// (MemoryShape::verify); docs/verify.md says how much, what is covered and how surely errors are found. Where it is
  /// not covered create is kUnsupported.
  bool verify = false;
  /// Called about ten times a second while the host waits for other ranks in route, dispatch, combine, destroy or a
  /// call of latency mode, by the thread that makes the call; true ends the wait. That breaks the group as if this rank
  /// were lost: its call returns kPeerLost with this rank as `peer`, and so do the calls of other ranks that still need
  /// it, or their next calls. Must not throw or call the group, and must return soon: this rank does nothing for the
  /// others meanwhile. For programs that handle signals or shut down while others are late; empty: every wait lasts
  /// until it succeeds or reaches its deadline. Not called in latency mode with `mask_lost_ranks` on CPUs, nor by a
  /// call that waits for its turn behind another thread's call. On GPUs it covers the host's wait in route for exact
  /// counts; waits of kernels have only deadlines.
  std::function<bool()> interrupted{};
};

/// Position of a rank in the group. Ranks are node-major: rank = node_idx * ranks_per_node + index inside the node.
struct Topology {
  int rank = 0;
  int num_ranks = 1;
  int ranks_per_node = 1;

  int num_nodes() const { return num_ranks / ranks_per_node; }
  int node_of(int any_rank) const { return any_rank / ranks_per_node; }
  int rail_of(int any_rank) const { return any_rank % ranks_per_node; }
};

/// Symmetric memory: a block of this rank's arena that peers of its node can reach, so that dispatch into it and
/// combine out of it need no staging copy. Move-only owner; its destructor frees the memory. It may outlive its Group.
/// CUDA: it may be dropped while calls of its Group that use it are in flight; its memory is reused only when those are
/// done. The program's own work with it, and replays of captured calls, must be done before.
class FERRY_API Buffer {
 public:
  Buffer() = default;
  Buffer(std::shared_ptr<void> owner, void* data, std::size_t size_bytes)
      : owner_(std::move(owner)), data_(data), size_bytes_(size_bytes) {}
  Buffer(Buffer&&) = default;
  Buffer& operator=(Buffer&&) = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  std::shared_ptr<void> owner_;
  void* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

/// Traffic from a rank to one of its rail peers (the ranks with its index in the other nodes) since its group was
/// created. Latency mode of GPU ranks: to all ranks of that node.
struct RailUsage {
  int rank = 0;                    ///< the rail peer
  std::uint64_t sent_bytes = 0;    ///< payload, tables and call headers handed to the network
  std::uint64_t num_messages = 0;  ///< puts and notifications
  std::string route;               ///< path to the peer as named by the engine, e.g. "tcp"
};

struct NetworkUsage {
  std::string transport;         ///< the engine in use; empty with one node
  std::vector<RailUsage> rails;  ///< by node, without this rank's own node
  /// Devices through which ranks of other hosts may reach this rank; empty if all its rail peers are on its host.
  std::string net_devices{};
  std::string ring_memory{};  ///< memory of the rings: "host" or "gpu"; empty with one node
  /// Why that is not "gpu", in one clause: "rank 3 has no RDMA card near its GPU". Empty if it is, or with one node.
  std::string why_host_memory{};
  /// GroupOptions::network_service_level and network_paths as they were given to this rank's network cards; the
  /// defaults (-1 and 0) if nothing was asked for, a variable of UCX overrides it, or no card is used.
  int service_level = kDefaultServiceLevel;
  int num_paths = 0;
};

/// Set of ranks that exchange tokens. Create and destroy are collective; so are route, dispatch and combine: every rank
/// calls them in the same order. On a CPU group they block until done. On a CUDA group they put work on the stream and
/// return; `wait` reports the result.
///
/// Failure: bad arguments on any rank give the same kInvalidArgument or kCapacity on every rank, nothing is sent and
/// the group stays usable. kTimeout and kPeerLost name the rank, break the group (every later call returns the same),
/// and leave outputs unspecified; destroy it and create a new one from the surviving ranks. Threads: calls of a Group
/// run one after the other, whichever threads make them, so the program must keep each rank's order of calls;
/// `allocate` and `poll` may run at the same time as a call, other accessors only between calls, and none during
/// `destroy`, `suspend` and `renew`. Different Groups are independent; a process may have any number of them. In a
/// forked process all calls return kInvalidArgument, accessors return empty values, and dropping a copy of a Group or
/// Buffer has no effect on other ranks.
class FERRY_API Group {
 public:
  /// Collective over the ranks of `bootstrap`, which is used only during this call; one bootstrap may serve many
  /// groups.
  /// @errors kInvalidArgument: options out of range, a network device that does not exist (the message lists those
  ///         that do), or ranks disagree (the message names both values and both ranks)
  ///         kUnsupported: the backend cannot run here, or not across these hosts; hosts have different numbers of
  ///         ranks, or ranks that are not consecutive; versions of the network's library differ; ring_memory is not
  ///         available
  ///         kTimeout, kPeerLost, kTransport: as the bootstrap reports; kSystem: memory or descriptors ran out
  [[nodiscard]] static Result<std::shared_ptr<Group>> create(std::shared_ptr<Bootstrap> bootstrap,
                                                             const GroupOptions& options = {});
  /// Leaves the group without waiting for other ranks.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return topology_.rank; }
  int num_ranks() const { return topology_.num_ranks; }
  const Topology& topology() const { return topology_; }
  /// Name of the backend in use, e.g. "cpu".
  std::string_view backend() const;

  /// Allocate `bytes` of symmetric memory, aligned to a page, zeroed. Local: ranks need not agree on sizes or order.
  /// @errors kCapacity: the arena is full (the message gives the free size); kSystem: the machine is out of memory
  Result<Buffer> allocate(std::size_t bytes);

  /// Symmetric memory now in use on this rank.
  MemoryUsage memory_usage() const;

  /// Free staging that earlier calls allocated and that no rank can still use; later calls allocate again as needed.
  /// Local, between calls: ranks need not agree on when, and the call waits for no rank. It keeps buffers from
  /// `allocate`, Routings, memory that the group needs for its whole life, and the tables of a route after which this
  /// rank has made no dispatch or combine, as peers may be behind.
  /// CPU: the pages go back to the system. CUDA: blocks go back to this rank's arena, for `allocate` and later calls,
  /// as soon as the calls that use them have finished on the GPU; memory of captured graphs stays. The arena keeps its
  /// device memory until the group ends.
  /// @errors kInvalidArgument: the group was destroyed; on a broken group, its error. Both: nothing is freed
  [[nodiscard]] Status trim();

  /// Traffic of this rank to other nodes so far. Empty with one node.
  NetworkUsage network_usage() const;

  /// [R] nanoseconds that calls of this rank have waited so far for each rank: a slow rank shows in the other ranks'
  /// numbers for it. Waits that end within microseconds are not counted. A wait for several ranks counts for each rank
  /// that is missing; over several nodes the time may count for a rank that itself waits for the late one.
  /// CUDA: at the beginning and end of route, dispatch and combine, kernels count how long a rank of the node is
  /// missing, once that wait is over; longer waits for rows, for rail peers of other nodes and in latency mode are
  /// counted at every 64th poll (40 us and more). Time in which several threads wait for the same rank counts once.
  /// @sync   reads host memory; never waits for the GPU
  std::vector<std::int64_t> wait_times_ns() const;

  /// Exchange counts and assign every slot.
  /// @shape  topk_idx [T, K] i32|i64, topk_weights [T, K] f32
  /// @sync   CPU: blocks until all ranks have routed. CUDA: blocks until the counts are known, unless rows are bounded
  ///         (max_recv_rows or kSlab; over several nodes tokens too, by max_tokens): then it never blocks and may be
  ///         captured in a graph; keep the Routing as long as the graph; each replay routes the ids that are then in
  ///         the same topk_idx
  /// @errors kInvalidArgument: shape, dtype, pointer, id outside [-1, E), options that differ between ranks
  ///         kCapacity: more rows than max_recv_rows, slab_capacity or 2^31 - 1 (names rank, expert, rows); kTimeout,
  ///         kPeerLost
  /// @param  while_waiting  CUDA: called at most once, on this thread, when the GPU has been given the exchange and
  ///         the host is about to wait for the counts: time for work that needs no counts. It must not throw, and may
  ///         call no function of the group but `allocate`. A route that never waits never calls it. The tables that it
  ///         returns, of layout kTokens, are written on the stream, as by `channel_tables`; invalid ones give
  ///         kInvalidArgument, and the Routing is lost
  [[nodiscard]] Result<Routing> route(const RouteInput& in, const RouteOptions& options, Stream stream = {},
                                      const std::function<EarlyTables()>& while_waiting = {});

  /// Copy each token to its final rows on the ranks that own its experts. Outputs are a pure function of inputs. The
  /// same Routing may be dispatched many times (cached), with any payload.
  /// @shape  in.x [T, H] -> out.x [rows, H]; see DispatchInput and DispatchOutput
  /// @post   rows that hold tokens are written; other rows according to DispatchOptions
  /// @sync   CPU: blocks until this rank has received everything and its inputs may be reused. CUDA: the same holds
  ///         for later work on the stream; never blocks the host, may be captured in a graph
  /// @errors kInvalidArgument; kCapacity: an arena has no room to stage memory that peers cannot reach (both: nothing
  ///         sent, nothing changed, on every rank); kTimeout, kPeerLost; kSystem: out of memory while staging (breaks
  ///         the group); kDataCorrupt: a row is not as it was sent, see GroupOptions::verify (breaks the group)
  [[nodiscard]] Status dispatch(const Routing& routing, const DispatchInput& in, const DispatchOutput& out,
                                Stream stream = {}, const DispatchOptions& options = {});

  /// Return the experts' rows to their source ranks and sum them there. The gradient of an unweighted combine is a
  /// dispatch of the gradient with the same Routing, and vice versa.
  /// @shape  in.x [rows, H] -> out.x [T, H]; see CombineInput and CombineOutput
  /// @sync   as dispatch: this rank's sums are done and its inputs may be reused
  /// @errors as dispatch
  [[nodiscard]] Status combine(const Routing& routing, const CombineInput& in, const CombineOutput& out,
                               Stream stream = {}, const CombineOptions& options = {});

  /// Latency mode: route a small batch and dispatch it into a slab, without a prior exchange of counts and without a
  /// wait of the host for them. The results, and the Routing, are those of `route` with layout kSlab and `dispatch`,
  /// bit for bit.
  /// @shape  in.x [T, H] -> out.x [L, C, H]; see LatencyDispatchInput and LatencyDispatchOutput
  /// @post   rows that hold tokens are written, others according to LatencyDispatchOptions::zero_padding. The Routing's
  ///         views are available at once; their contents, its counts and the rows are valid when the call is over: when
  ///         it, or with `split` its receive half, returns (CPU) or has run on the stream (CUDA)
  /// @sync   Every rank makes the send halves of all calls in the same order; receive halves may be made in any order,
  ///         with any calls between them. At most kMaxLatencyCallsInFlight dispatches may be split and not received.
  ///         CPU: blocks until done; a send half returns at once, and its inputs are read, and its outputs written,
  ///         until its receive half or the next collective call of any kind is over.
  ///         CUDA: never blocks the host; may be captured in a graph, each replay of which routes the ids that are then
  ///         in the same topk_idx (keep the Routing as long as the graph); inputs may be reused by later work on the
  ///         stream. A send half does not wait for other ranks' rows; between the halves no kernel of the group is
  ///         resident
  /// @errors kInvalidArgument: shape, dtype, pointer, id, options that differ between ranks; too many dispatches in
  ///         flight, or a slab into which another dispatch has yet to be received. kCapacity: more tokens than
  ///         max_tokens, more rows for an expert than slab_capacity (names rank, expert, rows), too small
  ///         latency_bytes. Both: on every rank; a peer's are found by the receive half, this rank's by the call
  ///         itself, which then may wait for the peers. kTimeout, kPeerLost, kDataCorrupt as in other calls.
  ///         kUnsupported: more experts or tokens than a backend counts
  [[nodiscard]] Result<Routing> latency_dispatch(const LatencyDispatchInput& in, const LatencyDispatchOutput& out,
                                                 const LatencyDispatchOptions& options, Stream stream = {});

  /// Latency mode: return the experts' rows of a received Routing of `latency_dispatch`, and sum them, weighted. May be
  /// called many times on one Routing, one after the other.
  /// @shape  in.x [L, C, H] -> out.x [T, H]; see LatencyCombineInput and LatencyCombineOutput
  /// @sync   as latency_dispatch; at most kMaxLatencyCallsInFlight combines may be split and not received
  /// @errors as latency_dispatch; kInvalidArgument also for a Routing of another call, or one not yet received
  [[nodiscard]] Status latency_combine(const Routing& routing, const LatencyCombineInput& in,
                                       const LatencyCombineOutput& out, Stream stream = {},
                                       const LatencyCombineOptions& options = {});

  /// Receive half of the latest split call on `routing`: its dispatch, or its combine. A call whose Routing is dropped
  /// before stays in flight; on a CPU group until the next collective call.
  /// @sync   CPU: blocks until that call is done. CUDA: it is done for later work on the stream, which need not be the
  ///         stream of the send half; never blocks the host, may be captured
  /// @errors kInvalidArgument: no call on that Routing is waiting to be received (no other rank is involved); errors
  ///         that a peer's half of the call reveals, see latency_dispatch
  [[nodiscard]] Status latency_receive(const Routing& routing, Stream stream = {});

  /// Latency mode, in groups created with GroupOptions::mask_lost_ranks: mask a rank, or unmask it. Calls of latency
  /// mode that wait for a rank in vain (mask_timeout_ns) also mask it, and return ok. From then on this rank's calls of
  /// latency mode neither wait for a masked rank nor send to it, as if it had no tokens and no experts:
  ///   - latency_dispatch: it has 0 tokens, so no row, count, range or source is its; picks of its experts get no
  ///     slot (-1). If it is lost between the arrival of its tokens and the end of the call, they may still count. With
  ///     a Placement, tokens of calls that begin while it is masked pick none of its homes, unless an expert has no
  ///     others: the rule of Placement applies to the remaining homes.
  ///   - latency_combine: picks of its experts add nothing, whether it was masked in the dispatch or since. Weights of
  ///     the others are not scaled up.
  /// Masks belong to this rank: ranks do not agree on them. Where ranks differ, each rank's results follow its own
  /// mask: a rank masks the ranks that mask it when it learns of that, in its next call, and a refusal that depends on
  /// the ranks taking part (kCapacity) may then reach some ranks only. So a program that masks by hand does so on all
  /// ranks between the same two calls.
  ///
  /// A masked rank may return if it is still in the group and has made all calls that the others have made, in the same
  /// order: its own calls return too, with the tokens of the ranks that it does not mask, perhaps itself only. Unmask
  /// on all ranks, the masked one included, between the same two calls, when no call is in flight, with a barrier of
  /// the program's own before and after (of its bootstrap, not a call of this group); Routings made before can no
  /// longer be combined. Unmasking a rank that is lost costs the next call another wait for it.
  /// @param  rank    any but this one
  /// @sync   local. CPU: effective from this rank's next call, counted by send halves: split calls that are in flight
  ///         are made first. CUDA: effective for later work on `stream`; never blocks the host, may be captured
  /// @errors kInvalidArgument: the group does not mask, or `rank` is this rank or no rank of the group; kCapacity: a
  ///         CUDA group without latency_bytes; kCuda: the launch failed; in a broken group, its error
  [[nodiscard]] Status latency_update_mask(int rank, bool masked, Stream stream = {});

  /// out[r] = 1 if rank r is masked on this rank, else 0.
  /// @shape  out [R] i32, contiguous
  /// @sync   as latency_update_mask
  /// @errors as latency_update_mask; kInvalidArgument: dtype, shape, pointer
  [[nodiscard]] Status latency_query_mask(const TensorView& out, Stream stream = {});

  /// Unmask all ranks: latency_update_mask(r, false) of each other rank.
  [[nodiscard]] Status latency_clear_mask(Stream stream = {});

  /// Ends this rank's part in the group until `renew`: ranks that wait for it in latency mode mask it at once if they
  /// mask lost ranks, and other calls of theirs fail as if it had left. For a rank that has lost another one and asks
  /// Membership::next_view, so that none waits for its calls meanwhile. Local. Calls before renew are kInvalidArgument.
  /// @return the silent ranks, for NextViewOptions::silent_ids, ascending, without absent ones. If the group masks lost
  ///         ranks and is not broken: those that this rank has masked and that did not mask it. Else those whose
  ///         processes have ended and, if a call was kTimeout, the one that it named
  /// @sync   waits until this rank's calls have run. Replays of captured graphs must be done
  /// @errors kInvalidArgument: the group is suspended, or was destroyed; kUnsupported: several nodes; kCuda
  [[nodiscard]] Result<std::vector<int>> suspend();

  /// Goes on with the processes that are there now, in a group of one node: collective over the ranks of `bootstrap`,
  /// which have the ranks `present_ranks` in the group (see GroupOptions). Ranks that stay call it after `suspend` or
  /// between calls, when no replay of a graph is running; processes that take the place of lost ones call Group::create
  /// meanwhile, with the group's options, `num_ranks` and the same `present_ranks`. A Membership has both arguments:
  /// `bootstrap()`, and the ids of its view if it began with the ranks of this group.
  ///   - What stays: rank, options, and on GPUs all memory at its addresses. Captured graphs of latency mode, with
  ///     their Routings, remain valid: replays are made with the ranks that are present then. A new process makes the
  ///     calls of such a graph, captured or not, with the same arguments.
  ///   - What ends: other Routings, split calls that were not received, an error that broke the group, and all masks.
  ///     Then calls of latency mode are made without the absent ranks; if the group masks lost ranks, those are masked
  ///     on every rank, and no others. On CPUs buffers from `allocate` stay the caller's memory, but peers no longer
  ///     reach them without staging.
  ///   - A process that was left out and still runs reaches no memory that calls of latency mode read from then on.
  /// @errors as create; kUnsupported: several nodes, GPU memory that cannot be shared as file descriptors, or a new
  ///         rank that is on another host or a thread of a process that stays; kInvalidArgument also if this rank is
  ///         not at its place in `present_ranks`. Then the group is as after `suspend`, and may be renewed with another
  ///         view; several nodes or a null bootstrap change nothing
  [[nodiscard]] Status renew(std::shared_ptr<Bootstrap> bootstrap, const std::vector<int>& present_ranks);

  /// Fill tables of a Routing of layout kTokens by channels. Local: no other rank takes part.
  /// @sync   as dispatch, without its waits for other ranks. Where rows are bounded and the route was refused, every
  ///         entry is 0, or -1 in source_token and send_index
  /// @errors kInvalidArgument: a Routing of another group or layout, num_channels outside [1, kMaxChannels], shape,
  ///         dtype, pointer (nothing is written); kCuda: the launch failed
  [[nodiscard]] Status channel_tables(const Routing& routing, int num_channels, const ChannelTables& out,
                                      Stream stream = {});

  /// Wait on the host until this rank's work on `stream` is done, and report errors of any call since the last `wait`,
  /// on any stream. On a CPU group each call reports its own errors and this returns at once. On a CUDA group a call
  /// returns ok once its own rank's arguments are good; errors that only the exchange reveals (a peer's bad arguments,
  /// too many rows, a lost peer) are reported here. A lost or late peer is also reported by every later call.
  /// @sync   CUDA: blocks until the stream is idle; not while it is being captured
  /// @errors those of the calls; kCuda: the stream failed
  [[nodiscard]] Status wait(Stream stream = {});

  /// The report of `wait` for calls that have run so far, without waiting for any: ok may still become an error.
  /// @errors those of the calls
  [[nodiscard]] Status poll();

  /// Collective, optional: wait until every rank is done with this group, then leave it. Always leaves: an error only
  /// reports that a peer was lost or late. Later calls on the group return kInvalidArgument.
  Status destroy();

 private:
  Group(Topology topology, std::unique_ptr<Backend> backend, const GroupOptions& options);
  void begin_calls();
  Status check_usable(std::string_view operation) const;
  bool can_be_asked() const;
  Status enter(std::string_view operation, CallPass& pass);
  Status enter_together(std::string_view operation, CallPass& pass);
  Status take_turn(std::string_view operation, CallPass& pass);
  Status check_mask(std::string_view operation, Stream stream) const;
  Status check_stream(std::string_view operation, Stream stream) const;
  Status check_routing(std::string_view operation, const Routing& routing) const;
  Status noted(Status status) const;

  Topology topology_;
  std::unique_ptr<GroupOptions> options_;
  bool is_suspended_ = false;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<ExpertPlacements> placements_;
  std::unique_ptr<LatencyCalls> latency_calls_;
  std::unique_ptr<CallNumbers> numbers_;
  std::unique_ptr<CallGate> gate_;
  std::unique_ptr<ErrorLog> errors_;
  std::shared_ptr<const void> identity_;  // shared with every Routing of this group, to recognise it
};

}  // namespace ferry

#endif  // FERRY_GROUP_HPP
