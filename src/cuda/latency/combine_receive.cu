/// The receive half of a combine: adds up what the ranks have returned for this rank's tokens.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/combine_parts.cuh"
#include "cuda/latency/term_order.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kNumThreads = kCombineWarps * kWarpLanes;

/// A block's shared memory, sizes and pointers from one place.
struct ReceiveShared {
  SendUnits* senders;  ///< [R] how each rank's send half divides its work
  Terms* terms;        ///< [warps]
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static ReceiveShared at(std::byte* base, int num_ranks) {
    plan::Carver carver(base);
    ReceiveShared shared{};
    shared.senders = carver.take<SendUnits>(static_cast<std::size_t>(num_ranks));
    shared.terms = carver.take<Terms>(kCombineWarps);
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

/// What one warp does with its parts of tokens.
template <bool kFloat32>
class Receiver {
 public:
  __device__ Receiver(const CombineReceiveParams& params, const ReceiveShared& shared, const SentCall& sent)
      : params_(params),
        call_(params.call),
        senders_(shared.senders),
        number_(sent.number),
        set_(static_cast<int>(sent.set)),
        window_(CombineWindow::at(params.call, params.rows, params.call.ranks.rank, static_cast<int>(sent.set))),
        terms_(shared.terms[warp_idx()]) {}

  /// False when the group broke. All lanes.
  __device__ bool receive_all() {
    const auto num_blocks = static_cast<int>(gridDim.x);
    const int step = num_blocks * kCombineWarps;
    const std::int64_t row_bytes = params_.rows.row_bytes;
    const auto num_tokens = static_cast<int>(call_.num_tokens);
    const RowParts parts = RowParts::of(row_bytes, num_tokens, step);
    const int num_units = num_tokens * parts.num_parts;
    bool good = true;
#pragma unroll 1
    for (int unit = warp_idx() * num_blocks + static_cast<int>(blockIdx.x); unit < num_units && good; unit += step) {
      good = receive(unit / parts.num_parts, RowPart::of(parts, row_bytes, unit % parts.num_parts));
    }
    return good;
  }

 private:
  __device__ bool receive(int token, const RowPart& part) {
    const bool is_entry = lane_idx() < call_.num_topk;
    const std::int64_t entry = std::int64_t{token} * call_.num_topk + (is_entry ? lane_idx() : 0);
    const std::int32_t home = is_entry ? call_.tables.homes[entry] : -1;
    const bool exact = params_.rows.order == CombineOrder::kExact;
    const std::int32_t slot = exact ? call_.tables.slots[entry] : 0;
    const float weight = exact ? params_.weights[entry] : 1.0F;
    const bool came = home < 0 || await_part(home_rank(home), token, part);
    const bool all = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
    __syncwarp();  // hands what each lane has acquired to all of them
    if (!all) return false;
    Term term;
    if (home >= 0) term.key = static_cast<std::uint64_t>(home_rank(home)) << 32 | static_cast<std::uint32_t>(slot);
    term.weight = weight;
    // Exact: a row lies where the first of its entries is. Sums: at the ordinal of its rank among the token's.
    term.row = window_.row(token, exact ? lane_idx() : ordinal_of(home)) + part.begin;
    const int num_rows = order_terms(term, call_.num_topk, exact, terms_);
    sum_terms<kFloat32>(terms_, num_rows, params_.out + token * params_.out_stride + part.begin, part.bytes);
    return true;
  }

  /// Waits until `sender` has stored this part of what it returns for the token. One thread; false when the group
  /// broke.
  __device__ __noinline__ bool await_part(int sender, int token, const RowPart& part) const {
    const SendUnits units = senders_[sender];
    const std::uint64_t* words = done_words(call_, call_.ranks.rank, set_, sender);
    const int last = (part.begin + part.bytes - 1) / units.parts.part_bytes;
    bool came = true;
#pragma unroll 1
    for (int i = part.begin / units.parts.part_bytes; i <= last && came; ++i) {
      came = wait_word(call_.ranks, {Awaited::kRow, sender, number_},
                       words + units.block_of(sender, call_.ranks.rank, token, i))
                 .came;
    }
    return came;
  }

  /// How many of the token's ranks are below this lane's. All lanes.
  __device__ int ordinal_of(std::int32_t home) const {
    const int rank = home < 0 ? -1 : home_rank(home);
    const unsigned same = __match_any_sync(kAllLanes, rank);
    const bool first = rank >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx();
    int below = 0;
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, static_cast<int>(first)); left != 0; left &= left - 1) {
      below += static_cast<int>(__shfl_sync(kAllLanes, rank, __ffs(static_cast<int>(left)) - 1) < rank);
    }
    return below;
  }

  const CombineReceiveParams& params_;
  const LatencyParams& call_;
  const SendUnits* senders_;
  std::uint64_t number_;
  int set_;
  CombineWindow window_;
  Terms& terms_;
};

/// Waits until no rank stores anything of this call any more. All threads of a block; false when the group broke.
__device__ bool await_senders(const LatencyParams& call, const SentCall& sent, const SendUnits* senders) {
  bool all = true;
#pragma unroll 1
  for (int rank = warp_idx(); rank < call.ranks.num_ranks; rank += kCombineWarps) {
    const std::uint64_t* words = done_words(call, call.ranks.rank, static_cast<int>(sent.set), rank);
#pragma unroll 1
    for (int block = lane_idx(); block < senders[rank].num_blocks; block += kWarpLanes) {
      all = wait_word(call.ranks, {Awaited::kDone, rank, sent.number}, words + block).came && all;
    }
  }
  return __syncthreads_and(static_cast<int>(all)) != 0;
}

template <bool kFloat32>
__global__ void __launch_bounds__(kNumThreads)
    combine_receive_kernel(const __grid_constant__ CombineReceiveParams params) {
  const LatencyParams& call = params.call;
  const CallStart start = start_call(call.ranks, call.tables.summary);
  const volatile SentCall& pending = *call.tables.combine;
  const SentCall sent{pending.number, pending.set, pending.pending, 0};
  if (start.broken || sent.pending == 0) return;
  const ReceiveShared shared = ReceiveShared::at(dynamic_shared(), call.ranks.num_ranks);
  const int max_tokens = max_tokens_of(call);
  const auto take = [&params, &shared, max_tokens](int rank, const ReceivedHeader& header) {
    const auto num_blocks = static_cast<int>(header.num_blocks());
    if (lane_idx() != 0) return;
    shared.senders[rank] = SendUnits::of(params.rows.row_bytes, max_tokens, params.call.ranks.num_ranks, num_blocks);
  };
  const Outcome outcome = await_headers(call, LatencyKind::kCombine, static_cast<int>(sent.set), sent.number, take);
  if (outcome == Outcome::kStop) return;
  bool good = true;
  if (outcome == Outcome::kGo) {
    Receiver<kFloat32> receiver(params, shared, sent);
    good = receiver.receive_all();
  } else if (start.routed && blockIdx.x == 0 && threadIdx.x == 0) {  // else the send half has reported it
    report_latency_disagreement(call, LatencyKind::kCombine, static_cast<int>(sent.set));
  }
  if (__syncthreads_and(static_cast<int>(good)) == 0) return;
  if (!is_last_block(*call.tables.combine)) return;
  // A late store would meet what the set's next call brings.
  if (!await_senders(call, sent, shared.senders)) return;
  if (threadIdx.x == 0) *call.tables.combine = {};
  finish_receive(call, LatencyKind::kCombine, sent);
}

using ReceiveKernel = void (*)(CombineReceiveParams);
constexpr ReceiveKernel kReceiveKernels[] = {combine_receive_kernel<false>, combine_receive_kernel<true>};

}  // namespace

cudaError_t launch_combine_receive(const CombineReceiveParams& params, cudaStream_t stream) {
  const LaunchShape shape{static_cast<unsigned>(params.call.num_blocks), static_cast<unsigned>(kNumThreads),
                          ReceiveShared::at(nullptr, params.call.ranks.num_ranks).size_bytes};
  return launch_kernel(kReceiveKernels[params.rows.float32 ? 1 : 0], shape, params, stream);
}

cudaError_t load_combine_receive_kernels() {
  for (const ReceiveKernel kernel : kReceiveKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
