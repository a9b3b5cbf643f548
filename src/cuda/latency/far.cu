/// The part of latency mode between nodes (cuda/far/params.hpp): kernels that send to far ranks before a send half, and
/// that take what far ranks have sent before a receive half. Only the latter wait for far ranks, and their blocks for
/// nothing else.

#include <algorithm>

#include "cuda/copy/warp_copy.cuh"
#include "cuda/latency/combine_parts.cuh"
#include "cuda/latency/far_receive.cuh"
#include "cuda/latency/far_send.cuh"
#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kFarThreads = 256;

/// Shared memory of a dispatch's kernel where FarTargets follow.
FERRY_HOST_DEVICE constexpr std::size_t send_shared_bytes(int num_experts) {
  return round_up_part(DispatchSendShared::size_bytes(num_experts));
}

/// Sends a dispatch to far ranks.
template <Codec kCodec, bool kHomes>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    far_rows_kernel(const __grid_constant__ FarDispatchParams params) {
  auto& shared = *reinterpret_cast<DispatchSendShared*>(dynamic_shared());
  auto& targets = *reinterpret_cast<FarTargets*>(dynamic_shared() + send_shared_bytes(params.send.call.num_experts));
  FarDispatchSender<kCodec, kHomes> sender(params, shared, targets);
  sender.send_all();
}

/// Parts of the tokens of one source that blocks import separately.
constexpr int kPartsPerSource = 2;

/// Imports one part of the tokens of a far rank; false when the group broke. All threads of a block.
__device__ bool import_part(const FarReceiveParams& params, const SentCall& sent, int source, int part) {
  const LatencyParams& call = params.call;
  const bool came = threadIdx.x != 0 || await_far(call, params.far, params.kind, sent.number, source);
  if (__syncthreads_and(static_cast<int>(came)) == 0) return false;
  bool same = true;
  if (warp_idx() == 0) {
    if (part == 0) {
      same = import_header(call, params.far, params.kind, sent, source);
    } else {
      const FarHeader& header = header_in(params.far, params.kind, static_cast<int>(sent.set), source);
      const ReceivedHeader received(header.words[lane_idx() < kLatencyHeaderWords ? lane_idx() : 0]);
      same = received.agreement() == call.agreement && call.agreement != 0;
    }
  }
  if (__syncthreads_and(static_cast<int>(same)) == 0) return true;
  FarImporter importer(params, sent, source);
  importer.import_all(part, kPartsPerSource);
  return true;
}

/// Imports a dispatch from far ranks. All blocks share the parts.
__global__ void __launch_bounds__(kFarThreads) far_import_kernel(const __grid_constant__ FarReceiveParams params) {
  if (blockIdx.x == 0 && warp_idx() == 0) publish_grants(params.call, params.far);
  const SentCall sent = far_call(params);
  if (sent.pending == 0) return;
  const FarLayout& layout = params.far.layout;
  bool whole = true;
#pragma unroll 1
  for (auto unit = static_cast<int>(blockIdx.x); whole && unit < layout.num_far() * kPartsPerSource;
       unit += static_cast<int>(gridDim.x)) {
    whole = import_part(params, sent, layout.far_rank(unit / kPartsPerSource), unit % kPartsPerSource);
  }
}

/// Imports the headers of a combine, or of a call that this rank refuses. A warp for each far rank, by turns.
__global__ void __launch_bounds__(kFarThreads) far_headers_kernel(const __grid_constant__ FarReceiveParams params) {
  const LatencyParams& call = params.call;
  if (warp_idx() == 0) publish_grants(call, params.far);
  const SentCall sent = far_call(params);
  if (sent.pending == 0) return;
  constexpr int kWarps = kFarThreads / kWarpLanes;
#pragma unroll 1
  for (int idx = warp_idx(); idx < params.far.layout.num_far(); idx += kWarps) {
    const int source = params.far.layout.far_rank(idx);
    const bool came = lane_idx() != 0 || await_far(call, params.far, params.kind, sent.number, source);
    if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return;
    __syncwarp();
    import_header(call, params.far, params.kind, sent, source);
  }
}

/// State of a block that returns rows, in dynamic shared memory.
struct FarReturnsShared {
  std::uint64_t number;
  int sets[kMaxRanks];
  std::int32_t firsts[kMaxRanks];  ///< place of the first row for each far rank in the memory that rows leave from
};

/// Waits for the turn of a combine, and finds the place of the rows for each far rank. All lanes of one warp.
__device__ void begin_returns(const FarCombineParams& params, FarReturnsShared& shared) {
  const LatencyParams& call = params.send.call;
  const std::uint64_t number = turn_number(call, LatencyKind::kCombine);
  if (blockIdx.x == 0) publish_grants(call, params.far);
  const bool came = await_far_turn(call, params.far, LatencyKind::kCombine, number, shared.sets);
  if (came && blockIdx.x == 0) hide_far_ranks(call, params.far, LatencyKind::kCombine, number);
  if (lane_idx() == 0) shared.number = came ? number : 0;
  const FarLayout& layout = params.far.layout;
  std::int32_t begin = 0;
#pragma unroll 1
  for (int first = 0; first < layout.num_far(); first += kWarpLanes) {
    const int idx = first + lane_idx();
    const int rank = idx < layout.num_far() ? layout.far_rank(idx) : -1;
    std::int32_t total = 0;
    const std::int32_t before = prefix_sum(rank < 0 ? 0 : call.tables.num_returns[rank], total);
    if (rank >= 0) shared.firsts[rank] = begin + before;
    begin += total;
  }
  // Far ranks have said how many rows they want back.
  if (begin <= params.most_returns) return;
  if (lane_idx() == 0) {
    shared.number = 0;
    if (came) refuse_message(call, layout.far_rank(0), number);
  }
}

/// Copies this rank's rows of a token of `source` to their places. All lanes of a warp.
__device__ void return_rows(const FarCombineParams& params, const FarReturnsShared& shared, int source, int token,
                            const RowPart& part) {
  const LatencyParams& call = params.send.call;
  const std::int64_t index = source * call.max_tokens + token;
  if (token >= call.tables.tokens_of_rank[source] || call.tables.rank_ordinals[index] < 0) return;
  const bool is_entry = lane_idx() < call.num_topk;
  const std::int32_t row = is_entry ? call.tables.items[index * call.num_topk + lane_idx()] : -1;
  const unsigned same = __match_any_sync(kAllLanes, row);
  const bool first = row >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx();
  const std::int64_t stride = round_up_row(params.send.rows.row_bytes);
  if (call.tables.returns[index] + __popc(__ballot_sync(kAllLanes, static_cast<int>(first))) >
      call.tables.num_returns[source]) {
    return;  // no rank of this build asks for more rows than it counts
  }
  std::byte* to = params.returns + (shared.firsts[source] + call.tables.returns[index]) * stride + part.begin;
#pragma unroll 1
  for (unsigned left = __ballot_sync(kAllLanes, static_cast<int>(first)); left != 0; left &= left - 1) {
    const std::int64_t from = __shfl_sync(kAllLanes, row, __ffs(static_cast<int>(left)) - 1);
    copy_by_warp(to, params.send.x + from * params.send.x_stride + part.begin, part.bytes);
    to += stride;
  }
}

/// Posts what a combine sends to far ranks. All lanes of one warp of the last block.
__device__ void post_returns(const FarCombineParams& params, const FarReturnsShared& shared, bool routed) {
  const LatencyParams& call = params.send.call;
  const FarParams& far = params.far;
  const std::int64_t stride = round_up_row(params.send.rows.row_bytes);
  LatencyHeader header;
  header.agreement = routed ? call.agreement : 0;
  header.record_number = call.record_number;
  header.num_tokens = call.num_tokens;
  write_far_headers(far, LatencyKind::kCombine, header);
  __syncwarp();
#pragma unroll 1
  for (int idx = lane_idx(); idx < far.layout.num_far(); idx += kWarpLanes) {
    const int rank = far.layout.far_rank(idx);
    const int set = shared.sets[rank];
    FarRows rows;
    if (routed && set != kNoSet) {
      rows.from = params.returns_of_host + static_cast<std::uint64_t>(shared.firsts[rank] * stride);
      rows.to = far.layout.returns_at(set) + call.tables.return_firsts[rank] * stride;
      rows.bytes = call.tables.num_returns[rank] * stride;
    }
    post_far(call, far, LatencyKind::kCombine, idx, set, shared.number, static_cast<std::int64_t>(kFarHeaderBytes),
             rows);
  }
}

/// Sends far ranks the rows of a combine.
__global__ void __launch_bounds__(kFarThreads) far_returns_kernel(const __grid_constant__ FarCombineParams params) {
  auto& shared = *reinterpret_cast<FarReturnsShared*>(dynamic_shared());
  const LatencyParams& call = params.send.call;
  const CombineStart start = CombineStart::of(call);
  if (warp_idx() == 0) {
    if (lane_idx() == 0) shared.number = 0;
    __syncwarp();
    if (start.routed) {
      begin_returns(params, shared);
    } else {
      const std::uint64_t number = turn_number(call, LatencyKind::kCombine);
      if (blockIdx.x == 0) publish_grants(call, params.far);
      const bool came = await_far_turn(call, params.far, LatencyKind::kCombine, number, shared.sets);
      if (came && blockIdx.x == 0) hide_far_ranks(call, params.far, LatencyKind::kCombine, number);
      if (lane_idx() == 0) shared.number = came ? number : 0;
    }
  }
  __syncthreads();
  if (shared.number == 0) return;
  if (start.routed) {
    const int num_far = params.far.layout.num_far();
    const int num_items = start.most_tokens * num_far;
    const int num_warps = static_cast<int>(gridDim.x) * (kFarThreads / kWarpLanes);
    const RowParts parts = RowParts::of(params.send.rows.row_bytes, num_items, num_warps);
    const int first = warp_idx() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
#pragma unroll 1
    for (int unit = first; unit < num_items * parts.num_parts; unit += num_warps) {
      const int item = unit / parts.num_parts;
      const int source = params.far.layout.far_rank(item % num_far);
      if (shared.sets[source] == kNoSet) continue;
      const RowPart part = RowPart::of(parts, params.send.rows.row_bytes, unit % parts.num_parts);
      return_rows(params, shared, source, item / num_far, part);
    }
  }
  if (is_last_far_block(params.far) && warp_idx() == 0) post_returns(params, shared, start.routed);
}

/// Tells far ranks that this rank refuses a call. One warp.
__global__ void __launch_bounds__(kWarpLanes) far_refusal_kernel(const __grid_constant__ FarRefusalParams params) {
  int* const sets = reinterpret_cast<int*>(dynamic_shared());
  const LatencyParams& call = params.call;
  const std::uint64_t number = turn_number(call, params.kind);
  own_set(call, params.kind, number);
  __syncwarp();
  publish_grants(call, params.far);
  if (!await_far_turn(call, params.far, params.kind, number, sets)) return;
  hide_far_ranks(call, params.far, params.kind, number);
  LatencyHeader header;
  header.record_number = call.record_number;
  write_far_headers(params.far, params.kind, header);
  __syncwarp();
#pragma unroll 1
  for (int idx = lane_idx(); idx < params.far.layout.num_far(); idx += kWarpLanes) {
    const int set = sets[params.far.layout.far_rank(idx)];
    post_far(call, params.far, params.kind, idx, set, number, static_cast<std::int64_t>(kFarHeaderBytes), {});
  }
}

std::size_t rows_bytes(const FarDispatchParams& params) {
  return send_shared_bytes(params.send.call.num_experts) + sizeof(FarTargets);
}
std::size_t most_rows_bytes() { return send_shared_bytes(static_cast<int>(kMaxExperts)) + sizeof(FarTargets); }
std::size_t returns_bytes(const FarCombineParams& /*params*/) { return sizeof(FarReturnsShared); }
std::size_t refusal_bytes(const FarRefusalParams& /*params*/) { return kMaxRanks * sizeof(int); }

constexpr KernelRow<FarDispatchParams, 2 * kNumCodecs> kRows = {
    {far_rows_kernel<Codec::kPlain, false>, far_rows_kernel<Codec::kFp8, false>, far_rows_kernel<Codec::kInt8, false>,
     far_rows_kernel<Codec::kPlain, true>, far_rows_kernel<Codec::kFp8, true>, far_rows_kernel<Codec::kInt8, true>},
    kDispatchThreads,
    rows_bytes,
    most_rows_bytes};
constexpr KernelRow<FarReceiveParams, 2> kReceive = {{far_import_kernel, far_headers_kernel}, kFarThreads, nullptr};
constexpr KernelRow<FarCombineParams> kReturns = {{far_returns_kernel}, kFarThreads, returns_bytes};
constexpr KernelRow<FarRefusalParams> kRefusal = {{far_refusal_kernel}, kWarpLanes, refusal_bytes};

}  // namespace

cudaError_t launch_far_rows(const FarDispatchParams& params, bool homes, cudaStream_t stream) {
  const int idx = (homes ? kNumCodecs : 0) + codec_idx(params.send.quantize);
  return kRows.launch(idx, params.send.call.num_blocks, false, params, stream);
}

cudaError_t launch_far_returns(const FarCombineParams& params, cudaStream_t stream) {
  return kReturns.launch(0, params.send.call.num_blocks, false, params, stream);
}

cudaError_t launch_far_receive(const FarReceiveParams& params, cudaStream_t stream) {
  const bool imports = params.kind == LatencyKind::kDispatch && !params.refuses;
  const int num_parts = kPartsPerSource * params.far.layout.num_far();
  const int num_blocks = imports ? std::min(num_parts, params.call.num_blocks) : 1;
  return kReceive.launch(imports ? 0 : 1, num_blocks, false, params, stream);
}

cudaError_t launch_far_refusal(const FarRefusalParams& params, cudaStream_t stream) {
  return kRefusal.launch(0, 1, false, params, stream);
}

cudaError_t load_far_kernels() { return load_rows(kRows, kReceive, kReturns, kRefusal); }

}  // namespace ferry::cuda
