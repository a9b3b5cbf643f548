#include "cuda/backend.hpp"

#include <fmt/format.h>

#include <cstring>

#include "core/group_options.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/intranode/combine_params.hpp"
#include "cuda/intranode/dispatch_params.hpp"
#include "cuda/intranode/route_params.hpp"
#include "cuda/intranode/routing.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {
namespace {

/// Oldest architecture with system-scope release and acquire (PTX ISA, "Memory Consistency Model": sm_70), and with
/// kernels in this build.
constexpr int kMinComputeMajor = 8;
/// The tickets and the flags of the host's own crew; no token ever lies there.
constexpr std::size_t kHostArenaBytes = std::size_t{1} << 20;

Status probe() {
  int num_devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&num_devices); error != cudaSuccess) {
    return cuda_status(error, "backend cuda: counting GPUs", "install NVIDIA's driver, or use backend \"cpu\"");
  }
  if (num_devices == 0) {
    return Status(ErrorCode::kUnsupported, "backend cuda: no GPU is visible; see CUDA_VISIBLE_DEVICES, or use \"cpu\"");
  }
  return driver().status();
}

struct DeviceFacts {
  int device = 0;
  int num_sms = 0;
  std::size_t shared_limit = 0;
  cudaUUID_t uuid{};
};

Result<DeviceFacts> examine_device(int wanted) {
  DeviceFacts facts;
  int num_devices = 0;
  Status status = cuda_status(cudaGetDeviceCount(&num_devices), "Group::create: counting GPUs");
  if (status.ok() && wanted == kCurrentDevice) {
    status = cuda_status(cudaGetDevice(&facts.device), "Group::create: asking for the current GPU");
  } else {
    facts.device = wanted;
  }
  if (!status.ok()) return status;
  if (facts.device < 0 || facts.device >= num_devices) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("Group::create: GroupOptions::device is {}, expected {} (the current one) or 0 to {}: this "
                    "process sees {} GPUs",
                    wanted, kCurrentDevice, num_devices - 1, num_devices));
  }
  cudaDeviceProp properties{};
  status = cuda_status(cudaGetDeviceProperties(&properties, facts.device), "Group::create: examining the GPU");
  if (!status.ok()) return status;
  if (properties.major < kMinComputeMajor) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("Group::create: GPU {} ({}) has compute capability {}.{}, expected at least {}.0; use "
                              "backend \"cpu\"",
                              facts.device, properties.name, properties.major, properties.minor, kMinComputeMajor));
  }
  facts.num_sms = properties.multiProcessorCount;
  facts.shared_limit = properties.sharedMemPerBlockOptin;
  facts.uuid = properties.uuid;
  return facts;
}

/// Collective: how many ranks use this rank's GPU.
Result<int> count_sharers(const BackendContext& context, const Status& my_status, const DeviceFacts& facts) {
  Result<std::vector<std::vector<std::byte>>> all = gather_or_fail(
      *context.bootstrap, my_status, std::as_bytes(std::span(&facts.uuid, 1)), context.options.timeout_ns);
  if (!all.ok()) return all.status();
  int sharers = 0;
  for (const std::vector<std::byte>& uuid : *all) {
    const bool same = uuid.size() == sizeof(facts.uuid) && std::memcmp(uuid.data(), &facts.uuid, uuid.size()) == 0;
    sharers += same ? 1 : 0;
  }
  return sharers;
}

Status load_kernels(const DeviceFacts& facts, bool& has_bulk) {
  const std::string operation = fmt::format("Group::create: loading kernels on GPU {}", facts.device);
  constexpr std::string_view kHint = "this build has no code for the GPU: set CMAKE_CUDA_ARCHITECTURES and build again";
  Status status = cuda_status(load_route_kernels(facts.shared_limit), operation, kHint);
  if (status.ok()) status = cuda_status(load_dispatch_kernels(facts.shared_limit, has_bulk), operation, kHint);
  if (status.ok()) status = cuda_status(load_combine_kernels(facts.shared_limit, has_bulk), operation, kHint);
  return status;
}

/// Everything of this rank that needs no peer; first what peers will write to.
Status make_parts(const BackendContext& context, const DeviceFacts& facts, CudaParts& parts) {
  parts.device = facts.device;
  parts.shared_limit = facts.shared_limit;
  Result<std::shared_ptr<OwnStream>> stream = OwnStream::create();
  if (!stream.ok()) return stream.status();
  parts.stream = *stream;
  stream = OwnStream::create();
  if (!stream.ok()) return stream.status();
  parts.refusals_stream = *stream;
  if (Status status = load_kernels(facts, parts.has_bulk); !status.ok()) return status;
  const Result<MemoryPath> path = choose_memory_path(facts.device);
  if (!path.ok()) return path.status();
  Result<std::shared_ptr<DeviceArena>> arena =
      DeviceArena::create(facts.device, context.options.arena_bytes, *path, parts.stream);
  if (!arena.ok()) return arena.status();
  parts.arena = *arena;
  Result<std::shared_ptr<TableMemory>> memory = TableMemory::create(parts.arena);
  if (!memory.ok()) return memory.status();
  parts.memory = *memory;
  Result<std::shared_ptr<PinnedMemory>> pinned = PinnedMemory::create();
  if (!pinned.ok()) return pinned.status();
  parts.pinned = *pinned;
  Result<std::byte*> report = parts.pinned->take(sizeof(DeviceReport));
  if (!report.ok()) return report.status();
  parts.report = reinterpret_cast<DeviceReport*>(*report);

  const auto num_ranks = static_cast<std::size_t>(context.topology.num_ranks);
  const std::size_t control_bytes = Control::at(nullptr, num_ranks).size_bytes;
  Result<std::shared_ptr<std::byte>> control = parts.memory->take(control_bytes + num_ranks * sizeof(std::byte*));
  if (!control.ok()) return control.status();
  parts.control_and_bases = *control;
  if (control->get() != parts.arena->base()) {
    return Status(ErrorCode::kInternal,
                  "Group::create: the control block is not first in its arena; please report this");
  }
  const RelaxedCapture relaxed;
  Status status = cuda_status(cudaMemsetAsync(control->get(), 0, control_bytes, parts.stream->get()),
                              "Group::create: clearing the control block");
  if (!status.ok()) return status;
  return cuda_status(cudaStreamSynchronize(parts.stream->get()), "Group::create: clearing the control block");
}

/// After the exchange: tells kernels where everybody is.
Status introduce_peers(const BackendContext& context, CudaParts& parts) {
  const auto num_ranks = static_cast<std::size_t>(context.topology.num_ranks);
  CrewParams& crew = parts.crew_params;
  crew.rank = context.topology.rank;
  crew.num_ranks = context.topology.num_ranks;
  crew.control = Control::at(parts.control_and_bases.get(), num_ranks);
  crew.report = parts.pinned->on_device(parts.report);
  crew.timeout_ns = static_cast<std::uint64_t>(context.options.timeout_ns);
  std::vector<std::byte*> bases(num_ranks);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) bases[rank] = parts.exchange->peer_base(static_cast<int>(rank));
  std::byte* table = parts.control_and_bases.get() + crew.control.size_bytes;
  crew.peer_bases = reinterpret_cast<std::byte* const*>(table);
  const RelaxedCapture relaxed;
  constexpr std::string_view kOperation = "Group::create: uploading the peers' addresses";
  const std::size_t table_bytes = num_ranks * sizeof(std::byte*);
  Status status = cuda_status(
      cudaMemcpyAsync(table, bases.data(), table_bytes, cudaMemcpyHostToDevice, parts.stream->get()), kOperation);
  if (!status.ok()) return status;
  return cuda_status(cudaStreamSynchronize(parts.stream->get()), kOperation);
}

}  // namespace

CudaBackend::CudaBackend(const BackendContext& context, CudaParts parts, Tickets tickets)
    : timeout_ns_(context.options.timeout_ns),
      parts_(std::move(parts)),
      tickets_(std::move(tickets)),
      placements_(parts_.memory, parts_.stream, context.topology.rank, context.topology.num_ranks),
      staging_(parts_.memory) {}

CudaBackend::~CudaBackend() {
  // Kernels of this rank end by their deadline; what they use must last until then.
  const DeviceGuard guard(parts_.device);
  const RelaxedCapture relaxed;
  if (launched_) cudaEventSynchronize(parts_.memory->last_call());
  parts_.crew->leave();
  parts_.memory->close();
}

Result<std::unique_ptr<Backend>> CudaBackend::create(const BackendContext& context) {
  if (context.topology.num_nodes() > 1 || context.topology.num_ranks > kMaxRanks) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("Group::create: {} ranks in {} nodes; this build's CUDA backend connects up to {} ranks of "
                    "one node; leave ranks_per_node at 0",
                    context.topology.num_ranks, context.topology.num_nodes(), kMaxRanks));
  }
  BackendContext host_context = context;
  host_context.options.arena_bytes = kHostArenaBytes;
  Result<std::unique_ptr<call::CallSync>> sync = call::CallSync::create(host_context);
  if (!sync.ok()) return sync.status();
  CudaParts parts;
  parts.crew = std::move(*sync);
  Result<Tickets> tickets = Tickets::create(*parts.crew);

  Result<DeviceFacts> facts = examine_device(context.options.device);
  Status status = facts.ok() ? tickets.status() : facts.status();
  const DeviceGuard guard(facts.ok() ? facts->device : 0);
  if (status.ok()) status = guard.status();
  if (status.ok()) status = make_parts(context, *facts, parts);
  Result<int> sharers = count_sharers(context, status, facts.ok() ? *facts : DeviceFacts{});
  if (!sharers.ok()) return sharers.status();
  parts.num_sms = std::max(1, facts->num_sms / *sharers);
  Result<std::unique_ptr<ArenaExchange>> exchange = ArenaExchange::create(context, *parts.crew, parts.arena);
  if (!exchange.ok()) return exchange.status();
  parts.exchange = std::move(*exchange);
  status = introduce_peers(context, parts);
  // Nobody calls before everybody's control block is clear and known.
  Result<std::vector<std::vector<std::byte>>> ready =
      gather_or_fail(*context.bootstrap, status, {}, context.options.timeout_ns);
  if (!ready.ok()) return ready.status();
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(context, std::move(parts), std::move(*tickets)));
}

Result<Buffer> CudaBackend::allocate(std::size_t bytes) {
  const DeviceGuard guard(parts_.device);
  if (!guard.status().ok()) return guard.status();
  return parts_.arena->allocate(bytes);
}

MemoryUsage CudaBackend::memory_usage() const {
  MemoryUsage usage;
  usage.control_bytes = node::round_up_to_page(parts_.crew_params.control.size_bytes +
                                               static_cast<std::size_t>(parts_.crew_params.num_ranks) * sizeof(void*));
  usage.staging_bytes = parts_.memory->held_bytes() - usage.control_bytes;
  usage.allocated_bytes = parts_.arena->allocated_bytes() - parts_.memory->held_bytes();
  return usage;
}

Result<bool> CudaBackend::check_stream(Operation operation, Stream stream) {
  if (!parts_.crew->broken().ok()) return parts_.crew->broken();
  if (Status status = check_lost(); !status.ok()) return status;
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(handle, &capture); error != cudaSuccess) {
    return cuda_status(error, fmt::format("{}: asking whether the stream is captured", to_string(operation)));
  }
  if (capture != cudaStreamCaptureStatusNone) return true;
  // Not of a captured stream: asking that one for its device ends the capture.
  Status status = check_stream_device(to_string(operation), handle, parts_.device);
  if (!status.ok()) return status;
  return false;
}

Result<CudaBackend::Launch> CudaBackend::begin(const CallRecord& record, cudaStream_t stream, bool captured) {
  if (!parts_.crew->broken().ok()) return parts_.crew->broken();
  Launch launch{stream, captured, agreement_word(record), tickets_.post(record)};
  // Calls of a group follow each other, whatever their streams. A captured stream cannot wait for what is outside of
  // its graph; who replays the graph orders it.
  if (launched_ && !captured) {
    const cudaError_t error = cudaStreamWaitEvent(stream, parts_.memory->last_call(), 0);
    if (error != cudaSuccess) return cuda_status(error, fmt::format("{}: ordering calls", to_string(record.operation)));
  }
  return launch;
}

Status CudaBackend::end(const Launch& launch, cudaError_t launched, std::string_view operation) {
  if (!launch.captured) {
    const cudaError_t recorded = cudaEventRecord(parts_.memory->last_call(), launch.stream);
    launched_ = true;
    if (launched == cudaSuccess) launched = recorded;
  }
  if (launched == cudaSuccess) return {};
  Status status = cuda_status(launched, fmt::format("{}: launching", operation),
                              "the GPU or its context failed earlier; see the first error");
  return parts_.crew->fail(status.code(), parts_.crew->rank(), status.message());
}

Status CudaBackend::out_of_memory(Operation operation) {
  return parts_.crew->fail(
      ErrorCode::kSystem, parts_.crew->rank(),
      fmt::format("{}: rank {} ran out of host memory", to_string(operation), parts_.crew->rank()));
}

template <typename Call, typename Refuse>
Status CudaBackend::refuse(const Call& call, const Status& status, Refuse launch_refusal) {
  const CallRecord& record = call.record;
  if (!parts_.crew->broken().ok()) return parts_.crew->broken();
  // Growing memory can find that a peer is gone: that is no matter of this call only.
  if (status.code() == ErrorCode::kTimeout || status.code() == ErrorCode::kPeerLost) {
    return parts_.crew->fail(status.code(), status.peer(), status.message());
  }
  // Peers that capture the call do not make it now.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const auto caller = static_cast<cudaStream_t>(call.stream.handle);
  if (cudaStreamIsCapturing(caller, &capture) != cudaSuccess) cudaGetLastError();
  if (capture != cudaStreamCaptureStatusNone) return status;
  CallRecord refused = record;
  if (refused.code == ErrorCode::kOk) refused.set_status(status);
  // On a stream of its own: the caller's may be what is wrong.
  const RelaxedCapture relaxed;
  Result<Launch> launch = begin(refused, parts_.refusals_stream->get(), false);
  if (!launch.ok()) return launch.status();
  Status ended = end(*launch, launch_refusal(*launch), to_string(record.operation));
  if (!ended.ok()) return ended;
  // Until the peers have heard: their hosts look this call's record up, which later calls would write over.
  if (const cudaError_t error = cudaStreamSynchronize(launch->stream); error != cudaSuccess) {
    return cuda_status(error, fmt::format("{}: telling the peers", to_string(record.operation)));
  }
  if (Status lost = check_lost(); !lost.ok()) return lost;
  // In the words that the peers will find.
  return Status(status.code(), fmt::format("rank {}: {}", parts_.crew->rank(), status.message()), parts_.crew->rank());
}

namespace {

/// Whether the peers' kernels take part at all: with a Routing that was refused they do not.
const RouteSummary* summary_of(const std::shared_ptr<const RoutingState>& routing) {
  return routing == nullptr ? nullptr : static_cast<const CudaRouting&>(*routing).tables.summary;
}

}  // namespace

Status CudaBackend::refuse_route(const RouteCall& call, const Status& status) {
  return refuse(call, status, [&](const Launch& launch) {
    RouteParams params;
    params.crew = parts_.crew_params;
    params.ticket = launch.ticket;
    return launch_exchange(params, launch.stream);
  });
}

Status CudaBackend::refuse_dispatch(const DispatchCall& call, const Status& status) {
  return refuse(call, status, [&](const Launch& launch) {
    DispatchParams params;
    params.crew = parts_.crew_params;
    params.summary = summary_of(call.routing);
    params.bulk = parts_.has_bulk;
    params.entry.ticket = launch.ticket;
    return launch_dispatch(params, launch.stream);
  });
}

Status CudaBackend::refuse_combine(const CombineCall& call, const Status& status) {
  return refuse(call, status, [&](const Launch& launch) {
    CombineParams params;
    params.crew = parts_.crew_params;
    params.summary = summary_of(call.routing);
    params.bulk = parts_.has_bulk;
    params.entry.ticket = launch.ticket;
    return launch_combine(params, launch.stream);
  });
}

Status CudaBackend::wait(Stream stream) {
  const DeviceGuard guard(parts_.device);
  if (!guard.status().ok()) return guard.status();
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (Status status = check_stream_device("wait", handle, parts_.device); !status.ok()) return status;
  const RelaxedCapture relaxed;
  Status status = cuda_status(cudaStreamSynchronize(handle), "wait: synchronising the stream",
                              "a kernel on this GPU failed, perhaps not one of Ferry's");
  if (!status.ok()) return status;
  if (!parts_.crew->broken().ok()) return parts_.crew->broken();
  if (status = check_lost(); !status.ok()) return status;
  return take_fault();
}

Status CudaBackend::poll() {
  if (!parts_.crew->broken().ok()) return parts_.crew->broken();
  if (Status status = check_lost(); !status.ok()) return status;
  return take_fault();
}

Status CudaBackend::destroy() {
  if (!parts_.crew->broken().ok()) return parts_.crew->broken();
  const DeviceGuard guard(parts_.device);
  const RelaxedCapture relaxed;
  if (launched_) {
    Status status = cuda_status(cudaEventSynchronize(parts_.memory->last_call()), "destroy: waiting for the last call");
    if (!status.ok()) return parts_.crew->fail(status.code(), parts_.crew->rank(), status.message());
  }
  if (Status status = check_lost(); !status.ok()) return status;
  node::CallDescriptor ticket;
  ticket.record.operation = Operation::kDestroy;
  return parts_.crew->begin(ticket);
}

BackendFactory cuda_backend_factory() {
  return {"cuda", "ranks of one host with GPUs that reach each other's memory", probe, CudaBackend::create};
}

}  // namespace ferry::cuda
