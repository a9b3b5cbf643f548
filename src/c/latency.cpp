/// C interface of latency mode. As in exchange.cpp, a rank whose structs cannot be read makes the call with empty
/// arguments.

#include "ferry/latency.hpp"

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/placement.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"
#include "ferry/group.hpp"

namespace ferry::c {
namespace {

constexpr const char* kNoGroup = "the group is null";

Status read_dispatch(const char* call, const ferry_latency_dispatch_input* given_input,
                     const ferry_latency_dispatch_output* given_output,
                     const ferry_latency_dispatch_options* given_options, LatencyDispatchInput& input,
                     LatencyDispatchOutput& output, LatencyDispatchOptions& options) {
  ferry_latency_dispatch_input in;
  if (Status status = read_struct(call, given_input, in); !status.ok()) return status;
  ferry_latency_dispatch_output out;
  if (Status status = read_struct(call, given_output, out); !status.ok()) return status;
  ferry_latency_dispatch_options read;
  if (Status status = read_struct(call, given_options, read); !status.ok()) return status;
  input.x = tensor_view(in.x);
  input.scales = tensor_view(in.scales);
  input.topk_idx = tensor_view(in.topk_idx);
  input.topk_weights = tensor_view(in.topk_weights);
  input.num_tokens_view = tensor_view(in.num_tokens_view);
  output.x = tensor_view(out.x);
  output.scales = tensor_view(out.scales);
  options.num_experts = read.num_experts;
  options.max_tokens = read.max_tokens;
  options.slab_capacity = read.slab_capacity;
  options.quantize = static_cast<Quantization>(read.quantize);
  options.zero_padding = read.zero_padding != 0;
  options.split = read.split != 0;
  options.kernel = kernel_options(read);
  options.wait_times_ns = tensor_view(read.wait_times_ns);
  if (Status status = read_placement(call, read.placement, options.placement); !status.ok()) return status;
  if (Status status = read_counters(call, read.counters, options.counters); !status.ok()) return status;
  return read_experts(call, read.expert_to_rank, read.num_expert_to_rank, read.num_experts, options.expert_to_rank);
}

Status dispatch(ferry_group* group, const ferry_latency_dispatch_input* given_input,
                const ferry_latency_dispatch_output* given_output, const ferry_latency_dispatch_options* given_options,
                void* stream, ferry_routing** handle) {
  constexpr const char* kCall = "ferry_latency_dispatch";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  LatencyDispatchInput input;
  LatencyDispatchOutput output;
  LatencyDispatchOptions options;
  Status status = handle == nullptr
                      ? invalid(kCall, "the pointer to the routing is null")
                      : read_dispatch(kCall, given_input, given_output, given_options, input, output, options);
  if (!status.ok()) {
    (void)group->value->latency_dispatch({}, {}, {});
    return status;
  }
  auto made = std::make_unique<ferry_routing>();
  Result<Routing> routing = group->value->latency_dispatch(input, output, options, to_stream(stream));
  if (!routing.ok()) return routing.status();
  made->value = std::move(*routing);
  *handle = made.release();
  return {};
}

Status read_combine(const char* call, const ferry_latency_combine_input* given_input,
                    const ferry_latency_combine_output* given_output,
                    const ferry_latency_combine_options* given_options, LatencyCombineInput& input,
                    LatencyCombineOutput& output, LatencyCombineOptions& options) {
  ferry_latency_combine_input in;
  if (Status status = read_struct(call, given_input, in); !status.ok()) return status;
  ferry_latency_combine_output out;
  if (Status status = read_struct(call, given_output, out); !status.ok()) return status;
  ferry_latency_combine_options read;
  if (Status status = read_struct(call, given_options, read); !status.ok()) return status;
  input.x = tensor_view(in.x);
  input.topk_weights = tensor_view(in.topk_weights);
  input.signals = {tensor_view(in.signal_words), in.tile_rows, in.threshold};
  output.x = tensor_view(out.x);
  options.order = static_cast<CombineOrder>(read.order);
  options.split = read.split != 0;
  options.kernel = kernel_options(read);
  options.wait_times_ns = tensor_view(read.wait_times_ns);
  options.wire_format = static_cast<WireFormat>(read.wire_format);
  return {};
}

Status combine(ferry_group* group, const ferry_routing* routing, const ferry_latency_combine_input* given_input,
               const ferry_latency_combine_output* given_output, const ferry_latency_combine_options* given_options,
               void* stream) {
  constexpr const char* kCall = "ferry_latency_combine";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  LatencyCombineInput input;
  LatencyCombineOutput output;
  LatencyCombineOptions options;
  Status status = read_combine(kCall, given_input, given_output, given_options, input, output, options);
  if (!status.ok()) {
    (void)group->value->latency_combine({}, {}, {});
    return status;
  }
  return group->value->latency_combine(routing_of(routing), input, output, to_stream(stream), options);
}

Status bytes_required(const ferry_latency_shape* given, std::uint64_t* num_bytes) {
  constexpr const char* kCall = "ferry_latency_bytes_required";
  if (num_bytes == nullptr) return invalid(kCall, "the pointer to the number is null");
  ferry_latency_shape read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  LatencyShape shape;
  shape.backend = text_or(read.backend, shape.backend.c_str());
  shape.num_ranks = nonzero_or(read.num_ranks, shape.num_ranks);
  shape.max_tokens = read.max_tokens;
  shape.num_topk = read.num_topk;
  shape.dispatch_row_bytes = read.dispatch_row_bytes;
  shape.combine_row_bytes = read.combine_row_bytes;
  shape.order = static_cast<CombineOrder>(read.order);
  Result<std::size_t> required = latency_bytes_required(shape);
  if (required.ok()) *num_bytes = *required;
  return required.status();
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_latency_dispatch(ferry_group* group, const ferry_latency_dispatch_input* input,
                                     const ferry_latency_dispatch_output* output,
                                     const ferry_latency_dispatch_options* options, void* stream,
                                     ferry_routing** routing) {
  return guarded([&] { return dispatch(group, input, output, options, stream, routing); });
}

ferry_status* ferry_latency_combine(ferry_group* group, const ferry_routing* routing,
                                    const ferry_latency_combine_input* input,
                                    const ferry_latency_combine_output* output,
                                    const ferry_latency_combine_options* options, void* stream) {
  return guarded([&] { return combine(group, routing, input, output, options, stream); });
}

ferry_status* ferry_latency_receive(ferry_group* group, const ferry_routing* routing, void* stream) {
  return guarded([&] {
    if (group == nullptr) return invalid("ferry_latency_receive", kNoGroup);
    return group->value->latency_receive(routing_of(routing), to_stream(stream));
  });
}

ferry_status* ferry_latency_update_mask(ferry_group* group, int32_t rank, int32_t masked, void* stream) {
  return guarded([&] {
    if (group == nullptr) return invalid("ferry_latency_update_mask", kNoGroup);
    return group->value->latency_update_mask(rank, masked != 0, to_stream(stream));
  });
}

ferry_status* ferry_latency_query_mask(ferry_group* group, const ferry_tensor* output, void* stream) {
  return guarded([&] {
    if (group == nullptr) return invalid("ferry_latency_query_mask", kNoGroup);
    return group->value->latency_query_mask(tensor_view(output), to_stream(stream));
  });
}

ferry_status* ferry_latency_clear_mask(ferry_group* group, void* stream) {
  return guarded([&] {
    if (group == nullptr) return invalid("ferry_latency_clear_mask", kNoGroup);
    return group->value->latency_clear_mask(to_stream(stream));
  });
}

ferry_status* ferry_latency_bytes_required(const ferry_latency_shape* shape, uint64_t* num_bytes) {
  return guarded([&] { return bytes_required(shape, num_bytes); });
}
