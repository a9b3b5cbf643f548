#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <new>

#include "cuda/backend.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/intranode/route_params.hpp"
#include "cuda/intranode/routing.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "node/futex.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

/// Tokens that a block counts: enough blocks to hide latencies for T = 4096, and a bound on them for large T so that
/// the one block that adds them up stays quick. A multiple of a block's warps.
constexpr std::int64_t kMinTokensPerBlock = 64;
constexpr std::int64_t kMaxBlocks = 128;
constexpr std::int64_t kBlockTokensUnit = 64;
/// Polls of the outcome before the host gives up its core to other ranks of the machine.
constexpr int kPollsBeforeYield = 2000;
/// The kernel's own deadline comes first; this is for a GPU that does not run it at all.
constexpr std::int64_t kSettleDeadlines = 3;

/// One route on one rank, step by step.
class Router {
 public:
  Router(const RouteCall& call, const CrewParams& crew, std::shared_ptr<TableMemory> memory)
      : call_(call), crew_(crew), memory_(std::move(memory)), state_(std::make_shared<CudaRouting>()) {}

  bool bounded() const { return call_.options.max_recv_rows > 0 || call_.options.layout == Layout::kSlab; }
  Status prepare(Placements& placements, std::size_t shared_limit);
  /// A captured Routing that is used before its first replay must say so.
  Status clear_summary(cudaStream_t own_stream);
  Status prepare_host(const std::shared_ptr<PinnedMemory>& pinned, DeviceReport* report, bool captured,
                      std::int64_t timeout_ns);
  Status prepare_source(std::int64_t num_rows);
  cudaError_t launch_counts(cudaStream_t stream, std::uint64_t agreement, std::int64_t ticket);
  cudaError_t launch_places(cudaStream_t stream, std::uint64_t agreement, std::int64_t ticket, int max_blocks);
  CudaRouting& state() { return *state_; }
  std::shared_ptr<CudaRouting> finish();

 private:
  std::int64_t bounded_rows() const {
    return call_.options.max_recv_rows > 0
               ? call_.options.max_recv_rows
               : static_cast<std::int64_t>(state_->local_expert_ids.size()) * call_.options.slab_capacity;
  }

  const RouteCall& call_;
  const CrewParams& crew_;
  std::shared_ptr<TableMemory> memory_;
  RouteParams params_;
  std::shared_ptr<CudaRouting> state_;
};

Status Router::prepare(Placements& placements, std::size_t shared_limit) {
  if (call_.options.num_experts > kMaxExperts ||
      place_shared_bytes(crew_.num_ranks, call_.options.num_experts) > shared_limit) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("route: num_experts is {}; the CUDA backend takes up to {}, and as many as its counts of {} "
                    "ranks and experts fit {} bytes of shared memory on this GPU",
                    call_.options.num_experts, kMaxExperts, crew_.num_ranks, shared_limit));
  }
  Result<std::shared_ptr<const Placement>> placement = placements.find(call_.expert_to_rank);
  if (!placement.ok()) return placement.status();
  const std::int64_t num_tokens = call_.num_tokens;
  std::int64_t per_block = std::max(kMinTokensPerBlock, (num_tokens + kMaxBlocks - 1) / kMaxBlocks);
  per_block = (per_block + kBlockTokensUnit - 1) / kBlockTokensUnit * kBlockTokensUnit;
  const std::int64_t num_blocks = std::max<std::int64_t>(1, (num_tokens + per_block - 1) / per_block);

  CudaRouting& state = *state_;
  state.placement = *placement;
  state.local_expert_ids = state.placement->local_expert_ids;
  state.num_tokens = num_tokens;
  state.num_topk = call_.num_topk;
  state.num_experts = call_.options.num_experts;
  state.layout = call_.options.layout;
  state.num_blocks = static_cast<int>(num_blocks);
  state.tokens_per_block = static_cast<int>(per_block);
  const RoutingTables::Shape shape{.num_ranks = to_size(crew_.num_ranks),
                                   .num_tokens = to_size(num_tokens),
                                   .num_topk = to_size(call_.num_topk),
                                   .num_experts = to_size(state.num_experts),
                                   .num_local_experts = state.local_expert_ids.size(),
                                   .num_blocks = to_size(num_blocks),
                                   .weights = call_.topk_weights.present()};
  Result<std::shared_ptr<std::byte>> tables = memory_->take(RoutingTables::at(nullptr, shape).size_bytes);
  if (!tables.ok()) return tables.status();
  state.memory = *tables;
  state.tables = RoutingTables::at(tables->get(), shape);
  if (bounded()) return prepare_source(bounded_rows());
  return {};
}

Status Router::clear_summary(cudaStream_t own_stream) {
  const RelaxedCapture relaxed;
  RouteSummary summary{};
  summary.fault = static_cast<std::int32_t>(Fault::kNotRouted);
  Status status = cuda_status(
      cudaMemcpyAsync(state_->tables.summary, &summary, sizeof(summary), cudaMemcpyHostToDevice, own_stream),
      "route: clearing a captured Routing");
  if (!status.ok()) return status;
  return cuda_status(cudaStreamSynchronize(own_stream), "route: clearing a captured Routing");
}

Status Router::prepare_source(std::int64_t num_rows) {
  state_->num_recv_rows = num_rows;
  state_->num_used_rows = num_rows;
  Result<std::shared_ptr<std::byte>> source =
      memory_->take(std::max<std::size_t>(1, to_size(num_rows) * 2 * sizeof(std::int32_t)));
  if (!source.ok()) return source.status();
  state_->source_memory = *source;
  state_->source = ConstTensorView(source->get(), DType::kInt32, {num_rows, 2});
  return {};
}

Status Router::prepare_host(const std::shared_ptr<PinnedMemory>& pinned, DeviceReport* report, bool captured,
                            std::int64_t timeout_ns) {
  params_.host.fault = &pinned->on_device(report)->fault;
  if (captured) return {};
  CudaRouting& state = *state_;
  const auto num_ranks = to_size(crew_.num_ranks);
  const std::size_t num_local = state.local_expert_ids.size();
  Result<std::byte*> data = pinned->take(HostResult::at(nullptr, num_ranks, num_local).size_bytes);
  if (!data.ok()) return data.status();
  state.memory_owner = memory_;
  state.pinned = pinned;
  state.pinned_data = *data;
  state.host = HostResult::at(*data, num_ranks, num_local);
  state.settle_timeout_ns = kSettleDeadlines * timeout_ns;
  state.report = report;
  state.num_rows_from_rank.resize(num_ranks);
  RouteResultTables& host = params_.host;
  host.result = pinned->on_device(state.host.result);
  if (!bounded()) host.fault = pinned->on_device(state.host.fault);
  host.from_rank = pinned->on_device(state.host.from_rank);
  host.to_rank = pinned->on_device(state.host.to_rank);
  host.rows_per_expert = pinned->on_device(state.host.rows_per_expert);
  host.row_offsets = pinned->on_device(state.host.row_offsets);
  return {};
}

cudaError_t Router::launch_counts(cudaStream_t stream, std::uint64_t agreement, std::int64_t ticket) {
  RouteParams& params = params_;
  params.crew = crew_;
  params.agreement = agreement;
  params.ticket = ticket;
  params.topk_idx = call_.topk_idx.data;
  params.wide_ids = call_.topk_idx.dtype == DType::kInt64;
  params.weights = static_cast<const float*>(call_.topk_weights.data);
  params.num_tokens = call_.num_tokens;
  params.num_topk = call_.num_topk;
  params.num_experts = static_cast<int>(call_.options.num_experts);
  params.num_local_experts = static_cast<int>(state_->local_expert_ids.size());
  params.layout = call_.options.layout;
  params.expert_alignment = call_.options.expert_alignment;
  params.slab_capacity = call_.options.slab_capacity;
  params.max_recv_rows = call_.options.max_recv_rows;
  params.tokens_per_block = state_->tokens_per_block;
  params.num_blocks = state_->num_blocks;
  params.placement = state_->placement->tables;
  params.tables = state_->tables;
  // Bytes of 0x7F: an index beyond every entry, so that the first bad one replaces it.
  cudaError_t error = cudaMemsetAsync(params.tables.bad_entry, 0x7F, sizeof(*params.tables.bad_entry), stream);
  if (error == cudaSuccess) error = launch_count(params, stream);
  if (error == cudaSuccess) error = launch_exchange(params, stream);
  return error;
}

cudaError_t Router::launch_places(cudaStream_t stream, std::uint64_t agreement, std::int64_t ticket, int max_blocks) {
  // Rows that nobody names hold no token: source -1.
  cudaError_t error = cudaSuccess;
  std::byte* source = state_->source_memory.get();
  if (state_->num_recv_rows > 0) {
    error = cudaMemsetAsync(source, 0xFF, to_size(state_->num_recv_rows) * 2 * sizeof(std::int32_t), stream);
  }
  PlaceParams params;
  params.route = params_;
  params.max_blocks = max_blocks;
  params.entry.agreement = agreement;
  params.entry.ticket = ticket;
  params.entry.records_offset = source - reinterpret_cast<std::byte*>(crew_.control.messages);
  return error == cudaSuccess ? launch_place(params, stream) : error;
}

std::shared_ptr<CudaRouting> Router::finish() {
  CudaRouting& state = *state_;
  const auto num_local = static_cast<std::int64_t>(state.local_expert_ids.size());
  state.num_used_rows_view = ConstTensorView(&state.tables.summary->num_used_rows, DType::kInt32, {1});
  state.rows_per_expert_view = ConstTensorView(state.tables.rows_per_expert, DType::kInt32, {num_local});
  if (state.layout != Layout::kTokens) {
    state.row_offsets_view = ConstTensorView(state.tables.row_offsets, DType::kInt64, {num_local + 1});
  }
  state.slots = ConstTensorView(state.tables.slots, DType::kInt32, {state.num_tokens, state.num_topk});
  state.topk_idx = ConstTensorView(state.tables.ids, DType::kInt64, {state.num_tokens, state.num_topk});
  if (call_.topk_weights.present()) {
    state.topk_weights = ConstTensorView(state.tables.weights, DType::kFloat32, {state.num_tokens, state.num_topk});
  }
  return std::move(state_);
}

}  // namespace

Result<std::shared_ptr<RoutingState>> CudaBackend::route(const RouteCall& call) try {
  const DeviceGuard guard(parts_.device);
  if (!guard.status().ok()) return guard.status();
  return run_route(call);
} catch (const std::bad_alloc&) {
  return out_of_memory(Operation::kRoute);
}

Status CudaBackend::await_counts(const Launch& launch, const HostResult& host) {
  const RelaxedCapture relaxed;
  const std::int64_t deadline_ns = node::monotonic_ns() + kSettleDeadlines * timeout_ns_;
  for (int polls = 0; host.state() == 0; ++polls) {
    if (polls < kPollsBeforeYield) continue;
    if (Status status = check_lost(); !status.ok()) return status;
    const cudaError_t query = cudaStreamQuery(launch.stream);
    if (query != cudaSuccess && query != cudaErrorNotReady) {
      Status status = cuda_status(query, "route: waiting for the counts", "a kernel on this GPU failed");
      return parts_.crew->fail(status.code(), parts_.crew->rank(), status.message());
    }
    if (node::monotonic_ns() > deadline_ns) {
      return parts_.crew->give_up_on(parts_.crew->rank(), "route: this rank's GPU did not run the exchange");
    }
    sched_yield();
  }
  return host.state() == 1 ? Status() : describe_fault(*host.fault, "route");
}

Result<std::shared_ptr<RoutingState>> CudaBackend::run_route(const RouteCall& call) {
  if (call.record.code != ErrorCode::kOk) {
    return refuse_route(
        call, Status(call.record.code, std::string(call.record.message.data(), to_size(call.record.message_bytes))));
  }
  Router router(call, parts_.crew_params, parts_.memory);
  const Result<bool> captured = check_stream(Operation::kRoute, call.stream);
  Status status = captured.status();
  if (status.ok() && *captured && !router.bounded()) {
    status =
        Status(ErrorCode::kInvalidArgument,
               "route: the stream is being captured, and the host must wait for the counts; give max_recv_rows, or "
               "layout kSlab, or route before the capture");
  }
  if (status.ok()) status = check_route_memory(call, parts_.device);
  if (status.ok()) status = router.prepare(placements_, parts_.shared_limit);
  if (status.ok()) status = router.prepare_host(parts_.pinned, parts_.report, *captured, timeout_ns_);
  if (status.ok() && *captured) status = router.clear_summary(parts_.stream->get());
  if (!status.ok()) return refuse_route(call, status);

  Result<Launch> launch = begin(call.record, static_cast<cudaStream_t>(call.stream.handle), *captured);
  if (!launch.ok()) return launch.status();
  CudaRouting& state = router.state();
  cudaError_t error = router.launch_counts(launch->stream, launch->agreement, launch->ticket);
  if (error == cudaSuccess && !router.bounded()) {
    status = await_counts(*launch, state.host);
    if (status.ok()) {
      state.adopt_result();
      state.exact_rows = true;
      // The exchange has taken place: a rank that cannot go on must not leave the others waiting.
      status = router.prepare_source(state.num_used_rows);
      if (!status.ok()) status = parts_.crew->fail(status.code(), parts_.crew->rank(), status.message());
    }
  }
  if (status.ok() && error == cudaSuccess) {
    error = router.launch_places(launch->stream, launch->agreement, launch->ticket, parts_.num_sms);
  }
  Status ended = end(*launch, error, "route");
  if (!status.ok()) return status;
  if (!ended.ok()) return ended;
  return std::shared_ptr<RoutingState>(router.finish());
}

}  // namespace ferry::cuda
