#include <cstdint>
#include <new>

#include "core/checks.hpp"
#include "cuda/call/wait_times.hpp"
#include "cuda/copy/row_copy.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda::internode {
namespace {

/// Copies of what the ranks of the node cannot reach where the caller has it; null of what they can.
struct Copies {
  std::byte* x = nullptr;
  std::byte* weights = nullptr;
  std::size_t size_bytes = 0;

  static Copies at(std::byte* base, const CombineCall& call, const DeviceArena& arena) {
    const ConstRows& x = call.x;
    const std::size_t extent = x.num_rows == 0 ? 0 : to_size((x.num_rows - 1) * x.stride_bytes + x.row_bytes);
    const std::size_t weights_bytes = to_size(call.weights.num_elements()) * sizeof(float);
    plan::Carver carver(base);
    Copies copies;
    if (extent > 0 && !arena.contains(x.data, extent)) {
      copies.x = carver.take<std::byte>(to_size(x.num_rows * x.row_bytes));
    }
    if (weights_bytes > 0 && !arena.contains(call.weights.data, weights_bytes)) {
      copies.weights = carver.take<std::byte>(weights_bytes);
    }
    copies.size_bytes = carver.used_bytes();
    return copies;
  }

  cudaError_t launch(const CombineCall& call, int max_blocks, cudaStream_t stream) const {
    cudaError_t error = cudaSuccess;
    if (x != nullptr) {
      const std::int64_t row_bytes = call.x.row_bytes;
      error = launch_row_copy({.to = x,
                               .to_stride = row_bytes,
                               .from = static_cast<const std::byte*>(call.x.data),
                               .from_stride = call.x.stride_bytes,
                               .row_bytes = row_bytes,
                               .num_rows = call.x.num_rows,
                               .max_blocks = max_blocks},
                              stream);
    }
    if (error == cudaSuccess && weights != nullptr) {
      error = launch_copy(weights, call.weights.data, to_size(call.weights.num_elements()) * sizeof(float), max_blocks,
                          stream);
    }
    return error;
  }
};

CombineTensors tensors_of(const CombineCall& call, const Copies& copies) {
  CombineTensors tensors;
  tensors.x = copies.x != nullptr ? copies.x : call.x.data;
  tensors.x_stride = copies.x != nullptr ? call.x.row_bytes : call.x.stride_bytes;
  tensors.row_bytes = call.x.row_bytes;
  tensors.float32 = call.x.dtype == DType::kFloat32;
  tensors.weighted = call.weighted;
  tensors.rank_sums = call.rank_sums;
  tensors.topk_weights = static_cast<const float*>(call.topk_weights.data);
  if (call.weights.present()) {
    tensors.weights = copies.weights != nullptr ? reinterpret_cast<const float*>(copies.weights)
                                                : static_cast<const float*>(call.weights.data);
  }
  tensors.returns_weights = call.weights.present();
  for (std::size_t i = 0; i < call.bias.size(); ++i) {
    if (call.bias[i].present()) tensors.bias[i] = {call.bias[i].data, call.bias[i].stride_bytes};
  }
  tensors.out_x = call.out_x.data;
  tensors.out_stride = call.out_x.stride_bytes;
  tensors.out_weights = static_cast<float*>(call.out_weights.data);
  // A rank without rows need not have memory for them; nobody reads any.
  if (call.x.num_rows == 0) tensors.x = nullptr;
  if (call.weights.num_elements() == 0) tensors.weights = nullptr;
  return tensors;
}

Status run(Context& context, const CombineCall& call) {
  const auto refused = [&context, &call](const Status& status) {
    return refuse(context, call.record, call.stream, status, call.routing.get());
  };
  if (Status status = status_of(call.record); !status.ok()) return refused(status);
  const Result<bool> captured = context.check_stream(to_string(Operation::kCombine), call.stream);
  if (!captured.ok()) return refused(captured.status());
  if (Status status = check_not_latency(*call.routing, "combine"); !status.ok()) return refused(status);
  return make_combine(context, call, static_cast<const NodesRouting&>(*call.routing).routed, *captured, nullptr);
}

}  // namespace

Status make_combine(Context& context, const CombineCall& call, const RoutedTokens& routed, bool captured,
                    std::int64_t* wait_times_ns) {
  const auto refused = [&context, &call](const Status& status) {
    return refuse(context, call.record, call.stream, as_error_of(to_string(call.record.operation), status),
                  call.routing.get());
  };
  const Parts& parts = context.parts();
  if (Status status = check_combine_memory(call, *parts.arena); !status.ok()) return refused(status);
  const NodePlace place = place_of(parts);
  StepBlocks blocks = blocks_of(parts, call.kernel);
  blocks.overlaps = parts.has_bulk && !captured;
  const std::size_t copies_bytes = Copies::at(nullptr, call, *parts.arena).size_bytes;
  const std::size_t staging_bytes = CombineStaging::at(nullptr, place, routed, tensors_of(call, {}), blocks).size_bytes;
  const Result<std::byte*> room = context.staging().rows(StagedBy::kCombine, copies_bytes + staging_bytes, captured);
  if (!room.ok()) return refused(room.status());
  const Copies copies = Copies::at(*room, call, *parts.arena);
  const CombineTensors tensors = tensors_of(call, copies);
  const CombineStaging staging = CombineStaging::at(*room + copies_bytes, place, routed, tensors, blocks);

  Result<Launch> begun = context.begin(call.record, static_cast<cudaStream_t>(call.stream.handle), captured);
  if (!begun.ok()) return refused(begun.status());
  parts.rail_link->wake();
  const CombineSteps steps =
      combine_steps(place, identity_of(context, call.record, *begun), routed, tensors, staging, blocks);
  const auto launch_steps = [&] {
    const cudaError_t error = copies.launch(call, blocks.num_all, begun->stream);
    return error == cudaSuccess ? launch(steps, begun->stream) : error;
  };
  const cudaError_t error = launch_timed(wait_times_of(parts, wait_times_ns), begun->stream, launch_steps);
  return context.end(*begun, error, to_string(call.record.operation));
}

Status combine(Context& context, const CombineCall& call) try {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return context.fail(guard.status());
  return run(context, call);
} catch (const std::bad_alloc&) {
  return context.out_of_memory(Operation::kCombine);
}

}  // namespace ferry::cuda::internode
