#include "cuda/call/dispatch_parts.hpp"

namespace ferry::cuda {

ScaleTable scale_table(const ConstTensorView& view) {
  if (!view.present()) return {};
  // One type serves inputs and outputs; inputs are only read.
  const int last = view.num_dims - 1;
  ScaleTable table{static_cast<std::byte*>(const_cast<void*>(view.data)), static_cast<int>(view.extent(last)),
                   static_cast<int>(size_bytes(view.dtype)), view.stride(last - 1), view.stride(last)};
  if (last == 2) {
    table.slab_rows = view.extent(1);
    table.slab_stride = view.stride(0);
  }
  return table;
}

DispatchOutputs dispatch_outputs(const DispatchCall& call) {
  DispatchOutputs out;
  out.x = call.out_x.data;
  out.x_stride = call.out_x.stride_bytes;
  out.scales = scale_table(call.out_scales);
  out.ids = call.out_topk_idx.data;
  out.wide_ids = call.out_topk_idx.dtype == DType::kInt64;
  out.weights = static_cast<float*>(call.out_topk_weights.data);
  return out;
}

Status split_quantizing(Context& context, const DispatchCall& call, bool captured,
                        std::optional<QuantizedDispatch>& steps) {
  if (call.quantize == Quantization::kNone) return {};
  const std::size_t bytes = quantized_bytes(call);
  std::byte* staging = nullptr;
  if (bytes > 0) {
    const Result<std::byte*> taken = context.staging().quantized(bytes, captured);
    if (!taken.ok()) return taken.status();
    staging = *taken;
  }
  steps = split_quantized(call, staging);
  return {};
}

bool needs_padding(const DispatchCall& call, bool exact_rows) {
  if (call.out_source.present()) return true;
  const bool has_padding = !exact_rows || call.clear_if_refused || call.routing->layout != Layout::kTokens;
  return has_padding && (call.zero_padding || call.out_topk_idx.present());
}

PaddingParams padding_params(const RankParams& ranks, const DispatchCall& call) {
  PaddingParams params;
  params.ranks = ranks;
  params.num_rows = call.routing->num_recv_rows;
  params.out_source = static_cast<std::int32_t*>(call.out_source.data);
  params.out = dispatch_outputs(call);
  params.row_bytes = call.out_x.row_bytes;
  params.num_topk = call.routing->num_topk;
  params.weights_per_row = call.routing->layout == Layout::kTokens ? call.routing->num_topk : 1;
  params.zero = call.zero_padding;
  params.clears_refused = call.clear_if_refused;
  return params;
}

}  // namespace ferry::cuda
