#include <optional>

#include "core/checks.hpp"
#include "cuda/call/dispatch_parts.hpp"
#include "cuda/call/group_call.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/internode/runs.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/numeric/quantize.hpp"

namespace ferry::cuda::internode {
namespace {

plan::TokenRecord record_format(const DispatchCall& call) {
  plan::TokenRecord::Parts parts;
  if (call.scales.present()) {
    parts.scale_bytes = call.scales.extent(1) * static_cast<std::int64_t>(size_bytes(call.scales.dtype));
  }
  parts.num_topk = call.routing->num_topk;
  parts.weights = call.out_topk_weights.present();
  // The receiver finds a weight by its id.
  parts.ids = parts.weights || call.out_topk_idx.present();
  return plan::TokenRecord::of(parts);
}

DispatchTensors tensors_of(const DispatchCall& call) {
  DispatchTensors tensors;
  tensors.x = call.x.data;
  tensors.x_stride = call.x.stride_bytes;
  tensors.row_bytes = call.x.row_bytes;
  tensors.scales = scale_table(call.scales);
  tensors.weights = static_cast<const float*>(call.topk_weights.data);
  tensors.format = record_format(call);
  tensors.out = dispatch_outputs(call);
  return tensors;
}

class Dispatch {
 public:
  Dispatch(Context& context, const DispatchCall& call) : context_(context), call_(call) {}

  Status prepare(const CallStream& stream) {
    if (Status status = check_not_latency(*call_.routing, "dispatch"); !status.ok()) return status;
    const auto& routing = static_cast<const NodesRouting&>(*call_.routing);
    run_.emplace(context_, DispatchRun::Input{call_, routing.routed, routing.exact_rows});
    return run_->prepare(stream.captured);
  }
  cudaError_t launch(const Launch& launch) { return run_->launch(launch); }
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const {
    return launch_refusal_of(context_, launch, refused, call_.routing.get());
  }

 private:
  Context& context_;
  const DispatchCall& call_;
  std::optional<DispatchRun> run_;
};

}  // namespace

Status DispatchRun::take_room(bool captured) {
  const Parts& parts = context_.parts();
  if (Status status = check_dispatch_memory(input_.call, *parts.arena); !status.ok()) return status;
  if (Status status = split_quantizing(context_, input_.call, captured, steps_); !status.ok()) return status;
  tensors_ = tensors_of(call());
  const std::size_t rows_bytes = DispatchStaging::at(nullptr, input_.routed, tensors_).size_bytes;
  const Result<std::byte*> room = context_.staging().rows(StagedBy::kDispatch, rows_bytes, captured);
  if (!room.ok()) return room.status();
  staging_ = DispatchStaging::at(*room, input_.routed, tensors_);
  return {};
}

Status DispatchRun::prepare(bool captured) {
  const Operation operation = input_.call.record.operation;
  // Rows are taken out of staging into any memory.
  constexpr bool kStaged = false;
  const RoutingState& routing = *input_.call.routing;
  blocks_ = blocks_of(context_.parts(), input_.call.kernel,
                      {operation, routing.layout, routing.num_tokens, input_.call.out_x.row_bytes, kStaged});
  return as_error_of(to_string(operation), take_room(captured));
}

cudaError_t DispatchRun::launch(const Launch& begun) {
  const Parts& parts = context_.parts();
  parts.rail_link->wake();
  const NodePlace place = place_of(parts);
  const CallIdentity identity = identity_of(context_, input_.call.record, begun);
  const DispatchSteps rows = dispatch_steps(place, identity, input_.routed, tensors_, staging_, blocks_);
  const cudaStream_t stream = begun.stream;
  cudaError_t error = cudaSuccess;
  if (steps_) error = launch_quantize(steps_->quantize, blocks_.num_all, stream);
  if (error == cudaSuccess) error = cuda::launch(rows, stream);
  if (error != cudaSuccess || !needs_padding(call(), input_.exact_rows)) return error;
  PaddingParams padding = padding_params(parts.ranks, call());
  padding.summary = &parts.rail_link->params().state->gate;
  padding.source = input_.routed.tables.source;
  padding.max_blocks = blocks_.num_other;
  return launch_padding(padding, stream);
}

Status dispatch(Context& context, const DispatchCall& call) {
  return on_gpu(context, Operation::kDispatch, [&context, &call] {
    Dispatch dispatch(context, call);
    return make_call({context, call.record, call.stream}, dispatch);
  });
}

}  // namespace ferry::cuda::internode
