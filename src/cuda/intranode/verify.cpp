#include "cuda/intranode/verify.hpp"

#include <algorithm>

#include "cuda/call/tuning.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

std::int64_t num_blocks_for(const Parts& parts, std::int64_t num_items, int num_sms) {
  const DeviceLimits limits{parts.num_sms, parts.has_bulk, parts.ranks.num_ranks, parts.num_waiting_sms};
  const std::int64_t wanted = (num_items + kVerifyWarps - 1) / kVerifyWarps;
  return std::clamp<std::int64_t>(wanted, 1, std::min(most_waiting_blocks(num_sms, limits), kMaxCallBlocks));
}

/// Entry of the exchange that checks the rows of a call.
EntryMessage entry_of(const Parts& parts, const EntryMessage& call, const void* checksums, std::int64_t num_blocks) {
  EntryMessage entry;
  entry.agreement = call.agreement;
  entry.record_number = call.record_number;
  entry.tables_offset = static_cast<const std::byte*>(checksums) - parts.arena->base();
  entry.num_blocks = num_blocks;
  return entry;
}

Status take(Context& context, StagedBy by, std::size_t bytes, bool captured, std::byte*& memory) {
  const Result<std::byte*> taken = context.staging().checksums(by, bytes, captured);
  if (taken.ok()) memory = *taken;
  return taken.status();
}

std::size_t num_entries_of(const DispatchParams& call) { return to_size(call.num_tokens) * to_size(call.num_topk); }

}  // namespace

Status take_checksums(Context& context, const DispatchParams& call, bool captured, std::byte*& memory) {
  return take(context, StagedBy::kDispatch, VerifyTables::of_dispatch(nullptr, num_entries_of(call)).size_bytes,
              captured, memory);
}

Status take_checksums(Context& context, std::int64_t num_rows, bool captured, std::byte*& memory) {
  return take(context, StagedBy::kCombine, VerifyTables::of_combine(nullptr, to_size(num_rows)).size_bytes, captured,
              memory);
}

DispatchVerifyParams verify_params(const Parts& parts, const DispatchParams& call, const CudaRouting& routing,
                                   std::byte* memory, int num_sms) {
  DispatchVerifyParams params{.call = call, .entry = {}, .tables = {}};
  params.tables = VerifyTables::of_dispatch(memory, num_entries_of(call));
  params.report = parts.pinned->on_device(parts.corrupt);
  params.source = routing.source_rows();
  params.num_rows = routing.num_recv_rows;
  const std::int64_t num_blocks = num_blocks_for(parts, std::max(params.num_rows, call.num_tokens), num_sms);
  params.entry = entry_of(parts, call.entry, params.tables.entries, num_blocks);
  return params;
}

CombineVerifyParams verify_params(const Parts& parts, CombineParams& call, const CombineCall& asked,
                                  std::byte* memory) {
  CombineVerifyParams params{.call = call, .entry = {}, .tables = {}};
  params.tables = VerifyTables::of_combine(memory, to_size(asked.x.num_rows));
  params.report = parts.pinned->on_device(parts.corrupt);
  params.sealed_x = asked.x.data;
  params.sealed_stride = asked.x.stride_bytes;
  params.weights = static_cast<const float*>(asked.weights.data);
  params.num_rows = asked.x.num_rows;
  const std::int64_t num_blocks =
      num_blocks_for(parts, std::max(params.num_rows, call.num_tokens), asked.kernel.num_sms);
  params.entry = entry_of(parts, call.entry, params.tables.checksums, num_blocks);
  params.entry.rows_offset = call.entry.rows_offset;
  params.entry.rows_stride = call.entry.rows_stride;
  params.entry.weights_offset = call.entry.tables_offset;
  call.summary = &params.tables.state->gate;
  return params;
}

}  // namespace ferry::cuda
