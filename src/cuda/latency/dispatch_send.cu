/// The send half of latency_dispatch. One block counts all tokens and tells every rank the counts; the others have some
/// of the tokens each, tell every rank where their entries go, and send their rows. No block waits for another, nor for
/// a peer once its set is granted.

#include "cuda/copy/prefetch.cuh"
#include "cuda/driver/launch.hpp"
#include "cuda/latency/send_rows.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kSendThreads = 512;
constexpr LatencyKind kKind = LatencyKind::kDispatch;

/// Followed by the experts' counts.
struct Shared {
  std::uint64_t number;
  unsigned long long bad_entry;
  int sets[kMaxRanks];
  // Of the token that is being sent.
  RowTargets targets;
  int ranks[kMaxTopk];  ///< of the targets
  std::uint32_t entries[kMaxTopk];
  std::uint32_t weights[kMaxTopk];
  std::uint32_t scale_words[kTileBlocks];
};
constexpr unsigned long long kNoBadEntry = ~0ULL;

__device__ std::int64_t load_id(const DispatchSendParams& params, std::int64_t at) {
  return params.wide_ids ? static_cast<const std::int64_t*>(params.topk_idx)[at]
                         : static_cast<const std::int32_t*>(params.topk_idx)[at];
}

/// -1: none, or no expert at all.
__device__ int expert_of(const DispatchSendParams& params, std::int64_t id) {
  return id >= 0 && id < params.call.num_experts ? static_cast<int>(id) : -1;
}

/// Tokens that may have experts, from the first on.
__device__ int num_counted_tokens(const DispatchSendParams& params) {
  const auto num_tokens = static_cast<int>(params.call.num_tokens);  // at most kMaxLatencyTokens
  return params.num_tokens_view == nullptr ? num_tokens : max(0, min(*params.num_tokens_view, num_tokens));
}

/// What the Routing keeps of an entry. By the block that counts.
__device__ void keep_entry(const DispatchSendParams& params, Shared& shared, std::int64_t at, std::int64_t id) {
  const LatencyTables& tables = params.call.tables;
  const int expert = expert_of(params, id);
  if (expert < 0 && id != -1) atomicMin(&shared.bad_entry, static_cast<unsigned long long>(at));
  tables.ids[at] = id;
  tables.homes[at] = expert < 0 ? -1 : home_of(params.placement.owner[expert], params.placement.local_expert[expert]);
  if (id == -1) tables.slots[at] = -1;  // the receive half does not see tokens that do not count
  if (tables.weights != nullptr) tables.weights[at] = params.weights[at];
}

/// Adds the tokens before `end` to `tokens_of_expert` [E], each once for an expert; those from `num_counted` on have
/// none. All warps but the first.
__device__ void count_tokens(const DispatchSendParams& params, Shared& shared, int end, int num_counted,
                             unsigned* tokens_of_expert) {
  const int num_topk = params.call.num_topk;
  // A token has as many lanes as K rounded up to a power of two.
  const int width = num_topk <= 1 ? 1 : 1 << (kWarpLanes - __clz(num_topk - 1));
  const int tokens_per_warp = kWarpLanes / width;
  constexpr int kWarps = kSendThreads / kWarpLanes - 1;
#pragma unroll 1
  for (int first = (warp_idx() - 1) * tokens_per_warp; first < end; first += kWarps * tokens_per_warp) {
    const int token = first + lane_idx() / width;
    const int topk = lane_idx() % width;
    int expert = -1;
    if (topk < num_topk && token < end) {
      const std::int64_t at = std::int64_t{token} * num_topk + topk;
      const std::int64_t id = token < num_counted ? load_id(params, at) : -1;
      expert = expert_of(params, id);
      if (blockIdx.x == 0) keep_entry(params, shared, at, id);
    }
    constexpr int kTokenShift = 16;
    const unsigned key = expert < 0 ? 0x80000000U | static_cast<unsigned>(lane_idx())
                                    : static_cast<unsigned>(lane_idx() / width << kTokenShift | expert);
    const unsigned same = __match_any_sync(kAllLanes, key);
    if (expert >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx()) atomicAdd(&tokens_of_expert[expert], 1U);
  }
}

/// Tells every rank that this one has come to the call, and its counts.
__device__ void post_counts(const DispatchSendParams& params, const Shared& shared, int num_counted,
                            const unsigned* tokens_of_expert) {
  const LatencyParams& call = params.call;
  const auto thread = static_cast<int>(threadIdx.x);
  if (warp_idx() == 0) {
    LatencyHeader header;
    header.agreement = call.agreement;
    header.record_number = call.record_number;
    header.num_tokens = num_counted;
    header.num_blocks = gridDim.x;
    if (shared.bad_entry != kNoBadEntry) {
      header.bad_entry = static_cast<std::int64_t>(shared.bad_entry);
      header.bad_id = load_id(params, header.bad_entry);
    }
    post_header(call, kKind, shared.number, header, shared.sets);
  }
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
    if (shared.sets[rank] == kNoSet) continue;
    std::uint64_t* words = count_words(call, rank, shared.sets[rank], call.ranks.rank);
#pragma unroll 1
    for (int expert = thread; expert < call.num_experts; expert += kSendThreads) {
      post_word(words + expert, shared.number, tokens_of_expert[expert]);
    }
  }
  if (thread == 0) {
    *call.tables.dispatch = {shared.number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
}

/// Where the entries of a token go, and its row. `tokens_of_expert` [E] counts the tokens before it, then it too. All
/// lanes of one warp.
__device__ void place_token(const DispatchSendParams& params, Shared& shared, std::int64_t token,
                            unsigned* tokens_of_expert) {
  const LatencyParams& call = params.call;
  const int lane = lane_idx();
  int expert = -1;
  int owner = -1;
  if (lane < call.num_topk) {
    const std::int64_t at = token * call.num_topk + lane;
    expert = expert_of(params, load_id(params, at));
    if (expert >= 0) owner = params.placement.owner[expert];
    if (params.weights != nullptr) shared.weights[lane] = __float_as_uint(params.weights[at]);
  }
  const unsigned ordinal = expert < 0 ? 0 : tokens_of_expert[expert];
  __syncwarp();
  if (expert >= 0) tokens_of_expert[expert] = ordinal + 1;  // lanes of the same expert store the same
  if (lane < call.num_topk) {
    shared.entries[lane] = expert < 0 ? kNoExpert : pack_entry(expert, static_cast<int>(ordinal));
  }
  const unsigned same_rank = __match_any_sync(kAllLanes, owner);
  const bool sends = owner >= 0 && __ffs(static_cast<int>(same_rank)) - 1 == lane && shared.sets[owner] != kNoSet;
  const unsigned senders = __ballot_sync(kAllLanes, static_cast<int>(sends));
  if (sends) {
    const int target = __popc(senders & ((1U << lane) - 1));
    std::byte* const rows = window_of(call, owner).rows(call.layout, kKind, shared.sets[owner]);
    shared.ranks[target] = owner;
    shared.targets.rows[target] = rows + call.ranks.rank * call.layout.source_bytes + token * params.row.stride();
  }
  if (lane == 0) shared.targets.num = __popc(senders);
}

__device__ DispatchSlot slot_at(const LatencyParams& call, const Shared& shared, int rank) {
  return DispatchSlot::at(window_of(call, rank).slot(call.layout, kKind, shared.sets[rank], call.ranks.rank),
                          call.max_tokens, call.num_topk);
}

/// Tells every rank where the entries of a token go. All threads.
__device__ void post_entries(const DispatchSendParams& params, const Shared& shared, std::int64_t token) {
  const LatencyParams& call = params.call;
  const int num_words = call.ranks.num_ranks * call.num_topk;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_words; i += kSendThreads) {
    const int rank = i / call.num_topk;
    const int topk = i - rank * call.num_topk;
    if (shared.sets[rank] == kNoSet) continue;
    const DispatchSlot slot = slot_at(call, shared, rank);
    const std::int64_t at = token * call.num_topk + topk;
    post_word(slot.entries + at, shared.number, shared.entries[topk]);
    if (params.weights != nullptr) post_word(slot.weights + at, shared.number, shared.weights[topk]);
  }
}

enum class Codec { kPlain, kFp8, kInt8 };

template <Codec kCodec>
__global__ void __launch_bounds__(kSendThreads)
    dispatch_send_kernel(const __grid_constant__ DispatchSendParams params) {
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  auto* const tokens_of_expert = reinterpret_cast<unsigned*>(dynamic_shared() + sizeof(Shared));  // [E]
  const LatencyParams& call = params.call;
  const auto thread = static_cast<int>(threadIdx.x);
  const bool counts = blockIdx.x == 0;
  const int num_tokens = num_counted_tokens(params);
  const int num_row_blocks = gridDim.x > 1 ? static_cast<int>(gridDim.x) - 1 : 1;
  const int per_block = (num_tokens + num_row_blocks - 1) / num_row_blocks;
  const int first = counts ? num_tokens : per_block * (static_cast<int>(blockIdx.x) - 1);
  const int end = first + per_block < num_tokens ? first + per_block : num_tokens;
  if (!counts && first < end) {  // its first row is on its way while tokens are counted
    constexpr int kLine = kRowAlignment;
    const std::byte* const row = params.x + first * params.x_stride;
    const std::int64_t row_bytes = kCodec == Codec::kPlain ? params.row.x_bytes : params.hidden * 2;
#pragma unroll 1
    for (std::int64_t at = std::int64_t{thread} * kLine; at < row_bytes; at += kSendThreads * kLine) {
      prefetch_l2(row + at);
    }
  }
#pragma unroll 1
  for (int expert = thread; expert < call.num_experts; expert += kSendThreads) tokens_of_expert[expert] = 0;
  if (thread == 0) shared.bad_entry = kNoBadEntry;
  __syncthreads();
  if (warp_idx() == 0) {
    const std::uint64_t number = begin_send_and_wait(call, kKind, shared.sets);
    if (lane_idx() == 0) shared.number = number;
  } else {
    count_tokens(params, shared, counts ? static_cast<int>(call.num_tokens) : first, num_tokens, tokens_of_expert);
  }
  __syncthreads();
  let_next_kernel_begin();
  if (shared.number == 0) return;  // the group broke
  if (counts) {
    post_counts(params, shared, num_tokens, tokens_of_expert);
    return;
  }
#pragma unroll 1
  for (int token = first; token < end; ++token) {
    if (warp_idx() == 0) place_token(params, shared, token, tokens_of_expert);
    __syncthreads();
    post_entries(params, shared, token);
    if constexpr (kCodec == Codec::kPlain) {
      send_plain_row(params, token, shared.targets);
    } else {
      send_quantized_row<kCodec == Codec::kInt8>(params, token, shared.targets, shared.scale_words);
    }
    __syncthreads();
    if (warp_idx() != 0) continue;
    if (lane_idx() < shared.targets.num) {
      fence_system();
      post_word(slot_at(call, shared, shared.ranks[lane_idx()]).row_flags + token, shared.number, 0);
    }
    __syncwarp();  // before the next token's targets
  }
}

using Kernel = void (*)(DispatchSendParams);

Kernel kernel_for(Quantization mode) {
  switch (mode) {
    case Quantization::kNone:
      return dispatch_send_kernel<Codec::kPlain>;
    case Quantization::kInt8:
      return dispatch_send_kernel<Codec::kInt8>;
    case Quantization::kFp8:
    case Quantization::kFp8PowerOfTwo:
    case Quantization::kFp8Ue8m0:
      break;
  }
  return dispatch_send_kernel<Codec::kFp8>;
}

}  // namespace

cudaError_t launch_dispatch_send(const DispatchSendParams& params, cudaStream_t stream) {
  const std::size_t shared_bytes =
      sizeof(Shared) + static_cast<std::size_t>(params.call.num_experts) * sizeof(unsigned);
  return launch_kernel(kernel_for(params.quantize),
                       {static_cast<unsigned>(params.call.num_blocks), kSendThreads, shared_bytes}, params, stream);
}

cudaError_t load_dispatch_send_kernels() {
  cudaError_t error = cudaSuccess;
  for (const Quantization mode : {Quantization::kNone, Quantization::kFp8, Quantization::kInt8}) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess)
      error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel_for(mode)));
  }
  return error;
}

}  // namespace ferry::cuda
