/// The send half of a combine: what this rank's experts made of each token goes back to the token's source, into the
/// set in which that rank receives this call. Waits for no rows.

#include <algorithm>

#include "cuda/copy/warp_copy.cuh"
#include "cuda/driver/launch.hpp"
#include "cuda/latency/combine_parts.cuh"
#include "cuda/latency/term_order.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kNumThreads = kCombineWarps * kWarpLanes;

/// A block's shared memory, sizes and pointers from one place.
struct SendShared {
  std::uint64_t* number;
  int* sets;     ///< [R] in which each rank receives this call
  Terms* terms;  ///< [warps]
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static SendShared at(std::byte* base, int num_ranks) {
    plan::Carver carver(base);
    SendShared shared{};
    shared.number = carver.take<std::uint64_t>(1);
    shared.sets = carver.take<int>(static_cast<std::size_t>(num_ranks));
    shared.terms = carver.take<Terms>(kCombineWarps);
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

/// Where `source` puts the weights of its tokens at `rank`.
__device__ std::uint64_t* weight_words(const LatencyParams& call, int rank, int set, int source) {
  return CombineSlot::at(window_of(call, rank).slot(call.layout, LatencyKind::kCombine, set, source)).weights;
}

/// Sends the weights of this rank's tokens to the ranks that add up their rows. All threads of all blocks.
__device__ void send_weights(const CombineSendParams& params, std::uint64_t number, const int* sets) {
  const LatencyParams& call = params.call;
  const std::int64_t num_entries = call.num_tokens * call.num_topk;
  const std::int64_t step = std::int64_t{gridDim.x} * kNumThreads;
#pragma unroll 1
  for (std::int64_t i = std::int64_t{blockIdx.x} * kNumThreads + threadIdx.x; i < num_entries; i += step) {
    const std::int32_t home = call.tables.homes[i];
    if (home < 0 || sets[home_rank(home)] == kNoSet) continue;
    post_word(weight_words(call, home_rank(home), sets[home_rank(home)], call.ranks.rank) + i, number,
              __float_as_uint(params.weights[i]));
  }
}

/// What one warp does with its units.
template <bool kFloat32>
class Sender {
 public:
  __device__ Sender(const CombineSendParams& params, const SendShared& shared)
      : params_(params),
        call_(params.call),
        number_(*shared.number),
        sets_(shared.sets),
        terms_(shared.terms[warp_idx()]) {}

  /// False when the group broke. All lanes.
  __device__ bool send_all() {
    const auto num_blocks = static_cast<int>(gridDim.x);
    const int num_ranks = call_.ranks.num_ranks;
    const SendUnits units = SendUnits::of(params_.rows.row_bytes, max_tokens_of(call_), num_ranks, num_blocks);
    const int step = num_blocks * kCombineWarps;
    bool good = true;
#pragma unroll 1
    for (int unit = warp_idx() * num_blocks + static_cast<int>(blockIdx.x); unit < units.num_units && good;
         unit += step) {
      const int row = unit / units.parts.num_parts;
      const RowPart part = RowPart::of(units.parts, params_.rows.row_bytes, unit % units.parts.num_parts);
      const int turn = row % num_ranks;
      const int source =
          call_.ranks.rank + turn < num_ranks ? call_.ranks.rank + turn : call_.ranks.rank + turn - num_ranks;
      good = send(source, row / num_ranks, part);
    }
    return good;
  }

 private:
  __device__ bool send(int source, int token, const RowPart& part) {
    if (token >= call_.tables.tokens_of_rank[source] || sets_[source] == kNoSet) return true;
    const std::int64_t item = source * call_.max_tokens + token;
    const std::int32_t ordinal = call_.tables.rank_ordinals[item];
    const bool is_entry = lane_idx() < call_.num_topk;
    const std::int64_t entry = item * call_.num_topk + (is_entry ? lane_idx() : 0);
    const std::int32_t row = is_entry ? call_.tables.items[entry] : -1;
    if (ordinal < 0) return true;
    const CombineWindow window = CombineWindow::at(call_, params_.rows, source, sets_[source]);
    if (params_.rows.order == CombineOrder::kExact) {
      copy_rows(window, token, row, part);
      return true;
    }
    float weight = 0;
    if (!load_weight(source, token, entry, row, weight)) return false;
    Term term;
    if (row >= 0) term = {static_cast<std::uint64_t>(row), row_at(row) + part.begin, weight};
    const int num_rows = order_terms(term, call_.num_topk, true, terms_);
    sum_few_terms<kFloat32>(terms_, num_rows, window.row(token, ordinal) + part.begin, part.bytes);
    return true;
  }

  /// Each row of the token goes to the place of the first entry that it is for.
  __device__ void copy_rows(const CombineWindow& window, std::int64_t token, std::int32_t row,
                            const RowPart& part) const {
    const unsigned same = __match_any_sync(kAllLanes, row);
    const bool first = row >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx();
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, static_cast<int>(first)); left != 0; left &= left - 1) {
      const int topk = __ffs(static_cast<int>(left)) - 1;
      const std::int32_t from = __shfl_sync(kAllLanes, row, topk);
      copy_by_warp(window.row(token, topk) + part.begin, row_at(from) + part.begin, part.bytes);
    }
  }

  /// The weight of this lane's entry, if it has a row here; false when the group broke.
  __device__ bool load_weight(int source, int token, std::int64_t entry, std::int32_t row, float& weight) {
    if (!params_.own_weights) {
      if (row >= 0) weight = call_.tables.item_weights[entry];
      return true;
    }
    bool came = true;
    if (row >= 0) came = await_weight(source, std::int64_t{token} * call_.num_topk + lane_idx(), weight);
    const bool all = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
    __syncwarp();
    return all;
  }

  /// Waits until `source` has sent the weight, or is found to make another call: then nobody will read the sum.
  __device__ __noinline__ bool await_weight(int source, std::int64_t entry, float& weight) const {
    const int set = sets_[call_.ranks.rank];
    const std::uint64_t* address = weight_words(call_, call_.ranks.rank, set, source) + entry;
    constexpr std::size_t kAgreementWord = offsetof(LatencyHeader, agreement) / sizeof(std::uint32_t);
    const std::uint64_t* agreement =
        header_words(call_, call_.ranks.rank, LatencyKind::kCombine, set, source) + kAgreementWord;
    std::uint64_t word = 0;
    const auto read = [&word, address, agreement, this] {
      word = load_acquire_system(address);
      if (is_word_of(word, number_)) return number_;
      const std::uint64_t low = load_acquire_system(agreement);
      const std::uint64_t high = load_acquire_system(agreement + 1);
      if (!is_word_of(low, number_) || !is_word_of(high, number_)) return std::uint64_t{0};
      const std::uint64_t theirs = half_of(high) << 32 | half_of(low);
      return theirs == call_.agreement ? 0 : number_;
    };
    const bool came = wait_until(call_.ranks, {Awaited::kEntry, source, number_}, read, number_);
    weight = __uint_as_float(payload_of(word));
    return came;
  }

  __device__ const std::byte* row_at(std::int32_t row) const { return params_.x + row * params_.x_stride; }

  const CombineSendParams& params_;
  const LatencyParams& call_;
  std::uint64_t number_;
  const int* sets_;
  Terms& terms_;
};

/// Tells the peers that this rank has come to the call, and its receive half what to receive. Warp 0 of block 0.
__device__ void announce(const LatencyParams& call, bool routed, std::uint64_t number, const int* sets) {
  LatencyHeader header;
  header.agreement = routed ? call.agreement : 0;
  header.record_number = call.record_number;
  header.num_tokens = call.num_tokens;
  header.num_blocks = gridDim.x;
  post_header(call, LatencyKind::kCombine, number, header, sets);
  if (lane_idx() != 0) return;
  *call.tables.combine = {number, static_cast<std::uint32_t>(sets[call.ranks.rank]), 1, 0};
}

template <bool kFloat32>
__global__ void __launch_bounds__(kNumThreads) combine_send_kernel(const __grid_constant__ CombineSendParams params) {
  const LatencyParams& call = params.call;
  const CallStart start = start_call(call.ranks, call.tables.summary);
  if (start.broken) return;
  // Refused by every rank, but the call's number and set go by, as where a host refuses it.
  if (!start.routed && blockIdx.x == 0 && threadIdx.x == 0) report_refused_dispatch(call.ranks, *call.tables.summary);
  const SendShared shared = SendShared::at(dynamic_shared(), call.ranks.num_ranks);
  if (warp_idx() == 0) {
    const std::uint64_t number = begin_send_and_wait(call, LatencyKind::kCombine, shared.sets);
    if (number != 0 && blockIdx.x == 0) announce(call, start.routed, number, shared.sets);
    if (lane_idx() == 0) *shared.number = number;
  }
  __syncthreads();
  if (*shared.number == 0) return;
  bool good = true;
  if (start.routed) {
    if (params.own_weights && params.rows.order == CombineOrder::kRankSums) {
      send_weights(params, *shared.number, shared.sets);
    }
    Sender<kFloat32> sender(params, shared);
    good = sender.send_all();
  }
  if (__syncthreads_and(static_cast<int>(good)) == 0 || warp_idx() != 0) return;
  fence_system();
#pragma unroll 1
  for (int rank = lane_idx(); rank < call.ranks.num_ranks; rank += kWarpLanes) {
    if (shared.sets[rank] == kNoSet) continue;
    post_word(done_words(call, rank, shared.sets[rank], call.ranks.rank) + blockIdx.x, *shared.number, 0);
  }
}

using SendKernel = void (*)(CombineSendParams);
constexpr SendKernel kSendKernels[] = {combine_send_kernel<false>, combine_send_kernel<true>};

}  // namespace

int combine_blocks(const LatencyParams& call, const CombineRows& rows, int num_sms) {
  const std::int64_t num_steps = (rows.row_bytes + RowParts::kStepBytes - 1) / RowParts::kStepBytes;
  const std::int64_t num_units = call.max_tokens * call.ranks.num_ranks * num_steps;
  const std::int64_t most = std::min(num_sms, kMaxCallBlocks);
  return static_cast<int>(std::clamp<std::int64_t>((num_units + kCombineWarps - 1) / kCombineWarps, 1, most));
}

cudaError_t launch_combine_send(const CombineSendParams& params, cudaStream_t stream) {
  const LaunchShape shape{static_cast<unsigned>(params.call.num_blocks), static_cast<unsigned>(kNumThreads),
                          SendShared::at(nullptr, params.call.ranks.num_ranks).size_bytes};
  return launch_kernel(kSendKernels[params.rows.float32 ? 1 : 0], shape, params, stream);
}

cudaError_t load_combine_send_kernels() {
  for (const SendKernel kernel : kSendKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
