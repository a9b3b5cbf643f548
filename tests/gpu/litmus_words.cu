/// Words of latency mode: each is its own flag, rows have a flag behind them, and sets are granted for reuse.

#include "cuda/latency/words.cuh"
#include "gpu/litmus_device.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace): the primitives under test
using cuda::Awaited;
using cuda::kGrantSlots;
using cuda::kSets;

constexpr int kNumThreads = 128;
constexpr int kSender = 0;
constexpr int kReceiver = 1;
static_assert(kGrantSlots <= kFlagStride);

/// Memory of a set for one pair.
struct Set {
  std::uint64_t* words = nullptr;
  std::uint64_t* row_flag = nullptr;
  uint4* row = nullptr;
};

__device__ Set set_of(const WordsParams& params, int set) {
  const std::size_t index = std::size_t{blockIdx.x} * kSets + static_cast<std::size_t>(set);
  std::uint64_t* const words = params.words + index * kSetWords;
  return {words, words + kSetWords - 1, reinterpret_cast<uint4*>(params.rows + index * kMaxRowBytes)};
}

__device__ std::uint64_t* grant_of(const WordsParams& params, std::uint64_t number) {
  return params.grants + std::size_t{blockIdx.x} * kFlagStride + number % kGrantSlots;
}

__device__ std::uint32_t word_of(std::uint64_t number, int word) {
  return mixed(seed_of(static_cast<std::uint32_t>(number), blockIdx.x) + static_cast<std::uint32_t>(word));
}

struct Shared {
  int set;
  bool came;
  int sets[kGrantSlots];  ///< sets of the receiver's calls, by number
};

/// Sends a call. Returns false if no set was granted.
__device__ bool send(const WordsParams& params, Shared& shared, std::uint64_t number) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    const Payload grant = wait_word(params.call, {Awaited::kDone, kReceiver, number}, grant_of(params, number));
    shared.set = grant.came ? static_cast<int>(grant.value) : -1;
  }
  __syncthreads();
  if (shared.set < 0) return false;
  const Set set = set_of(params, shared.set);
  if (thread < kSetWords - 1) post_word(set.words + thread, number, word_of(number, thread));
  const auto round = static_cast<std::uint32_t>(number);
  for (int unit = thread; unit < units_of_round(round); unit += kNumThreads) {
    set.row[unit] = unit_of(seed_of(round, blockIdx.x), unit);
  }
  __syncthreads();
  if (thread == 0) {
    fence_system();
    post_word(set.row_flag, number, 0);
  }
  return true;
}

/// Receives a call. Returns false if the call did not arrive.
__device__ bool receive(const WordsParams& params, Shared& shared, std::uint64_t number, std::uint64_t& granted) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int set_idx = shared.sets[number % kGrantSlots];
  const Set set = set_of(params, set_idx);
  bool came = true;
  if (thread < kSetWords - 1) {
    const Payload word = wait_payload(params.call, {Awaited::kRow, kSender, number}, set.words + thread);
    came = word.came;
    if (came) check_word(*params.report, word.value, word_of(number, thread), thread, number);
  }
  if (thread == kNumThreads - 1) {
    came = wait_word(params.call, {Awaited::kRow, kSender, number}, set.row_flag).came;
  }
  if (__syncthreads_and(static_cast<int>(came)) == 0) return false;
  const auto round = static_cast<std::uint32_t>(number);
  for (int unit = thread; unit < units_of_round(round); unit += kNumThreads) {
    check_unit(*params.report, set.row[unit], seed_of(round, blockIdx.x), unit, number);
  }
  __syncthreads();  // all threads have read, so the set may be filled again
  ++granted;
  if (thread == 0) {
    shared.sets[granted % kGrantSlots] = set_idx;
    fence_system();
    post_word(grant_of(params, granted), granted, static_cast<std::uint32_t>(set_idx));
  }
  __syncthreads();
  return true;
}

__global__ void __launch_bounds__(kNumThreads) words_kernel(const __grid_constant__ WordsParams params) {
  __shared__ Shared shared;
  bool good = true;
  if (params.side == kSender) {
    for (std::uint64_t i = 0; i < params.num_calls && good; ++i) good = send(params, shared, params.first_number + i);
  } else {
    std::uint64_t granted = params.first_number + kSets - 1;
    if (threadIdx.x == 0) {
      for (int set = 0; set < kSets; ++set) {
        const std::uint64_t number = params.first_number + static_cast<std::uint64_t>(set);
        shared.sets[number % kGrantSlots] = set;
        post_word(grant_of(params, number), number, static_cast<std::uint32_t>(set));
      }
    }
    __syncthreads();
    for (std::uint64_t i = 0; i < params.num_calls && good; i += 2) {
      const std::uint64_t first = mixed(static_cast<std::uint32_t>(i) + blockIdx.x) & 1U;
      good = receive(params, shared, params.first_number + i + first, granted) &&
             receive(params, shared, params.first_number + i + 1 - first, granted);
    }
  }
  if (!good && threadIdx.x == 0) atomicAdd_system(&params.report->num_expired, 1U);
  if (good && threadIdx.x == 0) atomicAdd_system(&params.report->num_completed, 1U);
}

}  // namespace

cudaError_t launch_words(const WordsParams& params, cudaStream_t stream) {
  words_kernel<<<params.num_pairs, kNumThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ferry::test
