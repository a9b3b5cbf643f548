#include <algorithm>

#include "cuda/call/group_call.hpp"
#include "cuda/call/routing.hpp"
#include "cuda/call/tuning.hpp"
#include "cuda/copy/row_copy.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/intranode/combine_params.hpp"
#include "cuda/intranode/verify.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/numeric/wire_row.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

void set_call(CombineParams& params, const CombineCall& call, const CudaRouting& routing) {
  params.summary = routing.tables.summary;
  params.destinations = routing.tables.destinations;
  params.rank_base = routing.tables.rank_base;
  params.num_tokens = routing.num_tokens;
  params.num_topk = routing.num_topk;
  params.one_row_per_token = routing.layout == Layout::kTokens;
  params.float32 = call.x.dtype == DType::kFloat32;
  params.weighted = call.weighted;
  params.fp8 = call.wire_format == WireFormat::kFp8;
  params.topk_weights = static_cast<const float*>(call.topk_weights.data);
  for (std::size_t i = 0; i < call.bias.size(); ++i) {
    BiasRows& bias = params.fp8 ? params.wire_bias[i] : params.bias[i];
    if (call.bias[i].present()) bias = {call.bias[i].data, call.bias[i].stride_bytes};
  }
  params.out_x = call.out_x.data;
  params.out_stride = call.out_x.stride_bytes;
  params.row_bytes = call.x.row_bytes;
  params.out_weights = static_cast<float*>(call.out_weights.data);
  params.x = call.x.data;
  params.x_stride = call.x.stride_bytes;
  params.source = routing.source_rows();
  params.source_base = routing.tables.source_base;
}

class Combine {
 public:
  Combine(Context& context, const CombineCall& call)
      : context_(context),
        parts_(context.parts()),
        call_(call),
        params_{.ranks = parts_.ranks, .entry = {}, .bias = {}, .wire_bias = {}} {}

  Status check() const { return check_not_latency(*call_.routing, "combine"); }
  Status prepare(const CallStream& stream);
  cudaError_t launch(const Launch& launch);
  cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused) const;

 private:
  Status take_room(bool staged, bool captured);
  void stage_before();
  cudaError_t launch_checks(cudaStream_t stream);

  Context& context_;
  const Parts& parts_;
  const CombineCall& call_;
  CombineParams params_;                 // the ranks are most of it: written once
  std::size_t weights_bytes_ = 0;        // of weights that return
  std::byte* staged_weights_ = nullptr;  // null: peers reach the caller's
  std::byte* checksums_ = nullptr;       // memory of the checks, if the group verifies rows
  std::byte* copied_x_ = nullptr;        // null: peers reach the caller's rows, or the combine stages them
};

Status Combine::prepare(const CallStream& stream) {
  if (Status status = check_combine_memory(call_, *parts_.arena); !status.ok()) return status;
  const auto& routing = static_cast<const CudaRouting&>(*call_.routing);
  set_call(params_, call_, routing);
  const ConstRows& x = call_.x;
  const auto extent = to_size((x.num_rows - 1) * x.stride_bytes + x.row_bytes);
  const bool symmetric = x.num_rows == 0 || parts_.arena->contains(x.data, extent);
  bool staged = !symmetric || params_.fp8;
  if (Status status = take_room(staged, stream.captured); !status.ok()) return status;
  if (parts_.verify) {
    if (Status status = take_checksums(context_, x.num_rows, stream.captured, checksums_); !status.ok()) return status;
    if (staged) stage_before();
    staged = false;
  }
  const TunedCall tuned_call{Operation::kCombine, routing.layout, routing.num_tokens, params_.row_bytes, staged};
  // Tuning files have no entries for quantised rows.
  const KernelOptions kernel = params_.fp8 ? call_.kernel : tuned(call_.kernel, parts_.tuning, tuned_call);
  const CombinePlan plan =
      plan_combine(kernel, {parts_.num_sms, parts_.has_bulk, parts_.ranks.num_ranks, parts_.num_waiting_sms},
                   {.row_bytes = params_.row_bytes, .staged = staged, .quantized = params_.fp8});
  params_.bulk = plan.bulk;
  // Not in a graph: programs and drivers without support for such an edge may copy or update its nodes.
  params_.overlaps = plan.bulk && !stream.captured;
  params_.num_sum_blocks = plan.num_sum_blocks;
  params_.num_stage_blocks = plan.num_stage_blocks;
  params_.entry.num_blocks = plan.num_sum_blocks + plan.num_stage_blocks;
  if (staged) {
    params_.entry.flags = kRowsStaged | static_cast<std::int64_t>(plan.num_stage_blocks) << kStagersShift;
    params_.rounds_between_reports = std::max(1, plan.chunk_rows / plan.num_stage_blocks);
  }
  return {};
}

Status Combine::take_room(bool staged, bool captured) {
  const std::byte* const base = parts_.arena->base();
  const std::int64_t num_rows = call_.x.num_rows;
  params_.entry.rows_offset = !staged && num_rows > 0 ? call_.x.data - base : 0;
  params_.entry.rows_stride = call_.x.stride_bytes;
  if (staged) {
    const auto element_bytes = static_cast<std::int64_t>(size_bytes(call_.x.dtype));
    const std::int64_t row_bytes = params_.fp8 ? wire_row_bytes(params_.row_bytes / element_bytes) : params_.row_bytes;
    const Result<std::byte*> rows =
        context_.staging().rows(StagedBy::kCombine, to_size(num_rows * row_bytes), captured);
    if (!rows.ok()) return rows.status();
    params_.staging = *rows;
    params_.entry.rows_offset = *rows - base;
    params_.entry.rows_stride = row_bytes;
  }
  // Returned weights are small: where peers cannot reach them, a copy ahead of the call costs little.
  weights_bytes_ = to_size(call_.weights.num_elements()) * sizeof(float);
  if (weights_bytes_ == 0) return {};
  const auto* const weights = static_cast<const std::byte*>(call_.weights.data);
  if (!parts_.arena->contains(weights, weights_bytes_)) {
    const Result<std::byte*> room = context_.staging().records(StagedBy::kCombine, weights_bytes_, captured);
    if (!room.ok()) return room.status();
    staged_weights_ = *room;
  }
  params_.entry.tables_offset = (staged_weights_ != nullptr ? staged_weights_ : weights) - base;
  return {};
}

/// Has the rows copied ahead of the call: peers check them before they sum them.
void Combine::stage_before() {
  copied_x_ = params_.staging;
  params_.staging = nullptr;
  params_.x = copied_x_;
  params_.x_stride = params_.row_bytes;
}

/// Launches what comes before the combine in a group that verifies rows, and has the combine wait for its outcome.
cudaError_t Combine::launch_checks(cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  const CombineVerifyParams verify = verify_params(parts_, params_, call_, checksums_);
  if (copied_x_ != nullptr) {
    RowCopyParams copy;
    copy.to = copied_x_;
    copy.to_stride = params_.row_bytes;
    copy.from = call_.x.data;
    copy.from_stride = call_.x.stride_bytes;
    copy.row_bytes = params_.row_bytes;
    copy.num_rows = call_.x.num_rows;
    copy.max_blocks = static_cast<int>(verify.entry.num_blocks);
    error = launch_row_copy(copy, stream);
  }
  if (error == cudaSuccess) error = launch_seal_combine(verify, stream);
  return error == cudaSuccess ? launch_verify_combine(verify, stream) : error;
}

cudaError_t Combine::launch(const Launch& launch) {
  params_.entry.agreement = launch.agreement;
  params_.entry.record_number = launch.record_number;
  cudaError_t error = cudaSuccess;
  if (staged_weights_ != nullptr) {
    error = launch_copy(staged_weights_, call_.weights.data, weights_bytes_, params_.num_sum_blocks, launch.stream);
  }
  if (error == cudaSuccess && checksums_ != nullptr) error = launch_checks(launch.stream);
  return error == cudaSuccess ? launch_combine(params_, launch.stream) : error;
}

cudaError_t Combine::launch_refusal(const Launch& launch, const CallRecord& /*refused*/) const {
  if (parts_.verify) {
    // The others refuse the call in the exchange before their combine.
    CombineVerifyParams verify{
        .call = {.ranks = parts_.ranks, .entry = {}, .bias = {}, .wire_bias = {}}, .entry = {}, .tables = {}};
    verify.call.summary = summary_of(call_.routing);
    verify.entry.record_number = launch.record_number;
    verify.entry.num_blocks = 1;
    return launch_verify_combine(verify, launch.stream);
  }
  CombineParams params;
  params.ranks = parts_.ranks;
  params.summary = summary_of(call_.routing);
  params.bulk = parts_.has_bulk;
  params.entry.record_number = launch.record_number;
  return launch_combine(params, launch.stream);
}

}  // namespace

Status intranode::combine(Context& context, const CombineCall& call) {
  return on_gpu(context, Operation::kCombine, [&context, &call] {
    Combine combine(context, call);
    return make_call({context, call.record, call.stream}, combine);
  });
}

}  // namespace ferry::cuda
