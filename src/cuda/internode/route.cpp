#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "cuda/call/group_call.hpp"
#include "cuda/call/routing.hpp"
#include "cuda/copy/row_copy.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda::internode {
namespace {

/// Pinned memory for the report of the exchange that begins a route.
class RouteReport {
 public:
  static Result<RouteReport> take(const Parts& parts) {
    Result<std::byte*> data = parts.pinned->take(HostResult::at(nullptr, 0, 0).size_bytes);
    if (!data.ok()) return data.status();
    return RouteReport(parts, *data);
  }
  RouteReport(const Parts& parts, std::byte* data) : parts_(&parts), data_(data), host_(HostResult::at(data, 0, 0)) {}
  RouteReport(RouteReport&& other) noexcept : parts_(other.parts_), data_(other.data_), host_(other.host_) {
    other.data_ = nullptr;
  }
  RouteReport(const RouteReport&) = delete;
  RouteReport& operator=(const RouteReport&) = delete;
  RouteReport& operator=(RouteReport&&) = delete;
  ~RouteReport() {
    if (data_ == nullptr) return;
    // After a failure the kernel that writes there may not have run yet.
    parts_->memory->after_calls(
        [pinned = parts_->pinned, data = data_] { pinned->give(data, HostResult::at(nullptr, 0, 0).size_bytes); });
  }

  const HostResult& host() const { return host_; }
  void attach(ExchangeParams& params) const {
    params.fault = parts_->pinned->on_device(host_.fault);
    params.found = parts_->rail_link->found_of_kernels(RailLink::FaultOf::kRoute);
    params.result = &parts_->pinned->on_device(host_.result)->state;
    params.started = &parts_->pinned->on_device(host_.result)->started;
  }

 private:
  const Parts* parts_;
  std::byte* data_;
  HostResult host_;
};

/// An exact route, for whose counts the hosts wait. Public methods in the order in which they are called.
class ExactRoute {
 public:
  ExactRoute(Context& context, Placements& placements, CallScratch& scratch, const RouteCall& call)
      : context_(context), parts_(context.parts()), placements_(placements), scratch_(scratch), call_(call) {}

  Status prepare(const CallStream& stream);
  cudaError_t launch(const Launch& launch);
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const {
    return launch_refusal_of(context_, launch, refused);
  }
  /// Waits until all ranks make the call and this rank's ids are on the host. Ends the work of the stream.
  Status await_ids(const Launch& launch);
  Status exchange();
  /// Puts the tables on the GPU.
  Status finish(cudaStream_t stream);
  std::shared_ptr<RoutingState> take() { return std::move(state_); }

 private:
  plan::RouteShape shape() const;
  Status await_idle(cudaStream_t stream, const HostResult& host);
  Status fetch_ids(cudaStream_t stream, const HostResult& host);
  Status check_ids() const;
  void pick_homes();
  Status upload(std::span<const std::byte> tables, std::byte* to);
  std::size_t num_entries() const { return to_size(call_.num_tokens * call_.num_topk); }
  /// Blocks of a copy through the window, within the route's num_sms.
  int copy_blocks() const {
    const int num_sms = call_.options.num_sms;
    return num_sms > 0 ? std::min(num_sms, CallScratch::kWindowBlocks) : CallScratch::kWindowBlocks;
  }

  Context& context_;
  const Parts& parts_;
  Placements& placements_;
  CallScratch& scratch_;
  const RouteCall& call_;
  std::optional<RouteReport> report_;
  std::shared_ptr<NodesRouting> state_ = std::make_shared<NodesRouting>();
  std::vector<std::int64_t> ids_;
  std::int32_t num_homeless_ = 0;  // entries whose expert has no home
  plan::NodeRoute route_;
};

plan::RouteShape ExactRoute::shape() const {
  return {.layout = call_.options.layout,
          .num_ranks = to_size(parts_.sync->topology().num_ranks),
          .num_experts = to_size(call_.options.num_experts),
          .num_topk = to_size(call_.num_topk),
          .expert_alignment = call_.options.expert_alignment,
          .slab_capacity = call_.options.slab_capacity,
          .expert_to_rank = call_.placement->expert_to_rank};
}

Status ExactRoute::prepare(const CallStream& stream) {
  if (stream.captured) {
    return Status(ErrorCode::kInvalidArgument,
                  "route: the stream is being captured, and the hosts must wait for the counts; give max_tokens and "
                  "max_recv_rows, or max_tokens and layout kSlab, or route before the capture");
  }
  if (call_.placement->on_device) {
    return Status(ErrorCode::kInvalidArgument,
                  "route: placement: physical_to_logical_view is given over several nodes without max_tokens, and "
                  "hosts cannot read it; give max_tokens, and max_recv_rows or layout kSlab, or physical_to_logical");
  }
  if (Status status = check_route_memory(call_, *parts_.arena); !status.ok()) return status;
  Result<std::shared_ptr<const Placement>> placement = placements_.find(call_.placement);
  if (!placement.ok()) return placement.status();
  state_->placement = *placement;
  ids_.resize(num_entries());
  Result<RouteReport> report = RouteReport::take(parts_);
  if (!report.ok()) return report.status();
  report_.emplace(std::move(*report));
  return {};
}

cudaError_t ExactRoute::launch(const Launch& launch) {
  ExchangeParams params = agreement_only(place_of(parts_), identity_of(context_, call_.record, launch));
  report_->attach(params);
  parts_.rail_link->wake();
  return launch_rail_exchange(params, launch.stream);
}

Status ExactRoute::await_idle(cudaStream_t stream, const HostResult& host) {
  const RelaxedCapture relaxed;
  CountsDeadline deadline(host, context_.timeout_ns());
  context_.expect_wait();
  while (true) {
    if (Status status = context_.check_lost(); !status.ok()) return status;
    const Result<bool> idle = is_idle(stream);
    if (!idle.ok()) return context_.fail(idle.status());
    if (*idle) return {};
    if (Status status = context_.check_interrupt("route"); !status.ok()) return status;
    if (deadline.expired()) {
      return context_.give_up_on(parts_.sync->rank(), "route: this rank's GPU did not run the exchange");
    }
    sched_yield();
  }
}

Status ExactRoute::fetch_ids(cudaStream_t stream, const HostResult& host) {
  const std::size_t id_bytes = size_bytes(call_.topk_idx.dtype);
  const auto* const from = static_cast<const std::byte*>(call_.topk_idx.data);
  const std::size_t per_window = CallScratch::kWindowBytes / id_bytes;
  const std::byte* const window = scratch_.window.data.get();
  for (std::size_t first = 0; first < ids_.size(); first += per_window) {
    const std::size_t count = std::min(per_window, ids_.size() - first);
    Status status = runtime_status(
        launch_copy(scratch_.window.kernel_view, from + first * id_bytes, count * id_bytes, copy_blocks(), stream),
        "route: reading topk_idx");
    if (!status.ok()) return context_.fail(status);
    if (status = await_idle(stream, host); !status.ok()) return status;
    if (call_.topk_idx.dtype == DType::kInt32) {
      const auto* const narrow = reinterpret_cast<const std::int32_t*>(window);
      std::copy(narrow, narrow + count, ids_.begin() + static_cast<std::ptrdiff_t>(first));
    } else {
      std::memcpy(ids_.data() + first, window, count * id_bytes);
    }
  }
  return {};
}

Status ExactRoute::await_ids(const Launch& launch) {
  const HostResult& host = report_->host();
  if (Status status = await_idle(launch.stream, host); !status.ok()) return status;
  if (host.state() == 1) return fetch_ids(launch.stream, host);
  if (host.state() != 0) return context_.describe(*host.fault, "route", RailLink::FaultOf::kRoute);
  // The kernel ended without an outcome: one of its waits has failed.
  if (Status status = context_.check_lost(); !status.ok()) return status;
  return context_.fail(Status(ErrorCode::kInternal, "route: the exchange ended without a result; please report this"));
}

Status ExactRoute::check_ids() const {
  const std::int64_t num_named = call_.placement->num_logical_experts;
  const auto bad = std::ranges::find_if(ids_, [num_named](std::int64_t id) { return id < -1 || id >= num_named; });
  if (bad == ids_.end()) return {};
  const std::int64_t at = bad - ids_.begin();
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("route: topk_idx[{}, {}] is {}, expected -1 (no expert) or an expert from 0 to {}",
                            at / call_.num_topk, at % call_.num_topk, *bad, num_named - 1));
}

/// Replaces each id, all of which are good, by that of the home that its token picks.
void ExactRoute::pick_homes() {
  const plan::HomeTable& homes = call_.placement->homes;
  if (!homes.present()) return;
  for (std::size_t entry = 0; entry < ids_.size(); ++entry) {
    std::int64_t& id = ids_[entry];
    const auto token = static_cast<std::int64_t>(entry) / call_.num_topk;
    if (id < 0) continue;
    id = homes.pick(to_size(id), token, parts_.sync->topology().rank);
    if (id < 0) ++num_homeless_;
  }
}

Status ExactRoute::exchange() {
  call::NodesRouteCall call{call_.record, shape(), ids_, call_.options.max_recv_rows};
  if (Status status = check_ids(); !status.ok()) {
    call.record.set_status(status);
  } else {
    pick_homes();
  }
  return call::route_nodes(*parts_.sync, call, scratch_.tables, route_);
}

Status ExactRoute::upload(std::span<const std::byte> tables, std::byte* to) {
  const RelaxedCapture relaxed;
  const cudaStream_t stream = parts_.stream->get();
  for (std::size_t first = 0; first < tables.size(); first += CallScratch::kWindowBytes) {
    const std::span<const std::byte> part =
        tables.subspan(first, std::min(CallScratch::kWindowBytes, tables.size() - first));
    std::memcpy(scratch_.window.data.get(), part.data(), part.size());
    Status status =
        runtime_status(launch_copy(to + first, scratch_.window.kernel_view, part.size(), copy_blocks(), stream),
                       "route: uploading tables");
    if (status.ok()) status = runtime_status(cudaStreamSynchronize(stream), "route: uploading tables");
    if (!status.ok()) return status;
  }
  return {};
}

Status ExactRoute::finish(cudaStream_t stream) {
  const Topology& topology = parts_.sync->topology();
  const plan::RouteShape shape = this->shape();
  const LocalExperts experts = local_experts(shape, route_, to_size(topology.rank));
  NodesRouting& state = *state_;
  state.num_tokens = call_.num_tokens;
  state.num_topk = call_.num_topk;
  state.num_experts = call_.options.num_experts;
  state.layout = call_.options.layout;
  state.num_used_rows = route_.num_used_rows;
  state.num_recv_rows = call_.options.max_recv_rows > 0 ? call_.options.max_recv_rows : route_.num_used_rows;
  state.exact_rows = state.num_recv_rows == state.num_used_rows;
  const NodeTablesInput input{.topology = topology,
                              .shape = shape,
                              .route = route_,
                              .experts = experts,
                              .ids = ids_,
                              .num_rows = state.num_recv_rows,
                              .weights = call_.topk_weights.present()};
  const NodeTables::Shape sizes = shape_of(input);
  const NodeTables layout = NodeTables::at(nullptr, sizes);
  Result<std::shared_ptr<std::byte>> memory = parts_.memory->take(layout.size_bytes);
  if (!memory.ok()) return memory.status();
  state.memory = *memory;
  std::vector<std::byte> tables(layout.host_bytes);
  fill(input, tables.data());
  if (Status status = upload(tables, memory->get()); !status.ok()) return status;
  const NodeTables on_device = NodeTables::at(memory->get(), sizes);
  if (call_.topk_weights.present() && !ids_.empty()) {
    Status status = runtime_status(
        launch_copy(on_device.weights, call_.topk_weights.data, ids_.size() * sizeof(float), copy_blocks(), stream),
        "route: copying topk_weights");
    if (!status.ok()) return status;
  }
  state.routed = {.tables = on_device,
                  .num_tokens = state.num_tokens,
                  .num_topk = state.num_topk,
                  .num_items_back = static_cast<std::int64_t>(sizes.num_items_back),
                  .num_items_in = static_cast<std::int64_t>(sizes.num_items_in),
                  .num_used_rows = state.num_used_rows,
                  .by_token = state.layout == Layout::kTokens,
                  .num_experts = static_cast<int>(state.num_experts),
                  .owner = state.placement->tables.owner,
                  .local_expert = state.placement->tables.local_expert};
  state.num_rows_per_local_expert = experts.num_rows;
  state.expert_row_offsets = experts.row_offsets;
  state.local_expert_ids = experts.ids;
  state.num_rows_from_rank = route_.num_rows_from_rank;
  state.num_rows_to_rank = route_.tokens.num_rows_to_rank;
  const auto num_local = static_cast<std::int64_t>(experts.ids.size());
  state.num_used_rows_view = ConstTensorView(&on_device.summary->num_used_rows, DType::kInt32, {1});
  state.rows_per_expert_view = ConstTensorView(on_device.rows_per_expert, DType::kInt32, {num_local});
  state.expert_rows_view = ConstTensorView(on_device.expert_rows, DType::kInt64, {state.num_experts});
  if (state.layout != Layout::kTokens) {
    state.row_offsets_view = ConstTensorView(on_device.row_offsets, DType::kInt64, {num_local + 1});
  }
  state.slots = ConstTensorView(on_device.slots, DType::kInt32, {state.num_tokens, state.num_topk});
  state.source = ConstTensorView(on_device.source, DType::kInt32, {state.num_used_rows, 2});
  state.topk_idx = ConstTensorView(on_device.ids, DType::kInt64, {state.num_tokens, state.num_topk});
  if (call_.topk_weights.present()) {
    state.topk_weights = ConstTensorView(on_device.weights, DType::kFloat32, {state.num_tokens, state.num_topk});
  }
  const LoadCounters& counters = call_.options.counters;
  const CounterTables tables_of_counters = counter_tables(counters);
  if (!tables_of_counters.any()) return {};
  const CountersParams params{.counters = tables_of_counters,
                              .placement = state.placement->tables,
                              .num_experts = static_cast<int>(state.num_experts),
                              .num_local_experts = static_cast<int>(num_local),
                              .own_counts = on_device.own_counts,
                              .rows_per_expert = on_device.rows_per_expert,
                              .num_homeless = num_homeless_};
  return runtime_status(launch_counters(params, stream), "route: adding to counters");
}

Result<std::shared_ptr<RoutingState>> exact_route(Context& context, Placements& placements, CallScratch& scratch,
                                                  const RouteCall& call) {
  ExactRoute route(context, placements, scratch, call);
  const Result<Launch> launch = begin_call({context, call.record, call.stream}, route);
  if (!launch.ok()) return launch.status();
  const ChannelTablesCall* early = nullptr;
  Status status;
  const cudaError_t error = route.launch(*launch);
  if (error == cudaSuccess) {
    if (call.while_waiting != nullptr) early = (*call.while_waiting)();
    status = route.await_ids(*launch);
    if (status.ok()) status = route.exchange();
    if (status.ok()) {
      // The others have their rows: a rank that cannot go on must not leave them waiting.
      if (Status finished = route.finish(launch->stream); !finished.ok()) status = context.fail(finished);
    }
  }
  Status ended = context.end(*launch, error, "route");
  if (!status.ok()) return status;
  if (!ended.ok()) return ended;
  std::shared_ptr<RoutingState> routing = route.take();
  if (early != nullptr) {
    ChannelTablesCall tables = *early;
    tables.routing = routing.get();
    tables.stream = call.stream;
    if (Status written = channel_tables(context, tables); !written.ok()) return written;
  }
  return routing;
}

}  // namespace

Result<std::byte*> HostTables::ensure(Block& block, std::size_t bytes) {
  if (block.size_bytes >= bytes && block.data != nullptr) return block.data;
  if (block.data != nullptr) arena_.give(block.data, block.size_bytes);
  block = {};
  Result<std::byte*> grown = arena_.take(bytes);
  if (grown.ok()) block = {*grown, bytes};
  return grown;
}

Result<std::byte*> HostTables::counts(std::size_t bytes) {
  turn_ = 1 - turn_;
  return ensure(counts_[turn_], bytes);
}

Result<std::byte*> HostTables::forward_tables(std::size_t bytes) { return ensure(forward_tables_[turn_], bytes); }

Result<std::unique_ptr<CallScratch>> CallScratch::create(const Parts& parts) {
  Result<PinnedBlock> window = take_pinned(kWindowBytes);
  if (!window.ok()) return window.status();
  return std::make_unique<CallScratch>(parts.sync->peers().arena(), std::move(*window));
}

NodePlace place_of(const Parts& parts) {
  const Topology& topology = parts.sync->topology();
  return {parts.ranks, parts.rail_link->params(), topology.rank, topology.ranks_per_node};
}

CallIdentity identity_of(const Context& context, const CallRecord& record, const Launch& launch) {
  const Parts& parts = context.parts();
  return {launch.agreement, launch.record_number, record, &parts.pinned->on_device(parts.report)->fault,
          parts.rail_link->found_of_kernels(RailLink::FaultOf::kAnyCall)};
}

cudaError_t launch_refusal_of(Context& context, const Launch& launch, const CallRecord& refused,
                              const RoutingState* routing) {
  context.parts().rail_link->wake();
  ExchangeParams params = agreement_only(place_of(context.parts()), identity_of(context, refused, launch));
  const bool on_route = refused.operation == Operation::kDispatch || refused.operation == Operation::kCombine;
  if (on_route && routing != nullptr && routing->latency_phase == LatencyPhase::kNone) {
    const RoutedTokens& routed = static_cast<const NodesRouting&>(*routing).routed;
    if (routed.by_kernels) params.routed = routed.tables.summary;
  }
  return launch_rail_exchange(params, launch.stream);
}

StepBlocks blocks_of_route(const Parts& parts, int num_sms) {
  return StepBlocks::of({.num_nodes = parts.sync->topology().num_nodes(),
                         .num_sms = call_sms(num_sms, num_sms > 0 ? parts.num_sms : parts.num_waiting_sms),
                         .wide_rings = parts.rail_link->in_gpu_memory()});
}

StepBlocks blocks_of(const Parts& parts, const KernelOptions& kernel, const TunedCall& call) {
  const KernelOptions used = tuned(kernel, parts.tuning, call);
  // A file says how fast calls are, not which kernels of other libraries must run beside them.
  const int device_sms = kernel.num_sms > 0 ? parts.num_sms : parts.num_waiting_sms;
  // Nothing stays in the node when sums return.
  const bool copies = call.operation == Operation::kDispatch;
  const Topology& topology = parts.sync->topology();
  // Two ranks of a node read and write some 500 MB for 4,096 tokens of 14 KiB, which 16 multiprocessors do in 0.8 ms at
  // 40 GB/s each (rates of ferry plan); at 50 GB/s the network takes 1.2.
  const bool sums = call.operation == Operation::kCombine && topology.ranks_per_node > 1;
  StepBlocks blocks = StepBlocks::of({.num_nodes = topology.num_nodes(),
                                      .num_sms = call_sms(used.num_sms, device_sms),
                                      .num_copy_sms = copies ? used.num_copy_sms : 0,
                                      .wide_rings = parts.rail_link->in_gpu_memory() && !sums,
                                      .takes_rows = copies && topology.ranks_per_node > 1});
  blocks.chunk_items = std::max(0, used.chunk_tokens);
  return blocks;
}

Result<std::shared_ptr<RoutingState>> route(Context& context, Placements& placements, CallScratch& scratch,
                                            const RouteCall& call) {
  return on_gpu(context, Operation::kRoute, [&] {
    return call.options.max_tokens > 0 ? bounded_route(context, placements, call)
                                       : exact_route(context, placements, scratch, call);
  });
}

}  // namespace ferry::cuda::internode
