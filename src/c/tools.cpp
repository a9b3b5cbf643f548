/// C interface of tables, quantisation and sizes around the calls.

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"
#include "ferry/channel_tables.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/fp8.hpp"
#include "ferry/group.hpp"
#include "ferry/int8.hpp"

namespace ferry::c {
namespace {

static_assert(FERRY_FP8_SCALE_FLOAT32 == static_cast<int>(Fp8ScaleFormat::kFloat32));
static_assert(FERRY_FP8_SCALE_POWER_OF_TWO == static_cast<int>(Fp8ScaleFormat::kPowerOfTwo));
static_assert(FERRY_FP8_SCALE_UE8M0 == static_cast<int>(Fp8ScaleFormat::kUe8m0));

Status channel_tables(ferry_group* group, const ferry_routing* routing, std::int32_t num_channels,
                      const ferry_channel_tables_output* given, void* stream) {
  constexpr const char* kCall = "ferry_channel_tables";
  if (group == nullptr) return invalid(kCall, "the group is null");
  ferry_channel_tables_output read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  const ChannelTables output{tensor_view(read.rank_prefix), tensor_view(read.send_channel_prefix),
                             tensor_view(read.recv_channel_prefix), tensor_view(read.source_token),
                             tensor_view(read.send_index)};
  return group->value->channel_tables(routing_of(routing), num_channels, output, to_stream(stream));
}

Status layout(const ferry_tensor* topk_idx, const ferry_dispatch_layout_options* given_options,
              const ferry_dispatch_layout_output* given_output, void* stream) {
  constexpr const char* kCall = "ferry_dispatch_layout";
  ferry_dispatch_layout_options read;
  if (Status status = read_struct(kCall, given_options, read); !status.ok()) return status;
  ferry_dispatch_layout_output out;
  if (Status status = read_struct(kCall, given_output, out); !status.ok()) return status;
  DispatchLayoutOptions options;
  options.num_experts = read.num_experts;
  options.num_ranks = nonzero_or(read.num_ranks, options.num_ranks);
  options.ranks_per_node = read.ranks_per_node;
  options.expert_to_rank = tensor_view(read.expert_to_rank);
  if (read.backend != nullptr) options.backend = read.backend;
  if (read.use_device != 0) options.device = read.device;
  const DispatchLayout output{tensor_view(out.num_tokens_per_rank), tensor_view(out.num_tokens_per_node),
                              tensor_view(out.num_tokens_per_expert), tensor_view(out.is_token_in_rank)};
  return dispatch_layout(tensor_view(topk_idx), options, output, to_stream(stream));
}

/// Runs `run` with the caller's options, converted to ExecutionOptions; `call` names the function in errors.
template <typename Run>
ferry_status* run_quantizing(const char* call, const ferry_execution_options* given, const Run& run) noexcept {
  return guarded([&] {
    ferry_execution_options read;
    if (Status status = read_struct(call, given, read); !status.ok()) return status;
    return run(to_execution(read));
  });
}

MemoryShape to_shape(const ferry_memory_shape& read) {
  constexpr std::int64_t kNone = -1;
  MemoryShape shape;
  shape.backend = text_or(read.backend, shape.backend.c_str());
  shape.num_ranks = nonzero_or(read.num_ranks, shape.num_ranks);
  shape.ranks_per_node = read.ranks_per_node;
  shape.num_experts = read.num_experts;
  shape.num_tokens = read.num_tokens;
  shape.num_topk = read.num_topk;
  shape.num_recv_rows = read.num_recv_rows;
  shape.num_used_rows = read.num_used_rows == kNone ? 0 : nonzero_or(read.num_used_rows, shape.num_used_rows);
  shape.row_bytes = read.row_bytes;
  shape.scale_row_bytes = read.scale_row_bytes;
  shape.quantized_row_bytes = read.quantized_row_bytes;
  shape.layout = static_cast<Layout>(read.layout);
  shape.weights = read.weights != 0;
  shape.symmetric = read.plain_memory == 0;
  shape.max_tokens = read.max_tokens;
  shape.num_node_tokens = read.num_node_tokens;
  shape.num_forwarded_tokens = read.num_forwarded_tokens;
  shape.num_node_entries = read.num_node_entries;
  shape.num_local_experts =
      read.num_local_experts == kNone ? 0 : nonzero_or(read.num_local_experts, shape.num_local_experts);
  shape.num_routings = nonzero_or(read.num_routings, shape.num_routings);
  shape.latency_bytes = static_cast<std::size_t>(read.latency_bytes);
  shape.symmetric_tables = read.symmetric_tables != 0;
  shape.num_logical_experts = read.num_logical_experts;
  shape.placement_on_device = read.placement_on_device != 0;
  return shape;
}

Status required_bytes(const ferry_memory_shape* given, std::uint64_t* num_bytes) {
  constexpr const char* kCall = "ferry_bytes_required";
  if (num_bytes == nullptr) return invalid(kCall, "the pointer to the number is null");
  ferry_memory_shape read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  Result<std::size_t> required = bytes_required(to_shape(read));
  if (required.ok()) *num_bytes = *required;
  return required.status();
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;
using ferry::ExecutionOptions;

ferry_status* ferry_channel_tables(ferry_group* group, const ferry_routing* routing, int32_t num_channels,
                                   const ferry_channel_tables_output* output, void* stream) {
  return guarded([&] { return channel_tables(group, routing, num_channels, output, stream); });
}

ferry_status* ferry_dispatch_layout(const ferry_tensor* topk_idx, const ferry_dispatch_layout_options* options,
                                    const ferry_dispatch_layout_output* output, void* stream) {
  return guarded([&] { return layout(topk_idx, options, output, stream); });
}

ferry_status* ferry_quantize_fp8(const ferry_tensor* x, const ferry_tensor* q, const ferry_tensor* scales,
                                 int32_t scale_format, const ferry_execution_options* options, void* stream) {
  return run_quantizing("ferry_quantize_fp8", options, [&](const ExecutionOptions& execution) {
    return ferry::quantize_fp8(tensor_view(x), tensor_view(q), tensor_view(scales),
                               static_cast<ferry::Fp8ScaleFormat>(scale_format), execution, to_stream(stream));
  });
}

ferry_status* ferry_dequantize_fp8(const ferry_tensor* q, const ferry_tensor* scales, const ferry_tensor* x,
                                   const ferry_execution_options* options, void* stream) {
  return run_quantizing("ferry_dequantize_fp8", options, [&](const ExecutionOptions& execution) {
    return ferry::dequantize_fp8(tensor_view(q), tensor_view(scales), tensor_view(x), execution, to_stream(stream));
  });
}

ferry_status* ferry_quantize_int8(const ferry_tensor* x, const ferry_tensor* q, const ferry_tensor* scales,
                                  const ferry_execution_options* options, void* stream) {
  return run_quantizing("ferry_quantize_int8", options, [&](const ExecutionOptions& execution) {
    return ferry::quantize_int8(tensor_view(x), tensor_view(q), tensor_view(scales), execution, to_stream(stream));
  });
}

ferry_status* ferry_dequantize_int8(const ferry_tensor* q, const ferry_tensor* scales, const ferry_tensor* x,
                                    const ferry_execution_options* options, void* stream) {
  return run_quantizing("ferry_dequantize_int8", options, [&](const ExecutionOptions& execution) {
    return ferry::dequantize_int8(tensor_view(q), tensor_view(scales), tensor_view(x), execution, to_stream(stream));
  });
}

ferry_status* ferry_bytes_required(const ferry_memory_shape* shape, uint64_t* num_bytes) {
  return guarded([&] { return required_bytes(shape, num_bytes); });
}
