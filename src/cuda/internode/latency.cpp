#include "cuda/internode/latency.hpp"

#include <fmt/format.h>

#include <optional>
#include <string_view>

#include "core/checks.hpp"
#include "cuda/call/group_call.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/internode/kernel_routing.hpp"
#include "cuda/internode/runs.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda::internode {
namespace {

/// The stream and the end of a split call, whose kernels run beside the caller's stream.
class Aside {
 public:
  Aside(SideStream* side, std::string_view name) : side_(side), name_(name) {}

  /// Moves the launches to the side stream. `sent`: the end of the call, which `mark` records.
  Status enter(CallStream& stream, std::shared_ptr<StreamPoint>& sent) {
    Result<std::shared_ptr<StreamPoint>> point = side_->point();
    if (!point.ok()) return point.status();
    sent = std::move(*point);
    const Result<Stream> forked = side_->fork(name_, stream.stream);
    if (!forked.ok()) return forked.status();
    stream.stream = *forked;
    is_entered_ = true;
    return {};
  }
  bool is_entered() const { return is_entered_; }
  /// After the launches of a call that has entered.
  Status mark(StreamPoint& sent) { return side_->mark(name_, sent); }

 private:
  SideStream* side_;
  std::string_view name_;
  bool is_entered_ = false;
};

class LatencyDispatch {
 public:
  LatencyDispatch(Context& context, Placements& placements, SideStream* side, const LatencyDispatchCall& call)
      : context_(context), placements_(placements), call_(call), aside_(side, kName) {}

  Status prepare(CallStream& stream) { return as_error_of(kName, prepare_all(stream)); }
  cudaError_t launch(const Launch& launch) { return run_->launch(launch); }
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const {
    return launch_refusal_of(context_, launch, refused);
  }
  /// After the launches.
  Result<std::shared_ptr<RoutingState>> finish() {
    if (aside_.is_entered()) {
      if (Status status = aside_.mark(*routing_->sent); !status.ok()) return context_.fail(status);
    } else if (!call_.split) {
      routing_->received.store(!captured_, std::memory_order_release);
    }
    return std::shared_ptr<RoutingState>(std::move(routing_));
  }

 private:
  static constexpr std::string_view kName = "latency_dispatch";

  Status prepare_all(CallStream& stream) {
    const DeviceArena& arena = *context_.parts().arena;
    captured_ = stream.captured;
    if (Status status = check_route_memory(call_.route, arena); !status.ok()) return status;
    if (Status status = check_wait_times_memory(kName, call_.wait_times_ns, arena); !status.ok()) return status;
    routing_ = std::make_shared<NodesLatencyRouting>();
    const Result<NodeRouteInput> input =
        begin_routing(context_, placements_, {call_.route, kName, call_.max_tokens, true, stream.captured}, *routing_);
    if (!input.ok()) return input.status();
    input_ = *input;
    rows_ = call_.dispatch;
    rows_.record = call_.record;
    rows_.routing = routing_;
    if (call_.split && !stream.captured) {
      if (Status status = aside_.enter(stream, routing_->sent); !status.ok()) return status;
    }
    run_.emplace(context_, DispatchRun::Input{rows_, routing_->routed, false, &*input_, call_.wait_times_ns});
    return run_->prepare(stream.captured);
  }

  Context& context_;
  Placements& placements_;
  const LatencyDispatchCall& call_;
  Aside aside_;
  bool captured_ = false;
  std::shared_ptr<NodesLatencyRouting> routing_;
  std::optional<NodeRouteInput> input_;
  DispatchCall rows_;
  std::optional<DispatchRun> run_;
};

class LatencyCombine {
 public:
  LatencyCombine(Context& context, SideStream* side, const LatencyCombineCall& call)
      : context_(context), call_(call), aside_(side, kName) {}

  Status prepare(CallStream& stream) {
    const DeviceArena& arena = *context_.parts().arena;
    if (Status status = check_wait_times_memory(kName, call_.wait_times_ns, arena); !status.ok()) return status;
    routing().sent = nullptr;
    if (call_.split && !stream.captured) {
      if (Status status = aside_.enter(stream, routing().sent); !status.ok()) return status;
    }
    run_.emplace(context_, CombineRun::Input{call_.combine, routing().routed, call_.wait_times_ns});
    return run_->prepare(stream.captured);
  }
  cudaError_t launch(const Launch& launch) { return run_->launch(launch); }
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const {
    return launch_refusal_of(context_, launch, refused);
  }
  /// After the launches.
  Status finish() {
    if (!aside_.is_entered()) return {};
    Status status = aside_.mark(*routing().sent);
    return status.ok() ? status : context_.fail(status);
  }

 private:
  static constexpr std::string_view kName = "latency_combine";

  /// Core hands out Routings as const; this one also keeps the state of the receive half.
  NodesLatencyRouting& routing() const {
    return static_cast<NodesLatencyRouting&>(const_cast<RoutingState&>(*call_.combine.routing));
  }

  Context& context_;
  const LatencyCombineCall& call_;
  Aside aside_;
  std::optional<CombineRun> run_;
};

}  // namespace

Status NodesLatency::make_receive(const LatencyReceiveCall& call, bool& made) {
  constexpr std::string_view kName = "latency_receive";
  auto& routing = static_cast<NodesLatencyRouting&>(const_cast<RoutingState&>(*call.routing));
  const Result<bool> captured = context_.check_stream(kName, call.stream);
  if (!captured.ok()) return captured.status();
  if (routing.sent != nullptr) {
    // A graph waits for the end of the call at each replay.
    if (*captured) routing.awaited_by_graphs.push_back(routing.sent);
    const unsigned flags = *captured ? cudaEventWaitExternal : cudaEventWaitDefault;
    const cudaError_t error =
        cudaStreamWaitEvent(static_cast<cudaStream_t>(call.stream.handle), routing.sent->get(), flags);
    if (error != cudaSuccess) return runtime_status(error, fmt::format("{}: waiting for the call", kName));
  }
  const bool reports = routing.host.result != nullptr;
  if (routing.latency_phase != LatencyPhase::kCombineSent) routing.received.store(reports, std::memory_order_release);
  made = true;
  return {};
}

Result<std::shared_ptr<RoutingState>> NodesLatency::dispatch(const LatencyDispatchCall& call) {
  return on_gpu(context_, Operation::kLatencyDispatch, [&]() -> Result<std::shared_ptr<RoutingState>> {
    LatencyDispatch dispatch(context_, placements_, side_, call);
    Status status = make_call({context_, call.record, call.stream}, dispatch);
    if (!status.ok()) return status;
    return dispatch.finish();
  });
}

Status NodesLatency::combine(const LatencyCombineCall& call) {
  return on_gpu(context_, Operation::kLatencyCombine, [&] {
    LatencyCombine combine(context_, side_, call);
    Status status = make_call({context_, call.combine.record, call.combine.stream}, combine);
    return status.ok() ? combine.finish() : status;
  });
}

Status NodesLatency::receive(const LatencyReceiveCall& call, bool& made) {
  return on_gpu(context_, Operation::kLatencyDispatch, [&] { return make_receive(call, made); });
}

}  // namespace ferry::cuda::internode
