#include <new>
#include <optional>

#include "cuda/driver/device_guard.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/intranode/dispatch_parts.hpp"
#include "cuda/memory/memory_checks.hpp"

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

Status run(Context& context, const DispatchCall& asked) {
  const auto refused = [&context, &asked](const Status& status) {
    return refuse(context, asked.record, asked.stream, status);
  };
  if (Status status = status_of(asked.record); !status.ok()) return refused(status);
  const Result<bool> checked = context.check_stream(to_string(Operation::kDispatch), asked.stream);
  if (!checked.ok()) return refused(checked.status());
  const bool captured = *checked;
  const Parts& parts = context.parts();
  if (Status status = check_dispatch_memory(asked, *parts.arena); !status.ok()) return refused(status);
  const Result<std::optional<QuantizedDispatch>> steps = split_quantizing(context, asked, captured);
  if (!steps.ok()) return refused(steps.status());
  const DispatchCall& call = steps->has_value() ? (*steps)->send : asked;

  const auto& routing = static_cast<const NodesRouting&>(*call.routing);
  const DispatchTensors tensors = tensors_of(call);
  const Result<std::byte*> room =
      context.staging().rows(DispatchStaging::at(nullptr, routing.routed, tensors).size_bytes, captured);
  if (!room.ok()) return refused(room.status());
  const DispatchStaging staging = DispatchStaging::at(*room, routing.routed, tensors);
  const StepBlocks blocks = blocks_of(parts, call.kernel);

  Result<Launch> begun = context.begin(call.record, static_cast<cudaStream_t>(call.stream.handle), captured);
  if (!begun.ok()) return refused(begun.status());
  parts.rail_link->wake();
  cudaError_t error = cudaSuccess;
  if (steps->has_value()) error = launch_quantizing(context, call, **steps, begun->stream);
  if (error == cudaSuccess) {
    error = launch(dispatch_steps(place_of(parts), identity_of(context, call.record, *begun), routing.routed, tensors,
                                  staging, blocks),
                   begun->stream);
  }
  if (error == cudaSuccess && needs_padding(call, routing.exact_rows)) {
    PaddingParams padding = padding_params(parts.ranks, call);
    padding.summary = &parts.rail_link->params().state->gate;
    padding.source = routing.routed.tables.source;
    padding.max_blocks = blocks.num_other;
    error = launch_padding(padding, begun->stream);
  }
  return context.end(*begun, error, "dispatch");
}

}  // namespace

Status dispatch(Context& context, const DispatchCall& call) try {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return context.fail(guard.status());
  return run(context, call);
} catch (const std::bad_alloc&) {
  return context.out_of_memory(Operation::kDispatch);
}

}  // namespace ferry::cuda::internode
