#include "ferry/expansion.hpp"

#include <fmt/format.h>

#include <limits>
#include <string>

#include "core/checks.hpp"
#include "local/local_ops.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kRowGranuleBytes = 16;

Status invalid_expansion(std::string_view operation, std::string message) {
  return Status(ErrorCode::kInvalidArgument, fmt::format("{}: {}", operation, message));
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kRowGranuleBytes == 0; }

bool is_word(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % sizeof(std::uint32_t) == 0; }

/// Arguments common to both directions.
struct Tables {
  std::string_view operation;
  const ConstTensorView& slots;
  const ConstTensorView& last_equal;
  std::int64_t num_slots = 0;
};

Status check_tables(const Tables& tables, plan::SlotTable& checked) {
  const ConstTensorView& slots = tables.slots;
  if (slots.num_dims != 2 || slots.dtype != DType::kInt32 || slots.extent(1) < 1 || slots.extent(1) > kMaxTopk ||
      slots.extent(0) < 0 || slots.extent(0) > kMaxCount / slots.extent(1) ||
      (slots.extent(1) > 1 && slots.stride(1) != 1) || (slots.extent(0) > 1 && slots.stride(0) < slots.extent(1))) {
    return invalid_expansion(
        tables.operation,
        fmt::format("slots are {}, expected [N, K] i32 with K from 1 to {}, fewer than 2^31 numbers, and "
                    "the choices of a row next to each other",
                    describe(slots), kMaxTopk));
  }
  if (slots.data == nullptr && slots.extent(0) > 0) {
    return invalid_expansion(tables.operation, fmt::format("slots are {} at a null pointer", describe(slots)));
  }
  if (!is_word(slots.data)) {
    return invalid_expansion(tables.operation, fmt::format("slots are {} at {}, expected memory aligned to 4 bytes",
                                                           describe(slots), slots.data));
  }
  if (tables.num_slots < 0 || tables.num_slots > kMaxCount) {
    return invalid_expansion(tables.operation,
                             fmt::format("there are {} rows by expert, expected 0 to {}", tables.num_slots, kMaxCount));
  }
  checked = {.slots = static_cast<const std::int32_t*>(slots.data),
             .last_equal = static_cast<const std::int8_t*>(tables.last_equal.data),
             .stride = slots.stride(0),
             .num_rows = slots.extent(0),
             .num_slots = tables.num_slots,
             .num_topk = static_cast<int>(slots.extent(1))};
  if (!tables.last_equal.present()) return {};
  return check_table(fmt::format("{}: last_equal", tables.operation), tables.last_equal,
                     {slots.extent(0), slots.extent(1)}, {DType::kInt8});
}

/// Checks contiguous [rows, H] with rows of a multiple of 16 bytes.
Status check_rows(std::string_view what, const ConstTensorView& x, std::int64_t num_rows, std::int64_t hidden,
                  std::initializer_list<DType> dtypes) {
  Status status = check_table(what, x, {num_rows, hidden}, dtypes);
  if (!status.ok()) return status;
  const std::int64_t row_bytes = hidden * static_cast<std::int64_t>(size_bytes(x.dtype));
  if (row_bytes == 0 || row_bytes % kRowGranuleBytes != 0 || !is_aligned(x.data)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{} is {} at {}, expected rows of a positive multiple of {} bytes, aligned to as many",
                              what, describe(x), x.data, kRowGranuleBytes));
  }
  return {};
}

Status check_scales(std::string_view what, const ConstTensorView& scales, std::int64_t num_rows,
                    std::int64_t num_scales) {
  if (scales.num_dims == 2 && scales.extent(0) == num_rows && scales.extent(1) == num_scales &&
      (scales.dtype == DType::kFloat32 || scales.dtype == DType::kInt32) &&
      (scales.num_elements() == 0 || (scales.data != nullptr && is_word(scales.data)))) {
    return {};
  }
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{} is {} at {}, expected [{}, {}] f32 or i32 in memory aligned to 4 bytes", what,
                            describe(scales), scales.data, num_rows, num_scales));
}

/// Checks that an output is present exactly if its input is.
Status check_together(std::string_view operation, std::string_view name, bool has_input, bool has_output) {
  if (has_input == has_output) return {};
  return invalid_expansion(operation, fmt::format("{} {} present and its output {}, expected both or neither", name,
                                                  has_input ? "is" : "is not", has_output ? "is" : "is not"));
}

plan::ScaleColumns columns_of(const ConstTensorView& scales) {
  // const_cast: columns of an input are only read.
  return {static_cast<std::uint32_t*>(const_cast<void*>(scales.data)), scales.stride(0), scales.stride(1)};
}

Status check_expansion(const ExpandInput& in, const ExpandOutput& out, plan::ExpandParams& params) {
  constexpr std::string_view kOperation = "expand_rows";
  const std::int64_t num_slots = out.x.extent(0);
  const std::int64_t hidden = in.x.extent(1);
  Status status = check_tables({kOperation, in.slots, in.last_equal, num_slots}, params.table);
  if (status.ok()) status = check_rows("expand_rows: x", in.x, in.slots.extent(0), hidden, {in.x.dtype});
  if (status.ok()) status = check_rows("expand_rows: output x", out.x, num_slots, hidden, {in.x.dtype});
  if (status.ok()) status = check_together(kOperation, "scales", in.scales.present(), out.scales.present());
  if (status.ok() && in.scales.present()) {
    const std::int64_t num_scales = in.scales.extent(1);
    status = check_scales("expand_rows: scales", in.scales, in.slots.extent(0), num_scales);
    if (status.ok()) status = check_scales("expand_rows: output scales", out.scales, num_slots, num_scales);
    if (status.ok()) status = check_scales_output(kOperation, out.scales);
    if (status.ok() && in.scales.dtype != out.scales.dtype) {
      status = invalid_expansion(kOperation, fmt::format("output scales are {}, expected the dtype of the input's, {}",
                                                         describe(out.scales), describe(in.scales)));
    }
    params.num_scales = num_scales;
    params.scales = columns_of(in.scales);
    params.out_scales = columns_of(out.scales);
  }
  if (status.ok()) status = check_together(kOperation, "weights", in.weights.present(), out.weights.present());
  if (status.ok() && in.weights.present()) {
    status =
        check_table("expand_rows: weights", in.weights, {in.slots.extent(0), in.slots.extent(1)}, {DType::kFloat32});
    if (status.ok()) status = check_table("expand_rows: output weights", out.weights, {num_slots}, {DType::kFloat32});
  }
  if (status.ok() && out.row_of_slot.present()) {
    status = check_table("expand_rows: output row_of_slot", out.row_of_slot, {num_slots}, {DType::kInt32});
  }
  params.row_bytes = hidden * static_cast<std::int64_t>(size_bytes(in.x.dtype));
  params.x = static_cast<const std::byte*>(in.x.data);
  params.out_x = static_cast<std::byte*>(out.x.data);
  params.weights = static_cast<const float*>(in.weights.data);
  params.out_weights = static_cast<float*>(out.weights.data);
  params.row_of_slot = static_cast<std::int32_t*>(out.row_of_slot.data);
  return status;
}

Status check_reduction(const ReduceInput& in, const ReduceOutput& out, plan::ReduceParams& params) {
  constexpr std::string_view kOperation = "reduce_rows";
  const std::int64_t num_slots = in.x.extent(0);
  const std::int64_t hidden = in.x.extent(1);
  Status status = check_tables({kOperation, in.slots, in.last_equal, num_slots}, params.table);
  if (status.ok()) status = check_rows("reduce_rows: x", in.x, num_slots, hidden, {DType::kBfloat16});
  if (status.ok()) {
    status =
        check_rows("reduce_rows: output x", out.x, in.slots.extent(0), hidden, {DType::kBfloat16, DType::kFloat32});
  }
  if (status.ok()) status = check_together(kOperation, "weights", in.weights.present(), out.weights.present());
  if (status.ok() && in.weights.present()) {
    status = check_table("reduce_rows: weights", in.weights, {num_slots}, {DType::kFloat32});
    if (status.ok()) {
      status = check_table("reduce_rows: output weights", out.weights, {in.slots.extent(0), in.slots.extent(1)},
                           {DType::kFloat32});
    }
  }
  params.rounds = out.x.dtype == DType::kBfloat16;
  params.hidden = hidden;
  params.x = static_cast<const std::byte*>(in.x.data);
  params.out_x = static_cast<std::byte*>(out.x.data);
  params.weights = static_cast<const float*>(in.weights.data);
  params.out_weights = static_cast<float*>(out.weights.data);
  return status;
}

}  // namespace

Status expand_rows(const ExpandInput& in, const ExpansionOptions& options, const ExpandOutput& out, Stream stream) {
  const Result<const LocalOps*> ops = find_local_ops("expand_rows", options.backend);
  if (!ops.ok()) return ops.status();
  plan::ExpandParams params;
  Status status = check_expansion(in, out, params);
  if (!status.ok()) return status;
  if (options.zero_padding && !out.row_of_slot.present()) {
    return invalid_expansion(
        "expand_rows",
        "zero_padding is set without output row_of_slot, expected that table, which names the rows to clear");
  }
  params.zero_padding = options.zero_padding;
  return (*ops)->expand_rows({"expand_rows", options.device, stream}, params);
}

Status reduce_rows(const ReduceInput& in, const ExpansionOptions& options, const ReduceOutput& out, Stream stream) {
  const Result<const LocalOps*> ops = find_local_ops("reduce_rows", options.backend);
  if (!ops.ok()) return ops.status();
  plan::ReduceParams params;
  Status status = check_reduction(in, out, params);
  return status.ok() ? (*ops)->reduce_rows({"reduce_rows", options.device, stream}, params) : status;
}

}  // namespace ferry
