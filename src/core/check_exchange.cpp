#include <fmt/format.h>

#include <array>

#include "core/checks.hpp"
#include "core/overlap.hpp"
#include "numeric/quantize.hpp"

namespace ferry {
namespace {

/// Extents and strides above this are mistakes; the bound keeps byte arithmetic inside 64 bits.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 40;
/// Largest S: a token's record of scales, ids and weights then has fewer than 2^31 words (plan::TokenRecord).
constexpr std::int64_t kMaxScales = std::int64_t{1} << 30;

Status invalid_exchange(std::string message) { return Status(ErrorCode::kInvalidArgument, std::move(message)); }

/// Checks a payload view as rows: [num_rows, H], or [L, C, H] with L*C == num_rows, evenly spaced.
template <typename View, typename RowsOut>
Status check_rows(std::string_view what, const View& view, std::int64_t num_rows, RowsOut& rows) {
  if (view.num_dims != 2 && view.num_dims != 3) {
    return invalid_exchange(fmt::format("{} is {}, expected [{}, H]", what, describe(view), num_rows));
  }
  const int last = view.num_dims - 1;
  for (int dim = 0; dim <= last; ++dim) {
    if (view.extent(dim) < 0 || view.extent(dim) > kMaxExtent || view.stride(dim) < 0 ||
        view.stride(dim) > kMaxExtent) {
      return invalid_exchange(fmt::format("{} is {} with stride {} in dimension {}: out of range", what, describe(view),
                                          view.stride(dim), dim));
    }
  }
  const std::int64_t rows_given =
      view.num_dims == 2
          ? view.extent(0)
          : (view.extent(1) != 0 && view.extent(0) > kMaxExtent / view.extent(1) ? -1
                                                                                 : view.extent(0) * view.extent(1));
  if (rows_given != num_rows) {
    return invalid_exchange(
        fmt::format("{} is {}: it has {} rows, expected exactly {}", what, describe(view), rows_given, num_rows));
  }
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(view.dtype));
  if (element_bytes == 0)
    return invalid_exchange(fmt::format("{} has an unknown dtype {}", what, static_cast<int>(view.dtype)));
  const std::int64_t row_bytes = view.extent(last) * element_bytes;
  if (row_bytes <= 0 || row_bytes % kRowGranuleBytes != 0) {
    return invalid_exchange(
        fmt::format("{} is {}: a row has {} bytes, expected a positive multiple of {}; pad H to a multiple of {}", what,
                    describe(view), row_bytes, kRowGranuleBytes, kRowGranuleBytes / element_bytes));
  }
  rows.num_rows = num_rows;
  rows.row_bytes = row_bytes;
  rows.dtype = view.dtype;
  rows.stride_bytes = row_bytes;
  if (num_rows == 0) return {};

  if (view.stride(last) != 1) {
    return invalid_exchange(fmt::format("{} has stride {} in its last dimension, expected 1: a row must be contiguous",
                                        what, view.stride(last)));
  }
  if (num_rows > 1) rows.stride_bytes = view.stride(last - 1) * element_bytes;  // a single row has no stride
  if (view.num_dims == 3 && view.extent(0) > 1 && view.stride(0) != view.extent(1) * view.stride(1)) {
    return invalid_exchange(fmt::format("{} has stride {} in dimension 0, expected {}: its rows must be evenly spaced",
                                        what, view.stride(0), view.extent(1) * view.stride(1)));
  }
  if (num_rows > 1 && (rows.stride_bytes < row_bytes || rows.stride_bytes % kRowGranuleBytes != 0)) {
    return invalid_exchange(
        fmt::format("{} has a row stride of {} bytes, expected a multiple of {} that is at least the row's {}", what,
                    rows.stride_bytes, kRowGranuleBytes, row_bytes));
  }
  if (view.data == nullptr) {
    return invalid_exchange(fmt::format("{} is a null pointer, expected memory of {}", what, describe(view)));
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % kRowGranuleBytes != 0) {
    return invalid_exchange(
        fmt::format("{} is at address {}, expected a multiple of {} bytes", what, view.data, kRowGranuleBytes));
  }
  using Byte = std::remove_pointer_t<decltype(rows.data)>;
  rows.data = static_cast<Byte*>(view.data);
  return {};
}

/// Checks scales [num_rows, S], or for a slab [L, C, S] of as many rows; any strides.
Status check_scales(std::string_view what, const ConstTensorView& view, std::int64_t num_rows,
                    ScaleShapes shapes = ScaleShapes::kRows) {
  const bool slab = shapes == ScaleShapes::kSlabs && view.num_dims == kMaxTensorDims;
  bool fits = view.num_dims == 2 && view.extent(0) == num_rows;
  if (slab) {
    fits = view.extent(0) >= 0 && view.extent(1) >= 1 && num_rows % view.extent(1) == 0 &&
           view.extent(0) == num_rows / view.extent(1);
  }
  if (!fits || num_scales(view) < 1 || num_scales(view) > kMaxScales) {
    return invalid_exchange(fmt::format("{} is {}, expected {}[{}, S] with S from 1 to {}", what, describe(view),
                                        shapes == ScaleShapes::kSlabs ? "[L, C, S] or " : "", num_rows, kMaxScales));
  }
  if (view.dtype != DType::kFloat32 && view.dtype != DType::kInt32 && view.dtype != DType::kUint8) {
    return invalid_exchange(fmt::format("{} has dtype {}, expected f32, i32 or u8", what, to_string(view.dtype)));
  }
  if (num_rows == 0) return {};
  if (view.data == nullptr) {
    return invalid_exchange(fmt::format("{} is a null pointer, expected memory of {}", what, describe(view)));
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_bytes(view.dtype) != 0) {
    return invalid_exchange(fmt::format("{} is at address {}, which is not aligned to its {}-byte elements", what,
                                        view.data, size_bytes(view.dtype)));
  }
  for (int dim = 0; dim < view.num_dims; ++dim) {
    if (view.stride(dim) < 0 || view.stride(dim) > kMaxExtent) {
      return invalid_exchange(
          fmt::format("{} has stride {} in dimension {}, expected 0 to {}", what, view.stride(dim), dim, kMaxExtent));
    }
  }
  return {};
}

/// Checks a dispatch that sends its rows as they are.
Status check_plain_payload(const RoutingState& routing, const DispatchInput& in, const DispatchOutput& out,
                           ScaleShapes scale_shapes, DispatchCall& call) {
  if (call.x.dtype != call.out_x.dtype || call.x.row_bytes != call.out_x.row_bytes) {
    return invalid_exchange(fmt::format("dispatch: output x is {} but input x is {}: dtype and H must be equal",
                                        describe(out.x), describe(in.x)));
  }
  if (in.scales.present() != out.scales.present()) {
    return invalid_exchange(fmt::format("dispatch: input scales are {} but output scales are {}: give both or neither",
                                        describe(in.scales), describe(out.scales)));
  }
  if (!in.scales.present()) return {};
  if (Status status = check_scales("dispatch: input scales", in.scales, routing.num_tokens); !status.ok())
    return status;
  if (Status status = check_scales("dispatch: output scales", out.scales, routing.num_recv_rows, scale_shapes);
      !status.ok()) {
    return status;
  }
  if (in.scales.dtype != out.scales.dtype || in.scales.extent(1) != num_scales(out.scales)) {
    return invalid_exchange(
        fmt::format("dispatch: output scales are {} but input scales are {}: dtype and S must be equal",
                    describe(out.scales), describe(in.scales)));
  }
  call.scales = in.scales;
  return {};
}

std::string_view name_of(Quantization mode) {
  switch (mode) {
    case Quantization::kNone:
      return "kNone";
    case Quantization::kFp8:
      return "kFp8";
    case Quantization::kFp8PowerOfTwo:
      return "kFp8PowerOfTwo";
    case Quantization::kFp8Ue8m0:
      return "kFp8Ue8m0";
    case Quantization::kInt8:
      return "kInt8";
  }
  return {};
}

/// Checks a dispatch that quantises its rows.
Status check_quantized_payload(const RoutingState& routing, const DispatchInput& in, const DispatchOutput& out,
                               ScaleShapes scale_shapes, const DispatchCall& call) {
  const std::string_view mode = name_of(call.quantize);
  if (mode.empty()) {
    return invalid_exchange(
        fmt::format("dispatch: quantize is {}, expected kNone, kFp8, kFp8PowerOfTwo, kFp8Ue8m0 or kInt8; pass an "
                    "enumerator",
                    static_cast<int>(call.quantize)));
  }
  if (call.x.dtype != DType::kBfloat16) {
    return invalid_exchange(
        fmt::format("dispatch: input x is {}, expected bf16 to quantise (quantize is {}); convert it, or "
                    "quantise it beforehand and pass kNone",
                    describe(in.x), mode));
  }
  if (in.scales.present()) {
    return invalid_exchange(
        fmt::format("dispatch: input scales are {}, expected absent: quantising makes them (quantize is {})",
                    describe(in.scales), mode));
  }
  const DType dtype = numeric::quantized_dtype(call.quantize);
  const std::int64_t hidden = in.x.extent(in.x.num_dims - 1);
  if (call.out_x.dtype != dtype || call.out_x.row_bytes != hidden) {
    return invalid_exchange(
        fmt::format("dispatch: output x is {} but input x is {}, expected {} of the same H (quantize is {})",
                    describe(out.x), describe(in.x), to_string(dtype), mode));
  }
  const bool exponents = call.quantize == Quantization::kFp8Ue8m0;
  const DType scales = out.scales.dtype;
  if (!out.scales.present() ||
      (exponents ? scales != DType::kUint8 && scales != DType::kInt32 : scales != DType::kFloat32)) {
    return invalid_exchange(fmt::format("dispatch: output scales are {}, expected {} (quantize is {})",
                                        describe(out.scales), exponents ? "u8 or i32" : "f32", mode));
  }
  if (Status status = check_scales("dispatch: output scales", out.scales, routing.num_recv_rows, scale_shapes);
      !status.ok()) {
    return status;
  }
  const std::int64_t num_columns = numeric::num_scale_columns(hidden, scales);
  if (num_scales(out.scales) == num_columns) return {};
  return invalid_exchange(
      fmt::format("dispatch: output scales are {}, expected [{}, {}] for an H of {}: one for {} channels",
                  describe(out.scales), routing.num_recv_rows, num_columns, hidden,
                  kQuantBlockSize * (scales == DType::kInt32 ? numeric::kPackedScales : 1)));
}

Status check_dispatch_tables(const RoutingState& routing, const DispatchOutput& out, const DispatchCall& call) {
  const std::int64_t rows = routing.num_recv_rows;
  if (out.topk_idx.present()) {
    if (routing.layout != Layout::kTokens) {
      return invalid_exchange(
          "dispatch: output topk_idx is present, expected absent: in layouts kExperts and kSlab the group of a row "
          "names its expert");
    }
    if (Status status = check_table("dispatch: output topk_idx", out.topk_idx, {rows, routing.num_topk},
                                    {DType::kInt32, DType::kInt64});
        !status.ok()) {
      return status;
    }
  }
  if (out.topk_weights.present()) {
    if (!call.topk_weights.present()) {
      return invalid_exchange(
          "dispatch: output topk_weights is present but there are no weights to send; give topk_weights to route or "
          "to dispatch");
    }
    Status status = routing.layout == Layout::kTokens
                        ? check_table("dispatch: output topk_weights", out.topk_weights, {rows, routing.num_topk},
                                      {DType::kFloat32})
                        : check_table("dispatch: output topk_weights", out.topk_weights, {rows}, {DType::kFloat32});
    if (!status.ok()) return status;
  }
  if (out.source.present()) return check_table("dispatch: output source", out.source, {rows, 2}, {DType::kInt32});
  return {};
}

Status check_sums(const RoutingState& routing, const CombineInput& in, const CombineOutput& out, CombineCall& call) {
  if (Status status = check_rows("combine: input x", in.x, routing.num_recv_rows, call.x); !status.ok()) return status;
  if (call.x.dtype != DType::kBfloat16 && call.x.dtype != DType::kFloat32) {
    return invalid_exchange(
        fmt::format("combine: input x has dtype {}, expected bf16 or f32", to_string(call.x.dtype)));
  }
  if (Status status = check_rows("combine: output x", out.x, routing.num_tokens, call.out_x); !status.ok())
    return status;
  if (call.x.dtype != call.out_x.dtype || call.x.row_bytes != call.out_x.row_bytes) {
    return invalid_exchange(fmt::format("combine: output x is {} but input x is {}: dtype and H must be equal",
                                        describe(out.x), describe(in.x)));
  }
  for (std::size_t i = 0; i < in.bias.size(); ++i) {
    if (!in.bias[i].present()) continue;
    const std::string what = fmt::format("combine: bias[{}]", i);
    if (Status status = check_rows(what, in.bias[i], routing.num_tokens, call.bias[i]); !status.ok()) return status;
    if (call.bias[i].dtype != call.x.dtype || call.bias[i].row_bytes != call.x.row_bytes) {
      return invalid_exchange(fmt::format("{} is {} but input x is {}: dtype and H must be equal", what,
                                          describe(in.bias[i]), describe(in.x)));
    }
  }
  if (in.weights.present() != out.weights.present()) {
    return invalid_exchange(fmt::format("combine: input weights are {} but output weights are {}: give both or neither",
                                        describe(in.weights), describe(out.weights)));
  }
  if (in.weights.present()) {
    Status status = routing.layout == Layout::kTokens
                        ? check_table("combine: input weights", in.weights, {routing.num_recv_rows, routing.num_topk},
                                      {DType::kFloat32})
                        : check_table("combine: input weights", in.weights, {routing.num_recv_rows}, {DType::kFloat32});
    if (!status.ok()) return status;
    status =
        check_table("combine: output weights", out.weights, {routing.num_tokens, routing.num_topk}, {DType::kFloat32});
    if (!status.ok()) return status;
    call.weights = in.weights;
    call.out_weights = out.weights;
  }
  return {};
}

/// Checks the format in which rows travel.
Status check_wire_format(const CombineInput& in, const CombineOptions& options, CombineCall& call) {
  call.wire_format = options.wire_format;
  if (options.wire_format == WireFormat::kAsGiven) return {};
  if (options.wire_format != WireFormat::kFp8) {
    return invalid_exchange(fmt::format("combine: wire_format is {}, expected kAsGiven or kFp8; pass an enumerator",
                                        static_cast<int>(options.wire_format)));
  }
  const std::int64_t hidden = in.x.extent(in.x.num_dims - 1);
  if (hidden % kQuantBlockSize == 0) return {};
  return invalid_exchange(fmt::format(
      "combine: input x is {}, expected an H that is a multiple of {}, as wire_format is kFp8; pad H or pass "
      "kAsGiven",
      describe(in.x), kQuantBlockSize));
}

/// Checks the weights of a weighted combine.
Status check_combine_weights(const RoutingState& routing, const CombineInput& in, const CombineOptions& options,
                             CombineCall& call) {
  call.weighted = options.weighted;
  if (!options.weighted) return {};
  if (in.topk_weights.present()) {
    if (Status status = check_table("combine: input topk_weights", in.topk_weights,
                                    {routing.num_tokens, routing.num_topk}, {DType::kFloat32});
        !status.ok()) {
      return status;
    }
    call.topk_weights = in.topk_weights;
  } else if (routing.topk_weights.present()) {
    call.topk_weights = routing.topk_weights;
  } else {
    return invalid_exchange("combine: weighted, but there are no weights; give topk_weights to route or to combine");
  }
  return {};
}

}  // namespace

Status check_scales_output(std::string_view operation, const ConstTensorView& view) {
  const int last = view.num_dims - 1;
  const std::int64_t rows = view.extent(last - 1);
  const std::int64_t width = view.extent(last);
  if (rows == 0 || view.extent(0) == 0) return {};
  const std::int64_t row_stride = view.stride(last - 1);
  const std::int64_t column_stride = view.stride(last);
  const bool row_major = rows == 1 || (row_stride >= (width - 1) * column_stride + 1);
  const bool column_major = width == 1 || (column_stride >= (rows - 1) * row_stride + 1);
  const bool distinct = (rows == 1 || row_stride > 0) && (width == 1 || column_stride > 0);
  const bool apart = view.num_dims == 2 || view.extent(0) == 1 ||
                     view.stride(0) >= (rows - 1) * row_stride + (width - 1) * column_stride + 1;
  if (distinct && apart && (row_major || column_major)) return {};
  return invalid_exchange(
      fmt::format("{}: output scales {} have strides {}{} and {}: elements overlap{}; give each element memory of its "
                  "own",
                  operation, describe(view), view.num_dims == 2 ? "" : fmt::format("{}, ", view.stride(0)), row_stride,
                  column_stride, apart ? "" : ", or one expert's reach into the next one's"));
}

Status check_dispatch(const RoutingState& routing, const DispatchInput& in, const DispatchOutput& out,
                      const DispatchOptions& options, DispatchCall& call, ScaleShapes scale_shapes) {
  call.quantize = options.quantize;
  if (Status status = check_rows("dispatch: input x", in.x, routing.num_tokens, call.x); !status.ok()) return status;
  if (Status status = check_rows("dispatch: output x", out.x, routing.num_recv_rows, call.out_x); !status.ok())
    return status;
  Status payload = call.quantize == Quantization::kNone ? check_plain_payload(routing, in, out, scale_shapes, call)
                                                        : check_quantized_payload(routing, in, out, scale_shapes, call);
  if (!payload.ok()) return payload;
  if (out.scales.present()) {
    if (Status status = check_scales_output("dispatch", out.scales); !status.ok()) return status;
    call.out_scales = out.scales;
  }
  if (in.topk_weights.present()) {
    if (Status status = check_table("dispatch: input topk_weights", in.topk_weights,
                                    {routing.num_tokens, routing.num_topk}, {DType::kFloat32});
        !status.ok()) {
      return status;
    }
  }
  call.topk_weights = in.topk_weights.present() ? in.topk_weights : routing.topk_weights;
  if (Status status = check_dispatch_tables(routing, out, call); !status.ok()) return status;
  call.out_topk_idx = out.topk_idx;
  call.out_topk_weights = out.topk_weights;
  call.out_source = out.source;
  if (Status status = check_kernel("dispatch", options.kernel); !status.ok()) return status;
  const std::array outputs{Footprint("output x", call.out_x), Footprint("output scales", call.out_scales),
                           Footprint("output topk_idx", call.out_topk_idx),
                           Footprint("output topk_weights", call.out_topk_weights),
                           Footprint("output source", call.out_source)};
  const std::array inputs{Footprint("input x", call.x), Footprint("input scales", call.scales),
                          Footprint("input topk_weights", in.topk_weights)};
  return check_overlap("dispatch", outputs, inputs);
}

Status check_combine(const RoutingState& routing, const CombineInput& in, const CombineOutput& out,
                     const CombineOptions& options, CombineCall& call) {
  if (Status status = check_sums(routing, in, out, call); !status.ok()) return status;
  if (Status status = check_wire_format(in, options, call); !status.ok()) return status;
  if (Status status = check_combine_weights(routing, in, options, call); !status.ok()) return status;
  if (Status status = check_kernel("combine", options.kernel); !status.ok()) return status;
  const std::array outputs{Footprint("output x", call.out_x), Footprint("output weights", call.out_weights)};
  const std::array inputs{Footprint("input x", call.x), Footprint("input weights", call.weights),
                          Footprint("input topk_weights", call.topk_weights)};
  // Each row of the sum is written only after all its inputs have been read, so a bias may share its memory.
  const std::array biases{Footprint("bias[0]", call.bias[0]), Footprint("bias[1]", call.bias[1])};
  return check_overlap("combine", outputs, inputs, biases);
}

Status check_wire_reach(const CombineCall& call, const Topology& topology, bool verifies) {
  if (call.wire_format == WireFormat::kAsGiven) return {};
  if (topology.num_nodes() > 1 && !call.rank_sums) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("combine: wire_format is kFp8 in a group of {} nodes, expected one node: combine does not "
                    "yet quantise between nodes; pass kAsGiven",
                    topology.num_nodes()));
  }
  if (!verifies) return {};
  return Status(ErrorCode::kUnsupported,
                "combine: wire_format is kFp8 in a group with GroupOptions::verify, expected one without: quantised "
                "rows have no checksums yet; pass kAsGiven");
}

}  // namespace ferry
