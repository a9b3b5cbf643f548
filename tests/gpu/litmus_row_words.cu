/// Rows of latency mode sent as words (cuda/latency/row_words.cuh). One instruction moves a word of 16 bytes, which
/// carries its number together with its data; words arrive in no order, and no flag follows.

#include "cuda/latency/row_words.cuh"
#include "gpu/litmus_device.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace): the primitives under test
using cuda::Awaited;

constexpr int kSender = 0;
constexpr int kReceiver = 1;

__device__ std::uint64_t* grant_of(const RowWordsParams& params) {
  return params.grants + std::size_t{blockIdx.x} * kFlagStride;
}

/// One side of a pair of warps. `kEach`: it checks each word that has arrived, whether or not its neighbours have;
/// otherwise it reads the row as the library's kernels do, and compares what it has read.
template <int kVectors, bool kEach>
class Side {
  using Words = LaneWords<kVectors>;
  static constexpr int kStepUnits = kVectors * kWarpLanes;

 public:
  __device__ Side(const RowWordsParams& params, std::uint64_t number)
      : params_(params), number_(number), num_units_(units_of_round(static_cast<std::uint32_t>(number))) {}

  /// Returns false if the previous row was not read in time.
  __device__ bool send() const {
    const bool granted = wait_word(params_.call, {Awaited::kDone, kReceiver, number_}, grant_of(params_)).came;
    if (__all_sync(kAllLanes, static_cast<int>(granted)) == 0) return false;
    for (int first = 0; first < num_units_; first += kStepUnits)
      expected(first).store(step_of(first), num_vectors(first));
    return true;
  }

  __device__ bool receive() const {
    bool came = true;
    for (int first = 0; first < num_units_ && came; first += kStepUnits) came = receive_step(first);
    if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return false;
    __syncwarp();  // all lanes have read
    if (lane_idx() == 0) {
      fence_system();
      post_word(grant_of(params_), number_ + 1, 0);
    }
    return true;
  }

 private:
  /// Words of the step that begins with unit `first`.
  __device__ std::byte* step_of(int first) const {
    return params_.words + blockIdx.x * cuda::row_words_bytes(kMaxRowBytes, cuda::kShortWordStepVectors) +
           cuda::word_offset(first * kUnitBytes, kVectors);
  }
  __device__ int num_vectors(int first) const { return count_vectors<kVectors>((num_units_ - first) * kUnitBytes); }
  /// This lane's units of a step are its vectors.
  __device__ static int unit_at(int first, int vector) { return first + vector * kWarpLanes + lane_idx(); }
  __device__ uint4 expected_unit(int unit) const {
    return unit_of(seed_of(static_cast<std::uint32_t>(number_), blockIdx.x), unit);
  }
  __device__ Words expected(int first) const {
    uint4 values[kVectors];
    for (int i = 0; i < kVectors; ++i) values[i] = expected_unit(unit_at(first, i));
    return Words(values, number_);
  }

  /// Receives this lane's words of a step. Returns false if they did not arrive.
  __device__ bool receive_step(int first) const {
    const std::byte* const step = step_of(first);
    const int count = num_vectors(first);
    for (int looks = 0;; ++looks) {
      const Words words = Words::load(step, count);
      if constexpr (kEach) check_arrived(words, first, count);
      if (words.are_of(number_, count)) {
        if constexpr (!kEach) check_values(words, first, count);
        return true;
      }
      if (looks < kWordLooks) continue;
      looks = 0;
      for (int i = 0; i < Words::count(count); ++i) {
        if (!wait_payload(params_.call, {Awaited::kRow, kSender, number_}, Words::number_of(step, i)).came)
          return false;
      }
    }
  }

  __device__ void check(std::uint64_t seen, std::uint64_t expected, int first) const {
    check_word(*params_.report, static_cast<std::uint32_t>(seen), static_cast<std::uint32_t>(expected), first, number_);
  }
  __device__ void check_arrived(const Words& words, int first, int count) const {
    const Words sent = expected(first);
#pragma unroll
    for (int i = 0; i < Words::kWords; ++i) {
      if (i >= Words::count(count) || !is_word_of(words.word(i).high, number_)) continue;
      check(words.word(i).low, sent.word(i).low, first);
      check(words.word(i).low >> 32, sent.word(i).low >> 32, first);
      check(words.word(i).high, sent.word(i).high, first);
    }
  }
  __device__ void check_values(const Words& words, int first, int count) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i >= count) continue;
      const uint4 seen = words.value(i);
      const uint4 expected = expected_unit(unit_at(first, i));
      check(seen.x, expected.x, first);
      check(seen.y, expected.y, first);
      check(seen.z, expected.z, first);
      check(seen.w, expected.w, first);
    }
  }

  const RowWordsParams& params_;
  const std::uint64_t number_;
  const int num_units_;  ///< of the row
};

template <int kVectors, bool kEach>
__global__ void __launch_bounds__(kWarpLanes) row_words_kernel(const __grid_constant__ RowWordsParams params) {
  if (params.side == kReceiver && lane_idx() == 0) post_word(grant_of(params), params.first_number, 0);
  bool good = true;
  for (std::uint64_t i = 0; i < params.num_calls && good; ++i) {
    const Side<kVectors, kEach> side(params, params.first_number + i);
    good = params.side == kSender ? side.send() : side.receive();
  }
  if (lane_idx() == 0) atomicAdd_system(good ? &params.report->num_completed : &params.report->num_expired, 1U);
}

}  // namespace

cudaError_t launch_row_words(const RowWordsParams& params, cudaStream_t stream) {
  using cuda::kShortWordStepVectors;
  using cuda::kWordStepVectors;
  const auto kernel =
      params.short_steps
          ? (params.checks_each ? row_words_kernel<kShortWordStepVectors, true>
                                : row_words_kernel<kShortWordStepVectors, false>)
          : (params.checks_each ? row_words_kernel<kWordStepVectors, true> : row_words_kernel<kWordStepVectors, false>);
  kernel<<<params.num_pairs, kWarpLanes, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ferry::test
