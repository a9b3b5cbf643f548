/// Rows of latency mode sent as words (cuda/latency/row_words.cuh). One instruction moves a pair of words, in no order;
/// each word carries its number together with its data, and no flag follows.

#include "cuda/latency/row_words.cuh"
#include "gpu/litmus_device.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace): the primitives under test
using cuda::Awaited;
using cuda::kWordStepBytes;

constexpr int kSender = 0;
constexpr int kReceiver = 1;
/// Polls of a step before a lane waits, as in the library's kernels.
constexpr int kLooks = 64;

/// This lane's words of the step that begins with `unit`.
__device__ std::byte* step_of(const RowWordsParams& params, int unit) {
  return params.words + blockIdx.x * cuda::row_words_bytes(kMaxRowBytes) + std::int64_t{2} * unit * kUnitBytes;
}

__device__ std::uint64_t* grant_of(const RowWordsParams& params) {
  return params.grants + std::size_t{blockIdx.x} * kFlagStride;
}

__device__ uint4 expected_unit(std::uint64_t number, int unit) {
  return unit_of(seed_of(static_cast<std::uint32_t>(number), blockIdx.x), unit);
}

/// Sends a row. One warp calls it. Returns false if the previous row was not read in time.
__device__ bool send_row(const RowWordsParams& params, std::uint64_t number) {
  const bool granted = wait_word(params.call, {Awaited::kDone, kReceiver, number}, grant_of(params)).came;
  if (__all_sync(kAllLanes, static_cast<int>(granted)) == 0) return false;
  const int num_units = units_of_round(static_cast<std::uint32_t>(number));
  for (int first = 0; first < num_units; first += kWarpLanes) {
    const int unit = first + lane_idx();
    if (unit < num_units) LaneWords(expected_unit(number, unit), number).store(step_of(params, first));
  }
  return true;
}

/// Checks the words that have arrived, whether or not their neighbours have.
__device__ void check_arrived(const RowWordsParams& params, const LaneWords& words, std::uint64_t number, int unit) {
  const uint4 expected = expected_unit(number, unit);
  const auto check = [&params, number, unit](std::uint64_t word, std::uint32_t data, int i) {
    if (is_word_of(word, number)) check_word(*params.report, payload_of(word), data, 4 * unit + i, number);
  };
  check(words.low.first, expected.x, 0);
  check(words.low.second, expected.y, 1);
  check(words.high.first, expected.z, 2);
  check(words.high.second, expected.w, 3);
}

/// Receives one lane's words of a step. Returns false if they did not arrive.
__device__ bool receive_unit(const RowWordsParams& params, std::uint64_t number, const std::byte* step, int unit) {
  for (int looks = 0;; ++looks) {
    const LaneWords words = LaneWords::load(step);
    check_arrived(params, words, number, unit);
    if (words.are_of(number)) return true;
    if (looks < kLooks) continue;
    looks = 0;
    for (int i = 0; i < LaneWords::kWords; ++i) {
      if (!wait_payload(params.call, {Awaited::kRow, kSender, number}, LaneWords::address(step, i)).came) return false;
    }
  }
}

/// Receives a row. One warp calls it.
__device__ bool receive_row(const RowWordsParams& params, std::uint64_t number) {
  const int num_units = units_of_round(static_cast<std::uint32_t>(number));
  bool came = true;
  for (int first = 0; first < num_units && came; first += kWarpLanes) {
    const int unit = first + lane_idx();
    if (unit < num_units) came = receive_unit(params, number, step_of(params, first), unit);
  }
  if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return false;
  __syncwarp();  // all lanes have read
  if (lane_idx() == 0) {
    fence_system();
    post_word(grant_of(params), number + 1, 0);
  }
  return true;
}

__global__ void __launch_bounds__(kWarpLanes) row_words_kernel(const __grid_constant__ RowWordsParams params) {
  if (params.side == kReceiver && lane_idx() == 0) post_word(grant_of(params), params.first_number, 0);
  bool good = true;
  for (std::uint64_t i = 0; i < params.num_calls && good; ++i) {
    const std::uint64_t number = params.first_number + i;
    good = params.side == kSender ? send_row(params, number) : receive_row(params, number);
  }
  if (lane_idx() == 0) atomicAdd_system(good ? &params.report->num_completed : &params.report->num_expired, 1U);
}

}  // namespace

cudaError_t launch_row_words(const RowWordsParams& params, cudaStream_t stream) {
  row_words_kernel<<<params.num_pairs, kWarpLanes, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ferry::test
