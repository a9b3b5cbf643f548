#include <new>
#include <optional>

#include "core/checks.hpp"
#include "cuda/call/dispatch_parts.hpp"
#include "cuda/call/wait_times.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"
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
  // Weights are found by them.
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

Status run(Context& context, const DispatchCall& call) {
  const auto refused = [&context, &call](const Status& status) {
    return refuse(context, call.record, call.stream, status, call.routing.get());
  };
  if (Status status = status_of(call.record); !status.ok()) return refused(status);
  const Result<bool> captured = context.check_stream(to_string(Operation::kDispatch), call.stream);
  if (!captured.ok()) return refused(captured.status());
  if (Status status = check_not_latency(*call.routing, "dispatch"); !status.ok()) return refused(status);
  const auto& routing = static_cast<const NodesRouting&>(*call.routing);
  return make_dispatch(context, {call, routing.routed, routing.exact_rows, *captured});
}

}  // namespace

Status make_dispatch(Context& context, const DispatchRun& run) {
  const DispatchCall& asked = run.call;
  const auto refused = [&context, &asked](const Status& status) {
    return refuse(context, asked.record, asked.stream, as_error_of(to_string(asked.record.operation), status),
                  asked.routing.get());
  };
  const Parts& parts = context.parts();
  const Topology& topology = parts.sync->topology();
  if (Status status = check_dispatch_memory(asked, *parts.arena); !status.ok()) return refused(status);
  const Result<std::optional<QuantizedDispatch>> steps = split_quantizing(context, asked, run.captured);
  if (!steps.ok()) return refused(steps.status());
  const DispatchCall& call = steps->has_value() ? (*steps)->send : asked;

  const DispatchTensors tensors = tensors_of(call);
  const std::size_t route_bytes =
      run.route == nullptr ? 0 : NodeRouteStaging::at(nullptr, topology, *run.route).size_bytes;
  const std::size_t rows_bytes = DispatchStaging::at(nullptr, run.routed, tensors).size_bytes;
  const Result<std::byte*> room = context.staging().rows(StagedBy::kDispatch, route_bytes + rows_bytes, run.captured);
  if (!room.ok()) return refused(room.status());
  const DispatchStaging staging = DispatchStaging::at(*room + route_bytes, run.routed, tensors);
  const StepBlocks blocks = blocks_of(parts, call.kernel);

  Result<Launch> begun = context.begin(call.record, static_cast<cudaStream_t>(call.stream.handle), run.captured);
  if (!begun.ok()) return refused(begun.status());
  parts.rail_link->wake();
  const NodePlace place = place_of(parts);
  const CallIdentity identity = identity_of(context, call.record, *begun);
  DispatchSteps rows = dispatch_steps(place, identity, run.routed, tensors, staging, blocks);
  if (run.route != nullptr) rows.exchange.begins_call = false;
  const auto launch_steps = [&] {
    const cudaStream_t stream = begun->stream;
    cudaError_t error = cudaSuccess;
    if (steps->has_value()) error = launch_quantize((*steps)->quantize, blocks.num_all, stream);
    if (error == cudaSuccess && run.route != nullptr) {
      const NodeRouteStaging route_staging = NodeRouteStaging::at(*room, topology, *run.route);
      error = launch(node_route_steps(place, topology, identity, *run.route, route_staging, blocks), stream);
    }
    if (error == cudaSuccess) error = launch(rows, stream);
    if (error == cudaSuccess && needs_padding(call, run.exact_rows)) {
      PaddingParams padding = padding_params(parts.ranks, call);
      padding.summary = &parts.rail_link->params().state->gate;
      padding.source = run.routed.tables.source;
      padding.max_blocks = blocks.num_other;
      error = launch_padding(padding, stream);
    }
    return error;
  };
  const cudaError_t error = launch_timed(wait_times_of(parts, run.wait_times_ns), begun->stream, launch_steps);
  return context.end(*begun, error, to_string(call.record.operation));
}

Status dispatch(Context& context, const DispatchCall& call) try {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return context.fail(guard.status());
  return run(context, call);
} catch (const std::bad_alloc&) {
  return context.out_of_memory(Operation::kDispatch);
}

}  // namespace ferry::cuda::internode
