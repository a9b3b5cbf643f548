#include <algorithm>
#include <new>
#include <optional>
#include <string_view>

#include "cuda/call/dispatch_parts.hpp"
#include "cuda/call/routing.hpp"
#include "cuda/call/tuning.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/intranode/dispatch_params.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/numeric/quantize.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

constexpr std::string_view kName = "dispatch";

plan::TokenRecord token_record(const DispatchCall& call) {
  const bool by_token = call.routing->layout == Layout::kTokens;
  const bool weights = call.out_topk_weights.present();
  plan::TokenRecord::Parts parts;
  if (call.scales.present()) {
    parts.scale_bytes = call.scales.extent(1) * static_cast<std::int64_t>(size_bytes(call.scales.dtype));
  }
  parts.num_topk = call.routing->num_topk;
  parts.ids = by_token && call.out_topk_idx.present();
  parts.weights = weights;
  parts.rows = !by_token;
  return plan::TokenRecord::of(parts);
}

void set_sending(DispatchParams& params, const DispatchCall& call, const CudaRouting& routing) {
  params.summary = routing.tables.summary;
  params.destinations = routing.tables.destinations;
  params.block_ranks = routing.tables.block_ranks;
  params.rank_base = routing.tables.rank_base;
  params.sent_tokens = routing.tables.sent_tokens;
  params.homes = routing.tables.homes;
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
  params.out = dispatch_outputs(call);
  params.source_base = routing.tables.source_base;
  params.one_row_per_token = routing.layout == Layout::kTokens;
}

void set_plan(DispatchParams& params, const DispatchPlan& plan) {
  params.bulk = plan.bulk;
  params.num_send_blocks = plan.num_send_blocks;
  params.num_own_blocks = plan.num_own_blocks;
  params.entry.num_blocks = plan.num_send_blocks;
  params.num_receive_blocks = plan.num_receive_blocks;
  params.few_run_warps = plan.few_run_warps;
  // Progress is counted at the borders of route's blocks, or of as many rows.
  const auto blocks_of = [&plan](int block, std::int64_t num_blocks) {
    const std::int64_t wanted = std::max(1, plan.chunk_tokens / block);
    return static_cast<int>(std::max(wanted, (2 * num_blocks + kMaxChunks - 1) / kMaxChunks));
  };
  const int blocks = blocks_of(params.tokens_per_block, params.num_blocks);
  params.chunks = {params.num_blocks, std::min(blocks, params.num_blocks)};
  params.run_chunk_blocks = blocks_of(kBorderRows, (params.num_tokens + kBorderRows - 1) / kBorderRows);
}

bool takes_several(const DispatchParams& params) {
  constexpr int kMostTopk = 16;  // of 32 lanes
  return params.scales.num_scales > 0 && params.scales.element_bytes == 4 && params.num_topk <= kMostTopk;
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

/// Whether peers can write scales, ids and weights straight into the outputs; if so, `entry` says where those are.
/// Scales whose elements are not contiguous would go over the links one by one, so they travel in records.
bool direct_tables(const DeviceArena& arena, const DispatchCall& call, EntryMessage& entry) {
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

Status refuse(Context& context, const DispatchCall& call, const Status& status) {
  return context.refuse(call.record, call.stream, status, [&context, &call](const Launch& launch) {
    DispatchParams params;
    params.ranks = context.parts().ranks;
    params.summary = summary_of(call.routing);
    params.bulk = context.parts().has_bulk;
    params.entry.record_number = launch.record_number;
    return launch_dispatch(params, launch.stream);
  });
}

Status run(Context& context, const DispatchCall& asked) {
  if (Status status = status_of(asked.record); !status.ok()) return refuse(context, asked, status);
  if (Status status = check_not_latency(*asked.routing, kName); !status.ok()) {
    return refuse(context, asked, status);
  }
  const Result<bool> checked = context.check_stream(kName, asked.stream);
  if (!checked.ok()) return refuse(context, asked, checked.status());
  const bool captured = *checked;
  const Parts& parts = context.parts();
  if (Status status = check_dispatch_memory(asked, *parts.arena); !status.ok()) return refuse(context, asked, status);
  const Result<std::optional<QuantizedDispatch>> steps = split_quantizing(context, asked, captured);
  if (!steps.ok()) return refuse(context, asked, steps.status());
  const DispatchCall& call = steps->has_value() ? (*steps)->send : asked;

  const auto& routing = static_cast<const CudaRouting&>(*call.routing);
  const DeviceArena& arena = *parts.arena;
  // The ranks are most of it: written once.
  DispatchParams params{
      .ranks = parts.ranks, .entry = {}, .scales = {}, .record = token_record(call), .out = {}, .chunks = {}};
  set_sending(params, call, routing);
  set_receiving(params, call, routing);
  const bool staged = !is_symmetric(arena, call.out_x);
  const bool direct = direct_tables(arena, call, params.entry);
  params.unpacks = !direct && params.record.num_words > 0 && has_tables(call);
  if (!staged && call.out_x.num_rows > 0) params.entry.rows_offset = call.out_x.data - arena.base();
  params.entry.rows_stride = call.out_x.stride_bytes;
  if (staged) {
    // One staged row per token, however many rows it takes in the output.
    Result<std::byte*> rows =
        context.staging().rows(StagedBy::kDispatch, to_size(routing.num_recv_rows * params.row_bytes), captured);
    if (!rows.ok()) return refuse(context, call, rows.status());
    params.staged_rows = *rows;
    params.entry.rows_offset = *rows - arena.base();
    params.entry.rows_stride = params.row_bytes;
    params.entry.flags |= kRowsStaged;
  }
  const bool takes_records = params.unpacks || (staged && params.record.has_rows);
  if (takes_records && routing.num_recv_rows > 0) {
    Result<std::byte*> records = context.staging().records(
        StagedBy::kDispatch, to_size(routing.num_recv_rows * params.record.size_bytes()), captured);
    if (!records.ok()) return refuse(context, call, records.status());
    params.records = *records;
    params.entry.tables_offset = *records - arena.base();
  }
  const DeviceLimits limits{parts.num_sms, parts.has_bulk, parts.ranks.num_ranks};
  const TunedCall tuned_call{Operation::kDispatch, routing.layout, routing.num_tokens, params.row_bytes, staged};
  const KernelOptions kernel = tuned(call.kernel, parts.tuning, tuned_call);
  set_plan(params, plan_dispatch(kernel, limits,
                                 {.row_bytes = params.row_bytes,
                                  .staged = staged,
                                  .unpacks = params.unpacks,
                                  .takes_several = takes_several(params)}));
  // Not in a graph: its nodes may be copied or updated by programs and drivers that know no such edge.
  params.overlaps = params.bulk && !captured;

  Result<Launch> launch = context.begin(call.record, static_cast<cudaStream_t>(call.stream.handle), captured);
  if (!launch.ok()) return refuse(context, call, launch.status());
  params.entry.agreement = launch->agreement;
  params.entry.record_number = launch->record_number;
  cudaError_t error = cudaSuccess;
  if (steps->has_value()) {
    error = launch_quantize((*steps)->quantize, most_blocks(call.kernel.num_sms, limits), launch->stream);
  }
  if (error == cudaSuccess) error = launch_dispatch(params, launch->stream);
  if (error == cudaSuccess && needs_padding(call, routing.exact_rows)) {
    PaddingParams padding = padding_params(parts.ranks, call);
    padding.summary = routing.tables.summary;
    padding.source = routing.source_rows();
    padding.max_blocks = most_blocks(call.kernel.num_sms, limits);
    error = launch_padding(padding, launch->stream);
  }
  return context.end(*launch, error, kName);
}

}  // namespace

Status intranode::dispatch(Context& context, const DispatchCall& call) try {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return context.fail(guard.status());
  return run(context, call);
} catch (const std::bad_alloc&) {
  return context.out_of_memory(Operation::kDispatch);
}

}  // namespace ferry::cuda
