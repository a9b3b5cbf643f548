#include <algorithm>
#include <new>
#include <string_view>

#include "cuda/call/routing.hpp"
#include "cuda/call/tuning.hpp"
#include "cuda/copy/row_copy.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/intranode/combine_params.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

constexpr std::string_view kName = "combine";

CombineParams make_params(const RankParams& ranks, const CombineCall& call, const CudaRouting& routing) {
  CombineParams params{.ranks = ranks, .entry = {}, .bias = {}};  // the ranks are most of it: written once
  params.summary = routing.tables.summary;
  params.destinations = routing.tables.destinations;
  params.block_ranks = routing.tables.block_ranks;
  params.rank_base = routing.tables.rank_base;
  params.num_blocks = routing.num_blocks;
  params.num_tokens = routing.num_tokens;
  params.num_topk = routing.num_topk;
  params.one_row_per_token = routing.layout == Layout::kTokens;
  params.float32 = call.x.dtype == DType::kFloat32;
  params.weighted = call.weighted;
  params.topk_weights = static_cast<const float*>(call.topk_weights.data);
  for (std::size_t i = 0; i < call.bias.size(); ++i) {
    if (call.bias[i].present()) params.bias[i] = {call.bias[i].data, call.bias[i].stride_bytes};
  }
  params.out_x = call.out_x.data;
  params.out_stride = call.out_x.stride_bytes;
  params.row_bytes = call.x.row_bytes;
  params.out_weights = static_cast<float*>(call.out_weights.data);
  params.x = call.x.data;
  params.x_stride = call.x.stride_bytes;
  params.source = routing.source_rows();
  params.source_base = routing.tables.source_base;
  return params;
}

Status refuse(Context& context, const CombineCall& call, const Status& status) {
  return context.refuse(call.record, call.stream, status, [&context, &call](const Launch& launch) {
    CombineParams params;
    params.ranks = context.parts().ranks;
    params.summary = summary_of(call.routing);
    params.bulk = context.parts().has_bulk;
    params.entry.record_number = launch.record_number;
    return launch_combine(params, launch.stream);
  });
}

Status run(Context& context, const CombineCall& call) {
  if (Status status = status_of(call.record); !status.ok()) return refuse(context, call, status);
  if (Status status = check_not_latency(*call.routing, kName); !status.ok()) {
    return refuse(context, call, status);
  }
  const Result<bool> checked = context.check_stream(kName, call.stream);
  if (!checked.ok()) return refuse(context, call, checked.status());
  const bool captured = *checked;
  const Parts& parts = context.parts();
  if (Status status = check_combine_memory(call, *parts.arena); !status.ok()) return refuse(context, call, status);

  const auto& routing = static_cast<const CudaRouting&>(*call.routing);
  CombineParams params = make_params(parts.ranks, call, routing);
  const std::byte* base = parts.arena->base();
  const std::int64_t num_rows = call.x.num_rows;
  const auto extent = to_size((num_rows - 1) * call.x.stride_bytes + call.x.row_bytes);
  const bool symmetric = num_rows == 0 || parts.arena->contains(call.x.data, extent);
  params.entry.rows_offset = symmetric && num_rows > 0 ? call.x.data - base : 0;
  params.entry.rows_stride = call.x.stride_bytes;
  if (!symmetric) {
    Result<std::byte*> rows =
        context.staging().rows(StagedBy::kCombine, to_size(num_rows * params.row_bytes), captured);
    if (!rows.ok()) return refuse(context, call, rows.status());
    params.staging = *rows;
    params.entry.rows_offset = *rows - base;
    params.entry.rows_stride = params.row_bytes;
  }
  // Returned weights are small: where peers cannot reach them, a copy ahead of the call costs little.
  const std::size_t weights_bytes = to_size(call.weights.num_elements()) * sizeof(float);
  const auto* weights = static_cast<const std::byte*>(call.weights.data);
  std::byte* staged_weights = nullptr;
  if (weights_bytes > 0 && !parts.arena->contains(weights, weights_bytes)) {
    Result<std::byte*> room = context.staging().records(StagedBy::kCombine, weights_bytes, captured);
    if (!room.ok()) return refuse(context, call, room.status());
    staged_weights = *room;
  }
  if (weights_bytes > 0) params.entry.tables_offset = (staged_weights != nullptr ? staged_weights : weights) - base;
  const TunedCall tuned_call{Operation::kCombine, routing.layout, routing.num_tokens, params.row_bytes, !symmetric};
  const KernelOptions kernel = tuned(call.kernel, parts.tuning, tuned_call);
  const CombinePlan plan = plan_combine(kernel, {parts.num_sms, parts.has_bulk, parts.ranks.num_ranks},
                                        {.row_bytes = params.row_bytes, .staged = !symmetric});
  params.bulk = plan.bulk;
  // Not in a graph: its nodes may be copied or updated by programs and drivers that know no such edge.
  params.overlaps = plan.bulk && !captured;
  params.num_sum_blocks = plan.num_sum_blocks;
  params.num_stage_blocks = plan.num_stage_blocks;
  params.entry.num_blocks = plan.num_sum_blocks + plan.num_stage_blocks;
  if (!symmetric) {
    params.entry.flags = kRowsStaged | static_cast<std::int64_t>(plan.num_stage_blocks) << kStagersShift;
    params.rounds_between_reports = std::max(1, plan.chunk_rows / plan.num_stage_blocks);
  }

  Result<Launch> launch = context.begin(call.record, static_cast<cudaStream_t>(call.stream.handle), captured);
  if (!launch.ok()) return refuse(context, call, launch.status());
  params.entry.agreement = launch->agreement;
  params.entry.record_number = launch->record_number;
  cudaError_t error = cudaSuccess;
  if (staged_weights != nullptr) {
    error = launch_copy(staged_weights, weights, weights_bytes, plan.num_sum_blocks, launch->stream);
  }
  if (error == cudaSuccess) error = launch_combine(params, launch->stream);
  return context.end(*launch, error, kName);
}

}  // namespace

Status intranode::combine(Context& context, const CombineCall& call) try {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return context.fail(guard.status());
  return run(context, call);
} catch (const std::bad_alloc&) {
  return context.out_of_memory(Operation::kCombine);
}

}  // namespace ferry::cuda
