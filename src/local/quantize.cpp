#include "numeric/quantize.hpp"

#include <fmt/format.h>

#include <string_view>

#include "core/checks.hpp"
#include "ferry/fp8.hpp"
#include "ferry/int8.hpp"
#include "local/local_ops.hpp"
#include "numeric/strided.hpp"

namespace ferry {
namespace {

using numeric::bad_argument;
using numeric::check_matrix;
using numeric::check_output_matrix;
using numeric::MatrixRule;
using numeric::QuantizeParams;

std::string dtype_text(const ConstTensorView& view) { return std::string(to_string(view.dtype)); }

/// Views of either direction, which decides whether `x` or `q` is read and the other one written.
struct Arguments {
  std::string_view call;
  ConstTensorView x;
  ConstTensorView q;
  ConstTensorView scales;
  bool quantize = true;
  bool is_int8 = false;
};

Status check_inner_stride(const ConstTensorView& view, const MatrixRule& rule) {
  if (view.extent(1) <= 1 || view.stride(1) == 1) return {};
  return bad_argument(rule, fmt::format("of inner stride {}", view.stride(1)), "inner stride 1",
                      "make the channels of a row contiguous");
}

Status check_dtypes(const Arguments& args, const MatrixRule& x_rule, const MatrixRule& q_rule,
                    const MatrixRule& scales_rule) {
  if (args.x.dtype != DType::kBfloat16 && args.x.dtype != DType::kFloat32) {
    return bad_argument(x_rule, dtype_text(args.x), "bf16 or f32", "convert it first");
  }
  const DType q_dtype = args.is_int8 ? DType::kInt8 : DType::kFloat8E4M3;
  if (args.q.dtype != q_dtype) {
    return bad_argument(q_rule, dtype_text(args.q), std::string(to_string(q_dtype)), "give a view of that dtype");
  }
  const DType scales = args.scales.dtype;
  if (scales == DType::kFloat32) return {};
  if (args.is_int8) return bad_argument(scales_rule, dtype_text(args.scales), "f32", "INT8 has no other scales");
  if (scales == DType::kUint8 || scales == DType::kInt32) return {};
  return bad_argument(scales_rule, dtype_text(args.scales), "f32, u8 or i32", "u8 scales are E8M0 exponents, i32 four");
}

Status validate(const Arguments& args) {
  const ConstTensorView& lead = args.quantize ? args.x : args.q;
  const std::string_view lead_name = args.quantize ? "x" : "q";
  if (lead.num_dims != 2 || lead.extent(0) < 0 || lead.extent(1) < 1) {
    return bad_argument({args.call, lead_name}, lead.present() ? numeric::shape_text(lead) : "absent", "[T, H], H >= 1",
                        "give a two-dimensional view");
  }
  const std::int64_t num_tokens = lead.extent(0);
  const std::int64_t hidden = lead.extent(1);
  const MatrixRule x_rule{args.call, "x", num_tokens, hidden};
  const MatrixRule q_rule{args.call, "q", num_tokens, hidden};
  const MatrixRule scales_rule{args.call, "scales", num_tokens, numeric::num_scale_columns(hidden, args.scales.dtype)};

  const auto check = [](const ConstTensorView& view, const MatrixRule& rule, bool output) {
    return output ? check_output_matrix(view, rule) : check_matrix(view, rule);
  };
  if (Status status = check(args.x, x_rule, !args.quantize); !status.ok()) return status;
  if (Status status = check(args.q, q_rule, args.quantize); !status.ok()) return status;
  if (Status status = check(args.scales, scales_rule, args.quantize); !status.ok()) return status;
  if (Status status = check_dtypes(args, x_rule, q_rule, scales_rule); !status.ok()) return status;
  if (Status status = check_inner_stride(args.x, x_rule); !status.ok()) return status;
  return check_inner_stride(args.q, q_rule);
}

Status check_format(const ConstTensorView& scales, Fp8ScaleFormat format) {
  const MatrixRule rule{"quantize_fp8", "scales"};
  switch (format) {
    case Fp8ScaleFormat::kFloat32:
    case Fp8ScaleFormat::kPowerOfTwo:
      if (scales.dtype == DType::kFloat32) return {};
      return bad_argument(rule, dtype_text(scales), "f32", "or pass kUe8m0");
    case Fp8ScaleFormat::kUe8m0:
      if (scales.dtype == DType::kUint8 || scales.dtype == DType::kInt32) return {};
      return bad_argument(rule, dtype_text(scales), "u8 or i32 for kUe8m0", "or pass kPowerOfTwo");
  }
  return bad_argument({"quantize_fp8", "format"}, std::to_string(static_cast<int>(format)),
                      "kFloat32, kPowerOfTwo or kUe8m0", "pass an enumerator");
}

Quantization mode_of(Fp8ScaleFormat format) {
  if (format == Fp8ScaleFormat::kFloat32) return Quantization::kFp8;
  return format == Fp8ScaleFormat::kPowerOfTwo ? Quantization::kFp8PowerOfTwo : Quantization::kFp8Ue8m0;
}

/// One struct serves both directions; in each, its inputs are only read.
QuantizeParams params_of(const Arguments& args, Quantization mode) {
  return {.mode = mode,
          .num_rows = args.x.extent(0),
          .hidden = args.x.extent(1),
          .x = const_cast<void*>(args.x.data),
          .x_dtype = args.x.dtype,
          .x_stride = args.x.stride(0),
          .q = static_cast<std::uint8_t*>(const_cast<void*>(args.q.data)),
          .q_stride = args.q.stride(0),
          .scales = {.data = static_cast<std::byte*>(const_cast<void*>(args.scales.data)),
                     .dtype = args.scales.dtype,
                     .row_stride = args.scales.stride(0),
                     .column_stride = args.scales.stride(1)}};
}

Status run(const Arguments& args, Quantization mode, const ExecutionOptions& options, Stream stream) {
  const Result<const LocalOps*> ops = find_local_ops(args.call, options.backend);
  if (!ops.ok()) return ops.status();
  const auto operation = args.quantize ? (*ops)->quantize : (*ops)->dequantize;
  return operation({args.call, options.device, stream}, params_of(args, mode));
}

}  // namespace

Status quantize_fp8(const ConstTensorView& x, const TensorView& q, const TensorView& scales, Fp8ScaleFormat format,
                    const ExecutionOptions& options, Stream stream) {
  const Arguments args{"quantize_fp8", x, q, scales, true, false};
  if (Status status = validate(args); !status.ok()) return status;
  if (Status status = check_format(scales, format); !status.ok()) return status;
  return run(args, mode_of(format), options, stream);
}

Status dequantize_fp8(const ConstTensorView& q, const ConstTensorView& scales, const TensorView& x,
                      const ExecutionOptions& options, Stream stream) {
  const Arguments args{"dequantize_fp8", x, q, scales, false, false};
  if (Status status = validate(args); !status.ok()) return status;
  return run(args, Quantization::kFp8, options, stream);
}

Status quantize_int8(const ConstTensorView& x, const TensorView& q, const TensorView& scales,
                     const ExecutionOptions& options, Stream stream) {
  const Arguments args{"quantize_int8", x, q, scales, true, true};
  if (Status status = validate(args); !status.ok()) return status;
  return run(args, Quantization::kInt8, options, stream);
}

Status dequantize_int8(const ConstTensorView& q, const ConstTensorView& scales, const TensorView& x,
                       const ExecutionOptions& options, Stream stream) {
  const Arguments args{"dequantize_int8", x, q, scales, false, true};
  if (Status status = validate(args); !status.ok()) return status;
  return run(args, Quantization::kInt8, options, stream);
}

}  // namespace ferry
