#include "core/quantized_dispatch.hpp"

namespace ferry {

std::size_t quantized_bytes(const DispatchCall& call) {
  const std::int64_t scale_row_bytes =
      num_scales(call.out_scales) * static_cast<std::int64_t>(size_bytes(call.out_scales.dtype));
  return static_cast<std::size_t>(call.x.num_rows * (call.out_x.row_bytes + scale_row_bytes));
}

QuantizedDispatch split_quantized(const DispatchCall& call, std::byte* staging) {
  const std::int64_t num_rows = call.x.num_rows;
  const std::int64_t hidden = call.out_x.row_bytes;
  const std::int64_t num_columns = num_scales(call.out_scales);
  std::byte* const scales = staging + num_rows * hidden;

  QuantizedDispatch steps{
      .quantize =
          {.mode = call.quantize,
           .num_rows = num_rows,
           .hidden = hidden,
           .x = const_cast<std::byte*>(call.x.data),  // only read
           .x_dtype = call.x.dtype,
           .x_stride = call.x.stride_bytes / static_cast<std::int64_t>(sizeof(std::uint16_t)),
           .q = reinterpret_cast<std::uint8_t*>(staging),
           .q_stride = hidden,
           .scales = {.data = scales, .dtype = call.out_scales.dtype, .row_stride = num_columns, .column_stride = 1}},
      .send = call};
  steps.send.quantize = Quantization::kNone;
  steps.send.x = {
      .data = staging, .num_rows = num_rows, .row_bytes = hidden, .stride_bytes = hidden, .dtype = call.out_x.dtype};
  steps.send.scales = ConstTensorView(scales, call.out_scales.dtype, {num_rows, num_columns});
  return steps;
}

}  // namespace ferry
