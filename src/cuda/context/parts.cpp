#include "cuda/context/parts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/create_together.hpp"
#include "core/log.hpp"
#include "cuda/context/device_facts.hpp"
#include "cuda/context/first_epoch.hpp"
#include "cuda/context/gpu_direct.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/driver/driver.hpp"
#include "net/numa.hpp"

namespace ferry::cuda {
namespace {

/// Most thread blocks of an NCCL kernel unless NCCL_MIN_CTAS asks for more, each on a multiprocessor of its own.
constexpr int kNcclSms = 32;
/// One block that reports and one that moves rows.
constexpr int kLeastWaitingSms = 2;
/// Memory that the hosts share: the call log and the words of CallSync. No token is ever stored there.
constexpr std::size_t kHostArenaBytes = std::size_t{1} << 20;
/// The same over several nodes, where the hosts route: addresses for the forward tables of a million tokens and more.
/// Pages are taken as they are used.
constexpr std::size_t kNodesHostArenaBytes = std::size_t{256} << 20;

std::atomic<std::uint64_t>& first_epoch() {
  static std::atomic<std::uint64_t> epoch{0};
  return epoch;
}

/// A rank's message about its GPU and its call log. Plain bytes, exchanged through the bootstrap.
struct RankFacts {
  cudaUUID_t uuid{};
  std::int64_t last_record = 0;
};

struct SharedFacts {
  int num_sharers = 0;           ///< ranks that use this rank's GPU
  std::int64_t last_record = 0;  ///< latest number in a call log of any rank
};

/// Collective.
Result<SharedFacts> share_facts(const BackendContext& context, const Status& my_status, const RankFacts& mine) {
  Result<std::vector<std::vector<std::byte>>> all =
      gather_or_fail(*context.bootstrap, my_status, std::as_bytes(std::span(&mine, 1)), context.options.timeout_ns);
  if (!all.ok()) return all.status();
  SharedFacts shared;
  for (const std::vector<std::byte>& bytes : *all) {
    RankFacts theirs;
    if (bytes.size() != sizeof(theirs)) continue;  // absent
    std::memcpy(&theirs, bytes.data(), sizeof(theirs));
    shared.num_sharers += std::memcmp(&theirs.uuid, &mine.uuid, sizeof(mine.uuid)) == 0 ? 1 : 0;
    shared.last_record = std::max(shared.last_record, theirs.last_record);
  }
  return shared;
}

/// Writes what the zeroed memory of latency mode holds before the first call.
Status fill_latency_memory(const BackendContext& context, StartLatency start_latency, Parts& parts) {
  const cudaStream_t stream = parts.stream->get();
  Status status = start_latency(parts, context.topology.num_ranks, stream);
  if (!status.ok()) return status;
  return runtime_status(cudaStreamSynchronize(stream), "Group::create: filling the memory of latency mode");
}

/// Memory of latency mode: at the same place of every rank's arena, since all ranks have agreed on its size.
Status make_latency_memory(const BackendContext& context, StartLatency start_latency, Parts& parts) {
  if (context.options.latency_bytes == 0) {
    parts.arena->seal_head();
    return {};
  }
  if (context.topology.num_ranks > kMaxRanks) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("Group::create: GroupOptions::latency_bytes is {} in a group of {} ranks; latency mode of "
                    "this build's CUDA backend connects up to {}",
                    context.options.latency_bytes, context.topology.num_ranks, kMaxRanks));
  }
  constexpr std::string_view kClearing = "Group::create: clearing the memory of latency mode";
  const auto num_ranks = static_cast<std::size_t>(context.topology.ranks_per_node);
  const std::size_t offset = node::round_up_to_page(Control::at(nullptr, num_ranks).size_bytes);
  parts.latency_bytes = node::round_up_to_page(context.options.latency_bytes);
  Result<std::shared_ptr<std::byte>> latency = parts.memory->take(parts.latency_bytes);
  if (!latency.ok()) return latency.status();
  parts.latency = *latency;
  parts.arena->seal_head();
  if (latency->get() != parts.arena->base() + offset) {
    return Status(ErrorCode::kInternal,
                  "Group::create: the memory of latency mode is not second in its arena; please report this");
  }
  const RelaxedCapture relaxed;
  Status status =
      runtime_status(cudaMemsetAsync(latency->get(), 0, parts.latency_bytes, parts.stream->get()), kClearing);
  return status.ok() ? fill_latency_memory(context, start_latency, parts) : status;
}

/// Clears the words that ranks send each other. The stream need not be idle.
Status clear_control(int ranks_per_node, const Parts& parts) {
  const auto num_ranks = static_cast<std::size_t>(ranks_per_node);
  const std::size_t control_bytes = Control::at(nullptr, num_ranks).size_bytes;
  constexpr std::string_view kClearing = "Group::create: clearing the control block";
  Status status =
      runtime_status(cudaMemsetAsync(parts.control.get(), 0, control_bytes, parts.stream->get()), kClearing);
  const std::uint64_t epoch = first_epoch().load();
  if (status.ok() && epoch != 0) {
    const Control words = Control::at(parts.control.get(), num_ranks);
    status = runtime_status(
        cudaMemcpyAsync(&words.local->epoch, &epoch, sizeof(epoch), cudaMemcpyHostToDevice, parts.stream->get()),
        "Group::create: setting the epoch");
    // Fill words that hold an epoch as if earlier calls had left another epoch there. Flags only grow, so they stay 0.
    constexpr int kOtherEpoch = 0x5A;
    const auto mark = [&status, &parts](void* begin, const void* end) {
      if (!status.ok()) return;
      const auto size = static_cast<const std::byte*>(end) - static_cast<std::byte*>(begin);
      status = runtime_status(cudaMemsetAsync(begin, kOtherEpoch, static_cast<std::size_t>(size), parts.stream->get()),
                              "Group::create: setting the epoch");
    };
    mark(words.entries, words.progress);
    mark(words.headers, words.counts);
    mark(words.counts, words.local);
  }
  if (!status.ok()) return status;
  return runtime_status(cudaStreamSynchronize(parts.stream->get()), kClearing);
}

/// Bytes at the start of the arena that other ranks write in latency mode: the control block and its memory. 0 over
/// several nodes, where groups are not renewed.
std::size_t head_bytes(const BackendContext& context) {
  if (context.topology.num_nodes() > 1) return 0;
  const auto num_ranks = static_cast<std::size_t>(context.topology.ranks_per_node);
  return node::round_up_to_page(Control::at(nullptr, num_ranks).size_bytes) +
         node::round_up_to_page(context.options.latency_bytes);
}

std::vector<int> absent_ranks(const BackendContext& context) {
  std::vector<int> absent;
  for (int rank = 0; rank < context.topology.num_ranks; ++rank) {
    if (context.is_absent(rank)) absent.push_back(rank);
  }
  return absent;
}

LogRank log_rank(const BackendContext& context) { return {context.topology.rank, context.topology.num_ranks}; }

void log_gpu(const BackendContext& context, const DeviceFacts& facts, const Parts& parts) {
  log_line(LogLevel::kInfo, log_rank(context),
           "create: gpu={} name=\"{}\" pci={} sms={} rank_sms={} waiting_sms={} bulk_copies={} memory_path={} "
           "latency_bytes={} tuning_entries={}",
           facts.device, facts.name, facts.pci_address, facts.num_sms, parts.num_sms, parts.num_waiting_sms,
           parts.has_bulk, to_string(parts.arena->path()), parts.latency_bytes, parts.tuning.size());
}

/// Makes everything that needs no peer. The control block is the first allocation in the arena.
Status make_local_parts(const BackendContext& context, const DeviceFacts& facts, LoadKernels load_kernels,
                        Parts& parts) {
  parts.device = facts.device;
  parts.shared_limit = facts.shared_limit;
  Result<std::shared_ptr<OwnStream>> stream = OwnStream::create();
  if (!stream.ok()) return stream.status();
  parts.stream = *stream;
  stream = OwnStream::create();
  if (!stream.ok()) return stream.status();
  parts.refusals_stream = *stream;
  {
    const LogPhase phase(log_rank(context), "create: loading kernels");
    if (Status status = load_kernels(facts.device, facts.shared_limit, parts.has_bulk); !status.ok()) return status;
  }
  const Result<MemoryPath> path = choose_memory_path(facts.device);
  if (!path.ok()) return path.status();
  Result<std::shared_ptr<DeviceArena>> arena =
      DeviceArena::create(facts.device, context.options.arena_bytes, *path, parts.stream, head_bytes(context));
  if (!arena.ok()) return arena.status();
  parts.arena = *arena;
  Result<std::shared_ptr<TableMemory>> memory = TableMemory::create(parts.arena);
  if (!memory.ok()) return memory.status();
  parts.memory = *memory;
  Result<std::shared_ptr<PinnedMemory>> pinned = PinnedMemory::create();
  if (!pinned.ok()) return pinned.status();
  parts.pinned = *pinned;
  Result<std::byte*> report = parts.pinned->take(sizeof(DeviceReport) + sizeof(CorruptReport));
  if (!report.ok()) return report.status();
  parts.report = reinterpret_cast<DeviceReport*>(*report);
  parts.corrupt = reinterpret_cast<CorruptReport*>(*report + sizeof(DeviceReport));
  parts.verify = context.options.verify;

  const auto num_ranks = static_cast<std::size_t>(context.topology.ranks_per_node);
  const std::size_t control_bytes = Control::at(nullptr, num_ranks).size_bytes;
  Result<std::shared_ptr<std::byte>> control = parts.memory->take(control_bytes);
  if (!control.ok()) return control.status();
  parts.control = *control;
  if (control->get() != parts.arena->base()) {
    return Status(ErrorCode::kInternal,
                  "Group::create: the control block is not first in its arena; please report this");
  }
  const RelaxedCapture relaxed;
  return clear_control(context.topology.ranks_per_node, parts);
}

Status check_topology(const BackendContext& context) {
  const Topology& topology = context.topology;
  if (topology.ranks_per_node > kMaxRanks || topology.num_nodes() > kMaxNodes) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("Group::create: {} ranks in {} nodes; this build's CUDA backend connects up to {} ranks "
                              "of a node and up to {} nodes",
                              topology.num_ranks, topology.num_nodes(), kMaxRanks, kMaxNodes));
  }
  return {};
}

/// Multiprocessors whose blocks may wait for other ranks, of the `num_sms` of each rank that uses the GPU.
int waiting_sms(int num_reserved_sms, int num_sms, int num_sharers) {
  int reserved = num_reserved_sms;
  // NCCL refuses two ranks of one communicator on a GPU, so ranks that share a GPU have no such neighbour.
  if (reserved == kDefaultReservedSms) reserved = num_sharers == 1 ? std::min(kNcclSms, num_sms / 2) : 0;
  return std::clamp(num_sms - reserved / num_sharers, std::min(kLeastWaitingSms, num_sms), num_sms);
}

/// At least two blocks of a kernel serve each rail peer, and one more the rows that stay in the node; all must run at
/// once.
Status check_room_for_rails(const Topology& topology, int num_sms) {
  const int num_blocks = 2 * (topology.num_nodes() - 1) + 1;
  if (topology.num_nodes() == 1 || num_blocks <= num_sms) return {};
  return Status(ErrorCode::kUnsupported,
                fmt::format("Group::create: {} nodes need {} multiprocessors of each rank, and rank {} has {} of its "
                            "GPU; use fewer ranks on a GPU, or set GroupOptions::num_reserved_sms lower",
                            topology.num_nodes(), num_blocks, topology.rank, num_sms));
}

call::KernelRings make_rings(const BackendContext& context, const Result<DeviceFacts>& facts, bool in_gpu,
                             RingMemory& memory) {
  memory = {};  // first: both kinds may not fit
  call::KernelRings rings;
  const auto num_nodes = static_cast<std::size_t>(context.topology.num_nodes());
  rings.shape = in_gpu ? rail::gpu_ring_shape(num_nodes) : rail::kernel_ring_shape(num_nodes);
  rings.status = facts.status();
  if (!rings.status.ok()) return rings;
  if (context.options.ring_memory == "gpu") {
    rings.status = rail::check_ring_memory(
        "gpu", rail::gpu_direct_facts(gpu_direct_part(facts->device), context.options.transport));
    if (!rings.status.ok()) return rings;
  }
  const Result<bool> follows_numa = net::follows_numa();  // an error is reported by Rails::create
  const int numa_node = follows_numa.ok() && *follows_numa ? net::numa_node_of(facts->pci_address) : -1;
  Result<RingMemory> made = in_gpu ? RingMemory::create_in_gpu(context.topology, facts->device, numa_node)
                                   : RingMemory::create(context.topology, numa_node);
  rings.status = made.status();
  if (!made.ok()) return rings;
  memory = std::move(*made);
  rings.memory = memory.rails_memory;
  rings.words = memory.words;
  rings.in_gpu = in_gpu;
  rings.host_memory = memory.host_memory;
  rings.host_words = memory.host_words;
  rings.read_back_writes = memory.read_back_writes;
  return rings;
}

call::KernelRingsSource rings_source(const BackendContext& context, const Result<DeviceFacts>& facts,
                                     RingMemory& memory) {
  call::KernelRingsSource source;
  if (facts.ok()) source.gpu = {facts->pci_address, [device = facts->device] { return gpu_direct_part(device); }};
  source.make = [&context, &facts, &memory](bool in_gpu) { return make_rings(context, facts, in_gpu, memory); };
  return source;
}

Status start_rail_link(RingMemory memory, std::int64_t poll_ns, Parts& parts) {
  parts.rail_link = std::make_unique<RailLink>(*parts.sync, std::move(memory), poll_ns);
  return parts.rail_link->start(*parts.memory, parts.stream->get());
}

/// Sets the parameters that kernels take about the ranks. Called after the exchange.
void set_ranks(const BackendContext& context, Parts& parts) {
  const Topology& topology = context.topology;
  const auto num_ranks = static_cast<std::size_t>(topology.ranks_per_node);
  const int first_rank = topology.node_of(topology.rank) * topology.ranks_per_node;
  RankParams& ranks = parts.ranks;
  ranks.rank = topology.rank - first_rank;
  ranks.num_ranks = topology.ranks_per_node;
  ranks.control = Control::at(parts.control.get(), num_ranks);
  ranks.report = parts.pinned->on_device(parts.report);
  ranks.timeout_ns = static_cast<std::uint64_t>(context.options.timeout_ns);
  for (int rank = 0; rank < ranks.num_ranks; ++rank) {
    ranks.peer_bases[rank] = parts.exchange->peer_base(first_rank + rank);
  }
  parts.latency_ranks = ranks;
  if (topology.num_nodes() == 1 || topology.num_ranks > kMaxRanks) return;
  RankParams& group = parts.latency_ranks;
  group.of_group = true;
  group.rank = topology.rank;
  group.num_ranks = topology.num_ranks;
  for (int rank = 0; rank < topology.num_ranks; ++rank) {
    const bool is_near = topology.node_of(rank) == topology.node_of(topology.rank);
    group.peer_bases[rank] = ranks.peer_bases[is_near ? rank - first_rank : ranks.rank];
  }
}

/// Collective: what depends on the ranks of other processes, but for the words that hosts share.
Status meet_ranks(const BackendContext& context, const DeviceFacts& facts, const Status& my_status, Parts& parts) {
  const std::int64_t last_record = parts.call_log ? parts.call_log->last_number() : 0;
  Result<SharedFacts> shared = share_facts(context, my_status, {facts.uuid, last_record});
  if (!shared.ok()) return shared.status();
  parts.call_log->count_from(shared->last_record);
  parts.gpu_pci_address = facts.pci_address;
  parts.num_sms = std::max(1, facts.num_sms / shared->num_sharers);
  parts.num_waiting_sms = waiting_sms(context.options.num_reserved_sms, parts.num_sms, shared->num_sharers);
  parts.tuning = tuning_for(context.tuning, facts.name, context.topology.num_nodes(), context.topology.ranks_per_node);
  const LogPhase phase(log_rank(context), "create: mapping of the ranks' memory");
  Result<std::unique_ptr<ArenaExchange>> exchange =
      ArenaExchange::create(context, parts.sync->peers(), parts.arena, parts.places, head_bytes(context));
  if (!exchange.ok()) return exchange.status();
  parts.exchange = std::move(*exchange);
  set_ranks(context, parts);
  parts.watch = std::make_unique<PeerWatch>(parts.sync->state(), *parts.report, *parts.call_log, parts.rail_link.get());
  if (context.options.mask_lost_ranks) parts.watch->tell_lost_ranks();
  return parts.watch->start();
}

/// Gives memory that other ranks write its first contents again.
Status clear_memory(const BackendContext& context, StartLatency start_latency, Parts& parts) {
  const RelaxedCapture relaxed;
  Status status = parts.arena->renew_head();
  if (status.ok()) status = clear_control(context.topology.ranks_per_node, parts);
  if (status.ok() && parts.latency != nullptr) status = fill_latency_memory(context, start_latency, parts);
  return status;
}

/// Ok if kernels of captured graphs find all ranks where they were.
Status check_places(const RankParams& before, const RankParams& now) {
  for (int rank = 0; rank < now.num_ranks; ++rank) {
    if (now.peer_bases[rank] == before.peer_bases[rank]) continue;
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("renew: rank {} has other addresses than the one whose place it takes, since it is a thread "
                    "of this process; start a process for it, or create a new group",
                    rank),
        rank);
  }
  return {};
}

}  // namespace

Status renew_parts(const BackendContext& context, StartLatency start_latency, Parts& parts) {
  Result<DeviceFacts> facts = examine_device(parts.device);
  // The watch and the exchange go before what they use. No rank maps another's memory any more when all have met, so
  // that it is free when its owner replaces it.
  parts.watch.reset();
  parts.exchange.reset();
  for (const PeerPlace& place : parts.places) {
    if (place.mapping != nullptr) place.mapping->clear();
  }
  BackendContext host_context = context;
  host_context.options.arena_bytes = kHostArenaBytes;
  Result<std::unique_ptr<call::CallSync>> sync = call::CallSync::create(host_context);
  if (!sync.ok()) return sync.status();
  parts.sync = std::move(*sync);
  *parts.corrupt = CorruptReport{};
  *parts.report = DeviceReport{};  // the waits in it are among those that `sync` begins with
  parts.absent_ranks = absent_ranks(context);
  Result<CallLog> call_log = CallLog::create(parts.sync->peers(), parts.call_log->last_number());
  Status status = facts.ok() ? call_log.status() : facts.status();
  if (call_log.ok()) parts.call_log = std::move(*call_log);
  if (status.ok()) status = clear_memory(context, start_latency, parts);
  const RankParams before = parts.ranks;
  status = meet_ranks(context, facts.ok() ? *facts : DeviceFacts{}, status, parts);
  if (status.ok()) status = check_places(before, parts.ranks);
  if (!status.ok()) parts.ranks = before;
  return status;
}

Result<Parts> create_parts(const BackendContext& context, LoadKernels load_kernels, StartLatency start_latency) {
  if (Status status = check_topology(context); !status.ok()) return status;
  const LogPhase phase(log_rank(context), "create: parts of the GPU");
  const bool over_nodes = context.topology.num_nodes() > 1;
  Result<DeviceFacts> facts = examine_device(context.options.device);
  const DeviceGuard guard(facts.ok() ? facts->device : 0);
  BackendContext host_context = context;
  host_context.options.arena_bytes = over_nodes ? kNodesHostArenaBytes : kHostArenaBytes;
  RingMemory ring_memory;
  const call::KernelRingsSource rings = rings_source(context, facts, ring_memory);
  Result<std::unique_ptr<call::CallSync>> sync = call::CallSync::create(host_context, over_nodes ? &rings : nullptr);
  if (!sync.ok()) return sync.status();
  Parts parts;
  if (context.options.mask_lost_ranks) {
    parts.mask_timeout_ns = static_cast<std::uint64_t>(context.options.mask_timeout_ns);
  }
  parts.absent_ranks = absent_ranks(context);
  parts.rings = ring_memory.block.data;
  parts.gpu_rings = ring_memory.gpu;
  parts.sync = std::move(*sync);
  Result<CallLog> call_log = CallLog::create(parts.sync->peers());

  Status status = facts.ok() ? call_log.status() : facts.status();
  if (status.ok()) status = guard.status();
  if (status.ok()) status = make_local_parts(context, *facts, load_kernels, parts);
  if (status.ok()) status = make_latency_memory(context, start_latency, parts);
  if (status.ok() && over_nodes)
    status = start_rail_link(std::move(ring_memory), context.options.network_poll_ns, parts);
  if (call_log.ok()) parts.call_log = std::move(*call_log);
  status = meet_ranks(context, facts.ok() ? *facts : DeviceFacts{}, status, parts);
  if (status.ok()) status = check_room_for_rails(context.topology, parts.num_waiting_sms);
  // No rank calls before the control blocks of all are cleared and known: the creation ends with an exchange.
  if (!status.ok()) return status;
  log_gpu(context, *facts, parts);
  return parts;
}

void count_epochs_from(std::uint64_t epoch) { first_epoch().store(epoch); }

Status probe() {
  int num_devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&num_devices); error != cudaSuccess) {
    return runtime_status(error, "backend cuda: counting GPUs", "install NVIDIA's driver, or use backend \"cpu\"");
  }
  if (num_devices == 0) {
    return Status(ErrorCode::kUnsupported, "backend cuda: no GPU is visible; see CUDA_VISIBLE_DEVICES, or use \"cpu\"");
  }
  return driver().status();
}

}  // namespace ferry::cuda
