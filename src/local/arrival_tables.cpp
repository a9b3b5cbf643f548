#include "ferry/arrival_tables.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>

#include "core/checks.hpp"
#include "local/local_ops.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

Status invalid_tables(std::string message) {
  return Status(ErrorCode::kInvalidArgument, "arrival_tables: " + std::move(message));
}

Status check_options(const ArrivalTablesOptions& options) {
  if (options.num_ranks < 1 || options.num_ranks > kMaxCount / kMaxTopk) {
    return invalid_tables(fmt::format("num_ranks is {}, expected 1 to {}", options.num_ranks, kMaxCount / kMaxTopk));
  }
  if (options.max_tokens < 1 || options.max_tokens > kMaxCount / options.num_ranks) {
    return invalid_tables(fmt::format("max_tokens is {}, expected 1 to {} for {} ranks", options.max_tokens,
                                      kMaxCount / options.num_ranks, options.num_ranks));
  }
  if (options.expert_alignment < 1 || options.expert_alignment > kMaxCount) {
    return invalid_tables(fmt::format("expert_alignment is {}, expected 1 to {}", options.expert_alignment, kMaxCount));
  }
  return {};
}

Status check_arrivals(const Arrivals& in) {
  const ConstTensorView& ids = in.topk_idx;
  if (ids.num_dims != 2 || ids.extent(1) < 1 || ids.extent(1) > kMaxTopk || ids.extent(0) < 0 ||
      ids.extent(0) > kMaxCount / (2 + ids.extent(1))) {
    return invalid_tables(fmt::format("topk_idx is {}, expected [N, K] with K from 1 to {} and fewer than 2^31 numbers",
                                      describe(ids), kMaxTopk));
  }
  Status status =
      check_table("arrival_tables: topk_idx", ids, {ids.extent(0), ids.extent(1)}, {DType::kInt32, DType::kInt64});
  if (status.ok()) status = check_table("arrival_tables: source", in.source, {ids.extent(0), 2}, {DType::kInt32});
  return status;
}

/// Checks an output and the input that it needs, of the same length.
Status check_pair(std::string_view input_name, const ConstTensorView& in, std::string_view output_name,
                  const TensorView& out, int num_dims, DType dtype) {
  if (!out.present()) return {};
  if (in.num_dims != num_dims) {
    return invalid_tables(
        fmt::format("{} is {}, expected {} dimensions for {}", input_name, describe(in), num_dims, output_name));
  }
  const auto check = [&](std::string_view name, const ConstTensorView& view) {
    const std::string what = fmt::format("arrival_tables: {}", name);
    return num_dims == 1 ? check_table(what, view, {in.extent(0)}, {dtype})
                         : check_table(what, view, {in.extent(0), in.extent(1)}, {dtype});
  };
  Status status = check(input_name, in);
  return status.ok() ? check(output_name, out) : status;
}

Status check_outputs(const Arrivals& in, const ArrivalTables& out, int num_ranks) {
  Status status;
  if (out.origin.present()) {
    status = check_table("arrival_tables: output origin", out.origin,
                         {in.topk_idx.extent(0), 2 + in.topk_idx.extent(1)}, {DType::kInt32});
  }
  if (status.ok() && out.rows_through_rank.present()) {
    status =
        check_table("arrival_tables: output rows_through_rank", out.rows_through_rank, {num_ranks}, {DType::kInt32});
  }
  if (status.ok()) {
    status = check_pair("rows_per_expert", in.rows_per_expert, "output expert_ends", out.expert_ends, 1, DType::kInt32);
  }
  if (status.ok()) status = check_pair("sent_idx", in.sent_idx, "output sent_idx", out.sent_idx, 2, DType::kInt64);
  return status;
}

/// Checks the outputs that exist only for expanded rows.
Status check_expansion(const Arrivals& in, const ArrivalTables& out, bool expand) {
  if (!expand) {
    if (!out.rows_of_expert.present() && !out.last_equal.present()) return {};
    return invalid_tables(fmt::format("output {} is present without the option expand, expected it to be absent",
                                      out.last_equal.present() ? "last_equal" : "rows_of_expert"));
  }
  const ConstTensorView& rows = in.rows_per_expert;
  if (rows.num_dims != 1) return invalid_tables(fmt::format("rows_per_expert is {}, expected [L]", describe(rows)));
  Status status = check_table("arrival_tables: rows_per_expert", rows, {rows.extent(0)}, {DType::kInt32});
  if (status.ok()) {
    status = check_pair("rows_per_expert", rows, "output rows_of_expert", out.rows_of_expert, 1, DType::kInt32);
  }
  if (!status.ok() || !out.last_equal.present()) return status;
  return check_table("arrival_tables: output last_equal", out.last_equal,
                     {in.topk_idx.extent(0), in.topk_idx.extent(1)}, {DType::kInt8});
}

/// Ensures that the sums in expert_ends, and slots, fit in 31 bits: everything but the rounding is a row that exists.
Status check_alignment(std::int64_t alignment, std::int64_t num_experts, std::int64_t num_entries) {
  const std::int64_t most = (kMaxCount - num_entries) / std::max<std::int64_t>(num_experts, 1);
  if (alignment <= most) return {};
  return invalid_tables(
      fmt::format("expert_alignment is {}, expected 1 to {} for {} experts", alignment, most, num_experts));
}

}  // namespace

Status arrival_tables(const Arrivals& in, const ArrivalTablesOptions& options, const ArrivalTables& out,
                      Stream stream) {
  const Result<const LocalOps*> ops = find_local_ops("arrival_tables", options.backend);
  if (!ops.ok()) return ops.status();
  Status status = check_options(options);
  if (status.ok()) status = check_arrivals(in);
  if (status.ok()) status = check_outputs(in, out, options.num_ranks);
  if (status.ok()) status = check_expansion(in, out, options.expand);
  const std::int64_t num_experts = out.expert_ends.present() || options.expand ? in.rows_per_expert.extent(0) : 0;
  if (status.ok() && num_experts > 0) {
    status = check_alignment(options.expert_alignment, num_experts, options.expand ? in.topk_idx.num_elements() : 0);
  }
  if (!status.ok()) return status;
  const plan::ArrivalParams params{.source = static_cast<const std::int32_t*>(in.source.data),
                                   .ids = in.topk_idx.data,
                                   .wide_ids = in.topk_idx.dtype == DType::kInt64,
                                   .num_topk = static_cast<int>(in.topk_idx.extent(1)),
                                   .num_ranks = options.num_ranks,
                                   .num_rows = in.topk_idx.extent(0),
                                   .max_tokens = options.max_tokens,
                                   .rows_per_expert = static_cast<const std::int32_t*>(in.rows_per_expert.data),
                                   .num_experts = num_experts,
                                   .expert_alignment = options.expert_alignment,
                                   .expand = options.expand,
                                   .sent_ids = static_cast<const std::int64_t*>(in.sent_idx.data),
                                   .num_sent_ids = out.sent_idx.present() ? in.sent_idx.num_elements() : 0,
                                   .origin = static_cast<std::int32_t*>(out.origin.data),
                                   .rows_through_rank = static_cast<std::int32_t*>(out.rows_through_rank.data),
                                   .expert_ends = static_cast<std::int32_t*>(out.expert_ends.data),
                                   .sent_ids_copy = static_cast<std::int64_t*>(out.sent_idx.data),
                                   .rows_of_expert = static_cast<std::int32_t*>(out.rows_of_expert.data),
                                   .last_equal = static_cast<std::int8_t*>(out.last_equal.data)};
  return (*ops)->write_arrivals({"arrival_tables", options.device, stream}, params);
}

}  // namespace ferry
