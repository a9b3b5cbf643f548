#include <cstdint>
#include <optional>

#include "core/checks.hpp"
#include "cuda/call/group_call.hpp"
#include "cuda/copy/row_copy.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/routing.hpp"
#include "cuda/internode/runs.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda::internode {
namespace {

CombineTensors tensors_of(const CombineCall& call, const CombineCopies& copies) {
  CombineTensors tensors;
  tensors.x = copies.x != nullptr ? copies.x : call.x.data;
  tensors.x_stride = copies.x != nullptr ? call.x.row_bytes : call.x.stride_bytes;
  tensors.row_bytes = call.x.row_bytes;
  tensors.float32 = call.x.dtype == DType::kFloat32;
  tensors.weighted = call.weighted;
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
  // A rank without rows need not have memory for them; no rank reads any.
  if (call.x.num_rows == 0) tensors.x = nullptr;
  if (call.weights.num_elements() == 0) tensors.weights = nullptr;
  return tensors;
}

class Combine {
 public:
  Combine(Context& context, const CombineCall& call) : context_(context), call_(call) {}

  Status prepare(const CallStream& stream) {
    if (Status status = check_not_latency(*call_.routing, "combine"); !status.ok()) return status;
    run_.emplace(context_, CombineRun::Input{call_, static_cast<const NodesRouting&>(*call_.routing).routed});
    return run_->prepare(stream.captured);
  }
  cudaError_t launch(const Launch& launch) { return run_->launch(launch); }
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const {
    return launch_refusal_of(context_, launch, refused, call_.routing.get());
  }

 private:
  Context& context_;
  const CombineCall& call_;
  std::optional<CombineRun> run_;
};

}  // namespace

bool CombineCopies::copies_x(const CombineCall& call, const DeviceArena& arena) {
  const ConstRows& x = call.x;
  const std::size_t extent = x.num_rows == 0 ? 0 : to_size((x.num_rows - 1) * x.stride_bytes + x.row_bytes);
  return extent > 0 && !arena.contains(x.data, extent);
}

CombineCopies CombineCopies::at(std::byte* base, const CombineCall& call, const DeviceArena& arena) {
  const ConstRows& x = call.x;
  const std::size_t weights_bytes = to_size(call.weights.num_elements()) * sizeof(float);
  plan::Carver carver(base);
  CombineCopies copies;
  if (copies_x(call, arena)) {
    copies.x = carver.take<std::byte>(to_size(x.num_rows * x.row_bytes));
  }
  if (weights_bytes > 0 && !arena.contains(call.weights.data, weights_bytes)) {
    copies.weights = carver.take<std::byte>(weights_bytes);
  }
  copies.size_bytes = carver.used_bytes();
  return copies;
}

cudaError_t CombineCopies::launch(const CombineCall& call, int max_blocks, cudaStream_t stream) const {
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

Status CombineRun::take_room(bool captured) {
  const Parts& parts = context_.parts();
  const CombineCall& call = input_.call;
  if (Status status = check_combine_memory(call, *parts.arena); !status.ok()) return status;
  const NodePlace place = place_of(parts);
  const bool shares = sums_nodes(place, input_.routed, tensors_of(call, {}));
  const bool staged = shares && CombineCopies::copies_x(call, *parts.arena);
  const RoutingState& routing = *call.routing;
  blocks_ = blocks_of(parts, call.kernel,
                      {call.record.operation, routing.layout, routing.num_tokens, call.x.row_bytes, staged});
  const std::size_t copies_bytes = shares ? CombineCopies::at(nullptr, call, *parts.arena).size_bytes : 0;
  const std::size_t staging_bytes = CombineStaging::at(nullptr, place, input_.routed, tensors_of(call, {})).size_bytes;
  const Result<std::byte*> room = context_.staging().rows(StagedBy::kCombine, copies_bytes + staging_bytes, captured);
  if (!room.ok()) return room.status();
  copies_ = shares ? CombineCopies::at(*room, call, *parts.arena) : CombineCopies{};
  tensors_ = tensors_of(call, copies_);
  staging_ = CombineStaging::at(*room + copies_bytes, place, input_.routed, tensors_);
  return {};
}

Status CombineRun::prepare(bool captured) {
  return as_error_of(to_string(input_.call.record.operation), take_room(captured));
}

cudaError_t CombineRun::launch(const Launch& begun) {
  const Parts& parts = context_.parts();
  parts.rail_link->wake();
  const CombineSteps steps = combine_steps(place_of(parts), identity_of(context_, input_.call.record, begun),
                                           input_.routed, tensors_, staging_, blocks_);
  const cudaError_t error = copies_.launch(input_.call, blocks_.num_all, begun.stream);
  return error == cudaSuccess ? cuda::launch(steps, begun.stream) : error;
}

Status combine(Context& context, const CombineCall& call) {
  return on_gpu(context, Operation::kCombine, [&context, &call] {
    Combine combine(context, call);
    return make_call({context, call.record, call.stream}, combine);
  });
}

}  // namespace ferry::cuda::internode
