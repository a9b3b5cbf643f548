#include <algorithm>
#include <new>

#include "cuda/backend.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/intranode/dispatch_params.hpp"
#include "cuda/intranode/routing.hpp"
#include "cuda/intranode/tuning.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

ScaleTable scale_table(const ConstTensorView& view) {
  if (!view.present()) return {};
  // One type serves both directions; inputs are only read.
  return {static_cast<std::byte*>(const_cast<void*>(view.data)), static_cast<int>(view.extent(1)),
          static_cast<int>(size_bytes(view.dtype)), view.stride(0), view.stride(1)};
}

RecordLayout record_layout(const DispatchCall& call) {
  const bool by_token = call.routing->layout == Layout::kTokens;
  const bool weights = call.out_topk_weights.present();
  RecordLayout::Parts parts;
  if (call.scales.present()) {
    parts.scale_bytes = call.scales.extent(1) * static_cast<std::int64_t>(size_bytes(call.scales.dtype));
  }
  parts.num_topk = call.routing->num_topk;
  parts.ids = by_token && call.out_topk_idx.present();
  parts.weights = weights;
  parts.rows = !by_token;
  return RecordLayout::of(parts);
}

void set_sending(DispatchParams& params, const DispatchCall& call, const CudaRouting& routing) {
  params.summary = routing.tables.summary;
  params.places = routing.tables.places;
  params.block_ranks = routing.tables.block_ranks;
  params.weights = static_cast<const float*>(call.topk_weights.data);
  params.scales = scale_table(call.scales);
  params.x = call.x.data;
  params.x_stride = call.x.stride_bytes;
  params.row_bytes = call.x.row_bytes;
  params.num_tokens = routing.num_tokens;
  params.num_topk = routing.num_topk;
  params.tokens_per_block = routing.tokens_per_block;
  params.num_blocks = routing.num_blocks;
}

void set_receiving(DispatchParams& params, const DispatchCall& call, const CudaRouting& routing) {
  params.out_x = call.out_x.data;
  params.out_stride = call.out_x.stride_bytes;
  params.source_base = routing.tables.source_base;
  params.one_row_per_token = routing.layout == Layout::kTokens;
  params.out_scales = scale_table(call.out_scales);
  params.out_ids = call.out_topk_idx.data;
  params.wide_ids = call.out_topk_idx.dtype == DType::kInt64;
  params.out_weights = static_cast<float*>(call.out_topk_weights.data);
}

void set_plan(DispatchParams& params, const DispatchPlan& plan) {
  params.bulk = plan.bulk;
  params.num_send_blocks = plan.num_send_blocks;
  params.num_receive_blocks = plan.num_receive_blocks;
  // Progress is counted at the borders of route's blocks.
  const std::int64_t per_block = params.tokens_per_block;
  std::int64_t blocks = std::max<std::int64_t>(1, plan.chunk_tokens / per_block);
  blocks = std::max<std::int64_t>(blocks, (2 * params.num_blocks + kMaxChunks - 1) / kMaxChunks);
  params.chunks = {params.num_blocks, static_cast<int>(std::min<std::int64_t>(blocks, params.num_blocks))};
}

PaddingParams padding_params(const DispatchParams& dispatch, const DispatchCall& call, const CudaRouting& routing) {
  PaddingParams params;
  params.crew = dispatch.crew;
  params.summary = routing.tables.summary;
  params.source = routing.source_rows();
  params.num_rows = routing.num_recv_rows;
  params.out_source = static_cast<std::int32_t*>(call.out_source.data);
  params.out_ids = dispatch.out_ids;
  params.wide_ids = dispatch.wide_ids;
  params.num_topk = routing.num_topk;
  params.zero = call.zero_padding;
  params.out_x = call.out_x.data;
  params.out_stride = call.out_x.stride_bytes;
  params.row_bytes = call.out_x.row_bytes;
  params.out_scales = dispatch.out_scales;
  params.out_weights = dispatch.out_weights;
  params.weights_per_row = routing.layout == Layout::kTokens ? routing.num_topk : 1;
  return params;
}

bool has_tables(const DispatchCall& call) {
  return call.out_scales.present() || call.out_topk_idx.present() || call.out_topk_weights.present();
}

bool is_symmetric(const DeviceArena& arena, const Rows& rows) {
  if (rows.num_rows == 0) return true;
  return arena.contains(rows.data, to_size((rows.num_rows - 1) * rows.stride_bytes + rows.row_bytes));
}

/// A contiguous table in the arena, or none at all.
bool is_symmetric(const DeviceArena& arena, const TensorView& table) {
  return table.num_elements() == 0 ||
         arena.contains(table.data, to_size(table.num_elements()) * size_bytes(table.dtype));
}

/// Can peers write scales, ids and weights where they end up? Then `entry` says where. Scales whose elements lie apart
/// would go over the links one by one, so those travel in records.
bool direct_tables(const DeviceArena& arena, const DispatchCall& call, EntryParams& entry) {
  const TensorView& scales = call.out_scales;
  if (scales.num_elements() > 0) {
    const std::int64_t last = (scales.extent(0) - 1) * scales.stride(0) + (scales.extent(1) - 1) * scales.stride(1);
    const bool contiguous_rows = scales.stride(1) == 1 || scales.extent(1) == 1;
    if (!contiguous_rows || !arena.contains(scales.data, to_size(last + 1) * size_bytes(scales.dtype))) return false;
  }
  if (!is_symmetric(arena, call.out_topk_idx) || !is_symmetric(arena, call.out_topk_weights)) return false;
  const auto offset_of = [&arena](const TensorView& table) {
    return table.num_elements() == 0 ? 0 : static_cast<const std::byte*>(table.data) - arena.base();
  };
  entry.flags |= kTablesDirect;
  if (call.out_topk_idx.dtype == DType::kInt64) entry.flags |= kWideIds;
  entry.scales_offset = offset_of(scales);
  entry.scales_stride = scales.present() ? scales.stride(0) * static_cast<std::int64_t>(size_bytes(scales.dtype)) : 0;
  entry.ids_offset = offset_of(call.out_topk_idx);
  entry.weights_offset = offset_of(call.out_topk_weights);
  return true;
}

/// Can there be rows without a token that somebody wants written? (An exact kTokens output has none.)
bool needs_padding(const DispatchCall& call, bool exact_rows) {
  if (call.out_source.present()) return true;
  const bool has_padding = !exact_rows || call.routing->layout != Layout::kTokens;
  return has_padding && (call.zero_padding || call.out_topk_idx.present());
}

}  // namespace

Status CudaBackend::dispatch(const DispatchCall& call) try {
  const DeviceGuard guard(parts_.device);
  if (!guard.status().ok()) return guard.status();
  return run_dispatch(call);
} catch (const std::bad_alloc&) {
  return out_of_memory(Operation::kDispatch);
}

Status CudaBackend::run_dispatch(const DispatchCall& call) {
  if (call.record.code != ErrorCode::kOk) {
    return refuse_dispatch(
        call, Status(call.record.code, std::string(call.record.message.data(), to_size(call.record.message_bytes))));
  }
  const Result<bool> checked = check_stream(Operation::kDispatch, call.stream);
  if (!checked.ok()) return refuse_dispatch(call, checked.status());
  const bool captured = *checked;
  if (Status status = check_dispatch_memory(call, parts_.device); !status.ok()) return refuse_dispatch(call, status);

  const auto& routing = static_cast<const CudaRouting&>(*call.routing);
  DispatchParams params;
  params.crew = parts_.crew_params;
  set_sending(params, call, routing);
  set_receiving(params, call, routing);
  params.record = record_layout(call);
  const bool staged = !is_symmetric(*parts_.arena, call.out_x);
  const bool direct = direct_tables(*parts_.arena, call, params.entry);
  params.unpacks = !direct && params.record.num_words > 0 && has_tables(call);
  const std::byte* base = parts_.arena->base();
  if (!staged && call.out_x.num_rows > 0) params.entry.rows_offset = call.out_x.data - base;
  params.entry.rows_stride = call.out_x.stride_bytes;
  if (staged) {
    // One staged row per token, however many rows it takes in the output.
    Result<std::byte*> rows = staging_.rows(to_size(routing.num_recv_rows * params.row_bytes), captured);
    if (!rows.ok()) return refuse_dispatch(call, rows.status());
    params.staged_rows = *rows;
    params.entry.rows_offset = *rows - base;
    params.entry.rows_stride = params.row_bytes;
    params.entry.flags |= kRowsStaged;
  }
  const bool takes_records = params.unpacks || (staged && params.record.has_rows);
  if (takes_records && routing.num_recv_rows > 0) {
    Result<std::byte*> records =
        staging_.records(to_size(routing.num_recv_rows * params.record.size_bytes()), captured);
    if (!records.ok()) return refuse_dispatch(call, records.status());
    params.records = *records;
    params.entry.records_offset = *records - base;
  }
  set_plan(params, plan_dispatch(call.kernel, {parts_.num_sms, parts_.has_bulk, parts_.crew_params.num_ranks},
                                 {.row_bytes = params.row_bytes, .staged = staged, .unpacks = params.unpacks}));

  Result<Launch> launch = begin(call.record, static_cast<cudaStream_t>(call.stream.handle), captured);
  if (!launch.ok()) return launch.status();
  params.entry.agreement = launch->agreement;
  params.entry.ticket = launch->ticket;
  cudaError_t error = launch_dispatch(params, launch->stream);
  if (error == cudaSuccess && needs_padding(call, routing.exact_rows)) {
    error = launch_padding(padding_params(params, call, routing), launch->stream);
  }
  return end(*launch, error, "dispatch");
}

}  // namespace ferry::cuda
