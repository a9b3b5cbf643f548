#include <algorithm>
#include <optional>

#include "cuda/call/dispatch_parts.hpp"
#include "cuda/call/group_call.hpp"
#include "cuda/call/routing.hpp"
#include "cuda/call/tuning.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/intranode/dispatch_params.hpp"
#include "cuda/intranode/verify.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/numeric/quantize.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

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

/// Whether peers can write scales, ids and weights straight into the outputs; if so, `entry` gets their addresses.
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

class Dispatch {
 public:
  Dispatch(Context& context, const DispatchCall& call)
      : context_(context),
        parts_(context.parts()),
        asked_(call),
        params_{.ranks = parts_.ranks, .entry = {}, .scales = {}, .record = {}, .out = {}, .chunks = {}} {}

  Status check() const { return check_not_latency(*asked_.routing, "dispatch"); }
  Status prepare(const CallStream& stream);
  cudaError_t launch(const Launch& launch);
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const;

 private:
  /// The call that sends: of quantised rows, if the call quantises.
  const DispatchCall& call() const { return steps_ ? steps_->send : asked_; }
  const CudaRouting& routing() const { return static_cast<const CudaRouting&>(*asked_.routing); }
  DeviceLimits limits() const {
    return {parts_.num_sms, parts_.has_bulk, parts_.ranks.num_ranks, parts_.num_waiting_sms};
  }
  Status take_room(bool staged, bool captured);

  Context& context_;
  const Parts& parts_;
  const DispatchCall& asked_;
  std::optional<QuantizedDispatch> steps_;
  DispatchParams params_;           // the ranks are most of it: written once
  std::byte* checksums_ = nullptr;  // memory of the checks, if the group verifies rows
};

Status Dispatch::prepare(const CallStream& stream) {
  const DeviceArena& arena = *parts_.arena;
  if (Status status = check_dispatch_memory(asked_, arena); !status.ok()) return status;
  if (Status status = split_quantizing(context_, asked_, stream.captured, steps_); !status.ok()) return status;
  params_.record = token_record(call());
  set_sending(params_, call(), routing());
  set_receiving(params_, call(), routing());
  const bool staged = !is_symmetric(arena, call().out_x);
  const bool direct = direct_tables(arena, call(), params_.entry);
  params_.unpacks = !direct && params_.record.num_words > 0 && has_tables(call());
  if (Status status = take_room(staged, stream.captured); !status.ok()) return status;
  const TunedCall tuned_call{Operation::kDispatch, routing().layout, routing().num_tokens, params_.row_bytes, staged};
  const KernelOptions kernel = tuned(call().kernel, parts_.tuning, tuned_call);
  set_plan(params_, plan_dispatch(kernel, limits(),
                                  {.row_bytes = params_.row_bytes,
                                   .staged = staged,
                                   .unpacks = params_.unpacks,
                                   .takes_several = takes_several(params_)}));
  // Not in a graph: programs and drivers without support for such an edge may copy or update its nodes.
  params_.overlaps = params_.bulk && !stream.captured;
  return parts_.verify ? take_checksums(context_, params_, stream.captured, checksums_) : Status();
}

Status Dispatch::take_room(bool staged, bool captured) {
  const DeviceArena& arena = *parts_.arena;
  const Rows& out_x = call().out_x;
  const std::int64_t num_rows = routing().num_recv_rows;
  if (!staged && out_x.num_rows > 0) params_.entry.rows_offset = out_x.data - arena.base();
  params_.entry.rows_stride = out_x.stride_bytes;
  if (staged) {
    // One staged row per token, however many rows it takes in the output.
    const Result<std::byte*> rows =
        context_.staging().rows(StagedBy::kDispatch, to_size(num_rows * params_.row_bytes), captured);
    if (!rows.ok()) return rows.status();
    params_.staged_rows = *rows;
    params_.entry.rows_offset = *rows - arena.base();
    params_.entry.rows_stride = params_.row_bytes;
    params_.entry.flags |= kRowsStaged;
  }
  const bool takes_records = params_.unpacks || (staged && params_.record.has_rows);
  if (!takes_records || num_rows == 0) return {};
  const Result<std::byte*> records =
      context_.staging().records(StagedBy::kDispatch, to_size(num_rows * params_.record.size_bytes()), captured);
  if (!records.ok()) return records.status();
  params_.records = *records;
  params_.entry.tables_offset = *records - arena.base();
  return {};
}

cudaError_t Dispatch::launch(const Launch& launch) {
  params_.entry.agreement = launch.agreement;
  params_.entry.record_number = launch.record_number;
  const int most = most_blocks(asked_.kernel.num_sms, limits());
  cudaError_t error = cudaSuccess;
  if (steps_) error = launch_quantize(steps_->quantize, most, launch.stream);
  std::optional<DispatchVerifyParams> verify;
  if (checksums_ != nullptr) verify = verify_params(parts_, params_, routing(), checksums_, asked_.kernel.num_sms);
  if (error == cudaSuccess && verify) error = launch_seal_dispatch(*verify, launch.stream);
  if (error == cudaSuccess) error = launch_dispatch(params_, launch.stream);
  if (error == cudaSuccess && verify) error = launch_verify_dispatch(*verify, launch.stream);
  if (error != cudaSuccess || !needs_padding(call(), routing().exact_rows)) return error;
  PaddingParams padding = padding_params(parts_.ranks, call());
  padding.summary = routing().tables.summary;
  padding.source = routing().source_rows();
  padding.max_blocks = most;
  return launch_padding(padding, launch.stream);
}

cudaError_t Dispatch::launch_refusal(const Launch& launch, const CallRecord& /*refused*/) const {
  DispatchParams params;
  params.ranks = parts_.ranks;
  params.summary = summary_of(asked_.routing);
  params.bulk = parts_.has_bulk;
  params.entry.record_number = launch.record_number;
  return launch_dispatch(params, launch.stream);
}

}  // namespace

Status intranode::dispatch(Context& context, const DispatchCall& call) {
  return on_gpu(context, Operation::kDispatch, [&context, &call] {
    Dispatch dispatch(context, call);
    return make_call({context, call.record, call.stream}, dispatch);
  });
}

}  // namespace ferry::cuda
