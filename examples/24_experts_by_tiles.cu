// A layer of experts in latency mode whose combine begins while the experts still compute: their matrix product, a
// kernel for tensor cores, counts finished tiles of rows, and the combine sends a sum of rows once their tiles are
// final. One rank per GPU, each a thread of this program; two ranks share the GPU if there is only one.
//
// Received rows stand for what an expert's first product makes of them; the kernel is the second one.
// Without a usable GPU it prints the reason and exits with 0.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

using Bf16 = __nv_bfloat16;

constexpr int kMaxRanks = 8;
constexpr int kExpertsPerRank = 4;  // L
constexpr int kNumTokens = 128;     // T, on each rank; combines of at most 64 wait for all tiles before they send
constexpr int kNumTopk = 2;         // K
constexpr int kHidden = 1024;       // H
constexpr int kNumSteps = 4;
constexpr int kCombineSms = 8;  // multiprocessors that a rank's product leaves to the combine beside it
constexpr std::size_t kWeightSize = std::size_t{kHidden} * kHidden;  // of an expert

constexpr int kFragment = 16;  // rows, columns and depth of one product of a warp
constexpr int kTileRows = 32;
constexpr int kTileColumns = 64;
constexpr int kColumnTiles = kHidden / kTileColumns;
constexpr int kRowFragments = kTileRows / kFragment;
constexpr int kThreads = kTileColumns / kFragment * 32;  // a warp for each 16 columns of a tile
static_assert(kNumTokens % kTileRows == 0);              // so that the R * T rows of an expert's slab are whole tiles

// out[e] = rows[e] * weights[e] for each local expert e. Adds 1 to a tile's word for each kTileColumns of its columns,
// so its rows are final at kColumnTiles. Blocks take tiles in the order of their words, which end one after the other.
__global__ void __launch_bounds__(kThreads) multiply(const Bf16* rows,              // [L, C, H]
                                                     const Bf16* weights,           // [L, H, H]
                                                     Bf16* out,                     // [L, C, H]
                                                     const std::int32_t* num_rows,  // [L]
                                                     std::int32_t* words,           // [L, C / kTileRows]
                                                     int capacity) {                // C
  using namespace nvcuda;
  __shared__ alignas(32) float sums[kTileRows][kTileColumns];
  const int tiles_per_expert = capacity / kTileRows;
  const int warp_column = static_cast<int>(threadIdx.x) / 32 * kFragment;
  const int num_parts = kExpertsPerRank * tiles_per_expert * kColumnTiles;
  for (int part = static_cast<int>(blockIdx.x); part < num_parts; part += static_cast<int>(gridDim.x)) {
    const int word = part / kColumnTiles;
    const int expert = word / tiles_per_expert;
    const int first_row = word % tiles_per_expert * kTileRows;
    const int first_column = part % kColumnTiles * kTileColumns;
    if (first_row >= num_rows[expert]) continue;  // the combine does not wait for tiles without a row

    // The last tile may have rows behind the expert's last one. They hold anything, and their products are not read.
    const std::int64_t first = (std::int64_t{expert} * capacity + first_row) * kHidden;
    const Bf16* const column = weights + expert * kWeightSize + first_column + warp_column;
    wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float> c[kRowFragments];
    for (auto& fragment : c) wmma::fill_fragment(fragment, 0.0F);
    for (int k = 0; k < kHidden; k += kFragment) {
      wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, Bf16, wmma::row_major> b;
      wmma::load_matrix_sync(b, column + k * kHidden, kHidden);
      for (int r = 0; r < kRowFragments; ++r) {
        wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, Bf16, wmma::row_major> a;
        wmma::load_matrix_sync(a, rows + first + r * kFragment * kHidden + k, kHidden);
        wmma::mma_sync(c[r], a, b, c[r]);
      }
    }
    for (int r = 0; r < kRowFragments; ++r) {
      wmma::store_matrix_sync(&sums[r * kFragment][warp_column], c[r], kTileColumns, wmma::mem_row_major);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kTileColumns; i += kThreads) {
      const int row = i / kTileColumns;
      const int col = i % kTileColumns;
      out[first + row * kHidden + first_column + col] = __float2bfloat16(sums[row][col]);
    }
    // All threads have stored their part, and read `sums`, before one of them releases the part to the whole GPU.
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(words + word, 1);
    }
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

struct CudaFree {
  void operator()(void* data) const { cudaFree(data); }
};
template <typename T>
using DeviceArray = std::unique_ptr<T, CudaFree>;

template <typename T>
DeviceArray<T> zeros(std::size_t num) {
  void* data = nullptr;
  check(cudaMalloc(&data, num * sizeof(T)));
  DeviceArray<T> array(static_cast<T*>(data));
  check(cudaMemset(data, 0, num * sizeof(T)));
  return array;
}
template <typename T, typename Value>
DeviceArray<T> upload(std::span<const Value> values) {
  const std::vector<T> converted(values.begin(), values.end());
  DeviceArray<T> array = zeros<T>(values.size());
  check(cudaMemcpy(array.get(), converted.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return array;
}

// Numbers between -largest and largest that bf16 holds, so that host and GPU compute with the same.
std::vector<float> random_values(int seed, std::size_t num, float largest) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::uniform_real_distribution<float> uniform(-largest, largest);
  std::vector<float> values(num);
  for (float& value : values) value = __bfloat162float(__float2bfloat16(uniform(random)));
  return values;
}

// Makes the layer on one rank, several times, with the weights [E, H, H] of all experts. Returns whether all sums are
// those of the host.
bool run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap, int device, const std::vector<float>& weights) {
  const int rank = bootstrap->rank();
  const int num_experts = kExpertsPerRank * bootstrap->num_ranks();
  const int capacity = kNumTokens * bootstrap->num_ranks();  // C: enough if every token picks the same expert
  const std::vector<float> x = random_values(1 + rank, std::size_t{kNumTokens} * kHidden, 1);
  std::vector<std::int32_t> topk_idx;
  std::vector<float> topk_weights;
  std::mt19937 random(static_cast<unsigned>(rank));
  for (int token = 0; token < kNumTokens; ++token) {
    const auto first = static_cast<int>(random() % static_cast<unsigned>(num_experts));
    topk_idx.insert(topk_idx.end(), {first, (first + 1 + token % (num_experts - 1)) % num_experts});
    topk_weights.insert(topk_weights.end(), {0.75F, 0.25F});
  }
  std::vector<float> expected(x.size());
  for (std::size_t entry = 0; entry < topk_idx.size(); ++entry) {
    const std::size_t first = entry / kNumTopk * kHidden;
    const float* weight = weights.data() + static_cast<std::size_t>(topk_idx[entry]) * kWeightSize;
    for (std::size_t k = first; k < first + kHidden; ++k) {
      const float factor = topk_weights[entry] * x[k];
      for (std::size_t h = first; h < first + kHidden; ++h) expected[h] += factor * *weight++;
    }
  }

  // All memory is there before the group is created: cudaMalloc could wait for kernels that wait for other ranks.
  check(cudaSetDevice(device));
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  const std::size_t slab_rows = static_cast<std::size_t>(capacity) * kExpertsPerRank;
  const auto device_x = upload<Bf16>(std::span(x));
  const auto device_idx = upload<std::int32_t>(std::span(std::as_const(topk_idx)));
  const auto device_topk_weights = upload<float>(std::span(std::as_const(topk_weights)));
  const auto device_weights = upload<Bf16>(std::span(weights).subspan(
      static_cast<std::size_t>(rank) * kExpertsPerRank * kWeightSize, kExpertsPerRank * kWeightSize));
  const auto rows = zeros<Bf16>(slab_rows * kHidden);
  const auto results = zeros<Bf16>(slab_rows * kHidden);
  const auto words = zeros<std::int32_t>(slab_rows / kTileRows);
  const auto sums = zeros<Bf16>(kNumSteps * x.size());
  cudaStream_t stream = nullptr;
  cudaStream_t other = nullptr;
  cudaEvent_t zeroed = nullptr;
  cudaEvent_t sent = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  check(cudaEventCreateWithFlags(&zeroed, cudaEventDisableTiming));
  check(cudaEventCreateWithFlags(&sent, cudaEventDisableTiming));
  // The first kernel of a stream could wait for kernels of a rank that shares the GPU; this one has nothing to do.
  for (cudaStream_t one : {stream, other}) {
    multiply<<<1, kThreads, 0, one>>>(nullptr, nullptr, nullptr, nullptr, nullptr, 0);
    check(cudaGetLastError());
  }
  check(cudaDeviceSynchronize());

  const ferry::LatencyShape shape{.backend = "cuda",
                                  .num_ranks = bootstrap->num_ranks(),
                                  .max_tokens = kNumTokens,
                                  .num_topk = kNumTopk,
                                  .dispatch_row_bytes = kHidden * sizeof(Bf16),
                                  .combine_row_bytes = kHidden * sizeof(Bf16),
                                  .order = ferry::CombineOrder::kRankSums};
  ferry::GroupOptions group_options{.backend = "cuda", .timeout_ns = 30 * ferry::kNsPerSecond, .device = device};
  group_options.latency_bytes = ferry::latency_bytes_required(shape).value();
  const auto group = ferry::Group::create(bootstrap, group_options).value();
  ferry::LatencyDispatchInput send;
  send.x = {device_x.get(), ferry::DType::kBfloat16, {kNumTokens, kHidden}};
  send.topk_idx = {device_idx.get(), ferry::DType::kInt32, {kNumTokens, kNumTopk}};
  send.topk_weights = {device_topk_weights.get(), ferry::DType::kFloat32, {kNumTokens, kNumTopk}};
  ferry::LatencyDispatchOutput receive;
  receive.x = {rows.get(), ferry::DType::kBfloat16, {kExpertsPerRank, capacity, kHidden}};
  ferry::LatencyDispatchOptions options;
  options.num_experts = num_experts;
  options.max_tokens = kNumTokens;
  options.slab_capacity = capacity;
  ferry::LatencyCombineInput give_back;
  give_back.x = {results.get(), ferry::DType::kBfloat16, {kExpertsPerRank, capacity, kHidden}};
  give_back.signals.words = {words.get(), ferry::DType::kInt32, {kExpertsPerRank, capacity / kTileRows}};
  give_back.signals.tile_rows = kTileRows;
  give_back.signals.threshold = kColumnTiles;

  for (int step = 0; step < kNumSteps; ++step) {
    const ferry::Routing routing = group->latency_dispatch(send, receive, options, {stream}).value();
    const auto* num_rows = static_cast<const std::int32_t*>(routing.num_rows_per_local_expert_view().data);
    // Results of the step before become NaNs, so that a row that is sent too early shows in the sums.
    check(cudaMemsetAsync(results.get(), 0xFF, slab_rows * kHidden * sizeof(Bf16), stream));
    check(cudaMemsetAsync(words.get(), 0, slab_rows / kTileRows * sizeof(std::int32_t), stream));
    // The combine's stream waits for the zeros, not for the product, which is launched first and leaves it room.
    check(cudaEventRecord(zeroed, stream));
    check(cudaStreamWaitEvent(other, zeroed));
    multiply<<<std::max(1, num_sms - kCombineSms), kThreads, 0, stream>>>(
        rows.get(), device_weights.get(), results.get(), num_rows, words.get(), capacity);
    check(cudaGetLastError());
    ferry::LatencyCombineOutput take;
    take.x = {sums.get() + static_cast<std::size_t>(step) * x.size(), ferry::DType::kBfloat16, {kNumTokens, kHidden}};
    ferry::LatencyCombineOptions combine_options{.order = ferry::CombineOrder::kRankSums, .split = true};
    combine_options.kernel.num_sms = kCombineSms;
    ferry::throw_if_error(group->latency_combine(routing, give_back, take, {other}, combine_options));
    check(cudaEventRecord(sent, other));
    check(cudaStreamWaitEvent(stream, sent));
    ferry::throw_if_error(group->latency_receive(routing, {stream}));
  }
  ferry::throw_if_error(group->wait({stream}));  // reports any error of the calls above
  std::vector<Bf16> out(kNumSteps * x.size());
  check(cudaMemcpyAsync(out.data(), sums.get(), out.size() * sizeof(Bf16), cudaMemcpyDeviceToHost, stream));
  check(cudaStreamSynchronize(stream));
  ferry::throw_if_error(group->destroy());

  // Three roundings to bf16, by at most 2^-8 each for numbers below 2: of an expert's row, of a rank's sum, and of the
  // sum of those. Another 2^-8 is ample for the order of additions in f32. Errors of a missing row are much larger.
  constexpr float kTolerance = 4.0F / 256;
  std::size_t num_wrong = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool right = std::abs(__bfloat162float(out[i]) - expected[i % x.size()]) <= kTolerance;  // false for a NaN
    num_wrong += right ? 0 : 1;
  }
  std::printf("rank %d on GPU %d: %d layers, each combine beside its product, %zu of %zu sums are wrong\n", rank,
              device, kNumSteps, num_wrong, out.size());
  return num_wrong == 0;
}

}  // namespace

int main() {
  // Ranks that share a GPU must not wait for each other when CUDA loads kernels or runs out of queues.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  for (const ferry::BackendInfo& backend : ferry::backends()) {
    if (backend.name != "cuda" || backend.available) continue;
    std::printf("skipped: %s\n", backend.reason.c_str());
    return 0;
  }
  int num_gpus = 0;
  check(cudaGetDeviceCount(&num_gpus));
  const int num_ranks = std::clamp(num_gpus, 2, kMaxRanks);
  const auto num_experts = static_cast<std::size_t>(num_ranks) * kExpertsPerRank;
  const std::vector<float> weights = random_values(0, num_experts * kWeightSize, 1.0F / 32);  // sums stay below 2
  const auto bootstraps = ferry::create_in_process_bootstraps(num_ranks).value();
  std::atomic<int> num_right = 0;
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          if (run_rank(bootstraps[static_cast<std::size_t>(rank)], rank % num_gpus, weights)) ++num_right;
        } catch (const std::exception& error) {
          std::printf("rank %d: %s\n", rank, error.what());
        }
      });
    }
  }
  return num_right == num_ranks ? 0 : 1;
}
