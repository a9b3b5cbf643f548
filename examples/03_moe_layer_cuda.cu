// The layer of the first example on GPUs: one rank per GPU, each a thread of this program; two ranks share the GPU if
// there is only one. All work is put on a stream; the host waits only for the counts of route and, at the end, for the
// result.
//
// Without a usable GPU it prints the reason and exits with 0.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr int kMaxRanks = 8;
constexpr int kExpertsPerRank = 2;
constexpr std::int64_t kNumTokens = 16;  // T, on each rank
constexpr std::int64_t kHidden = 64;     // H
constexpr std::int64_t kNumTopk = 2;     // K
constexpr int kThreads = 128;

// Stands in for the experts' matrix products: one block per expert, in place, on that expert's group of rows.
__global__ void run_experts(float* rows, const std::int64_t* row_offsets, int first_expert) {
  const auto factor = static_cast<float>(first_expert + static_cast<int>(blockIdx.x) + 1);
  const std::int64_t end = row_offsets[blockIdx.x + 1] * kHidden;
  for (std::int64_t i = row_offsets[blockIdx.x] * kHidden + threadIdx.x; i < end; i += kThreads) rows[i] *= factor;
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
DeviceArray<T> upload(const std::vector<T>& values) {
  void* data = nullptr;
  check(cudaMalloc(&data, values.size() * sizeof(T)));
  DeviceArray<T> array(static_cast<T*>(data));
  check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return array;
}

// The whole layer on one rank. Returns the largest difference from computing all experts locally.
float run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap, int device) {
  const int rank = bootstrap->rank();
  const std::int64_t num_experts = std::int64_t{kExpertsPerRank} * bootstrap->num_ranks();
  std::vector<float> x(kNumTokens * kHidden);
  std::vector<std::int64_t> topk_idx(kNumTokens * kNumTopk);
  std::vector<float> topk_weights(topk_idx.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i) + static_cast<float>(rank));
  for (std::size_t i = 0; i < topk_idx.size(); ++i) {
    topk_idx[i] = (3 * static_cast<std::int64_t>(i) + rank) % num_experts;
    topk_weights[i] = i % 2 == 0 ? 0.75F : 0.25F;
  }

  // Operations that may wait for the whole GPU (cudaMalloc, a first copy, loading a kernel) are done before the group
  // is created: once other ranks wait for this one inside kernels on the same GPU, such an operation would wait for
  // them.
  check(cudaSetDevice(device));
  cudaFuncAttributes loaded{};
  check(cudaFuncGetAttributes(&loaded, run_experts));
  const DeviceArray<float> device_x = upload(x);
  const DeviceArray<std::int64_t> device_idx = upload(topk_idx);
  const DeviceArray<float> device_weights = upload(topk_weights);
  const DeviceArray<float> device_out = upload(std::vector<float>(x.size()));
  cudaStream_t cuda_stream = nullptr;
  check(cudaStreamCreateWithFlags(&cuda_stream, cudaStreamNonBlocking));
  const ferry::Stream stream{cuda_stream};
  const auto group = ferry::Group::create(bootstrap, {.backend = "cuda", .device = device}).value();

  ferry::RouteInput choice;
  choice.topk_idx = {device_idx.get(), ferry::DType::kInt64, {kNumTokens, kNumTopk}};
  choice.topk_weights = {device_weights.get(), ferry::DType::kFloat32, {kNumTokens, kNumTopk}};
  ferry::RouteOptions options;
  options.num_experts = num_experts;
  options.layout = ferry::Layout::kExperts;
  const ferry::Routing routing = group->route(choice, options, stream).value();
  const std::int64_t num_rows = routing.num_recv_rows();

  // Symmetric memory: peers write the rows into it and later read them from it. All other memory is ordinary GPU
  // memory.
  const ferry::Buffer rows = group->allocate(static_cast<std::size_t>(num_rows * kHidden) * sizeof(float)).value();
  const ferry::TensorView rows_view(rows.data(), ferry::DType::kFloat32, {num_rows, kHidden});
  ferry::DispatchInput send;
  send.x = {device_x.get(), ferry::DType::kFloat32, {kNumTokens, kHidden}};
  ferry::DispatchOutput receive;
  receive.x = rows_view;
  ferry::throw_if_error(group->dispatch(routing, send, receive, stream));

  // The experts are queued on the same stream; the offsets of their rows are in GPU memory, too.
  const auto* offsets = static_cast<const std::int64_t*>(routing.expert_row_offsets_view().data);
  run_experts<<<kExpertsPerRank, kThreads, 0, cuda_stream>>>(static_cast<float*>(rows.data()), offsets,
                                                             routing.local_expert_ids()[0]);
  check(cudaGetLastError());

  ferry::CombineInput results;
  results.x = rows_view;
  ferry::CombineOutput sums;
  sums.x = {device_out.get(), ferry::DType::kFloat32, {kNumTokens, kHidden}};
  ferry::throw_if_error(group->combine(routing, results, sums, stream, {.weighted = true}));
  ferry::throw_if_error(group->wait(stream));  // reports any error of the calls above
  std::vector<float> out(x.size());
  check(cudaMemcpyAsync(out.data(), device_out.get(), out.size() * sizeof(float), cudaMemcpyDeviceToHost, cuda_stream));
  check(cudaStreamSynchronize(cuda_stream));
  ferry::throw_if_error(group->destroy());
  check(cudaStreamDestroy(cuda_stream));

  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    float expected = 0;
    for (std::size_t entry = i / kHidden * kNumTopk; entry < (i / kHidden + 1) * kNumTopk; ++entry) {
      expected += topk_weights[entry] * static_cast<float>(topk_idx[entry] + 1) * x[i];
    }
    worst = std::max(worst, std::abs(out[i] - expected));
  }
  std::printf("rank %d on GPU %d: %lld rows from all ranks, largest difference %g\n", rank, device,
              static_cast<long long>(num_rows), static_cast<double>(worst));
  return worst;
}

}  // namespace

int main() {
  for (const ferry::BackendInfo& backend : ferry::backends()) {
    if (backend.name != "cuda" || backend.available) continue;
    std::printf("skipped: %s\n", backend.reason.c_str());
    return 0;
  }
  int num_gpus = 0;
  check(cudaGetDeviceCount(&num_gpus));
  const int num_ranks = std::clamp(num_gpus, 2, kMaxRanks);
  const auto bootstraps = ferry::create_in_process_bootstraps(num_ranks).value();
  std::vector<float> worst(bootstraps.size());
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto idx = static_cast<std::size_t>(rank);
      ranks.emplace_back([&, rank, idx] { worst[idx] = run_rank(bootstraps[idx], rank % num_gpus); });
    }
  }
  constexpr float kTolerance = 1e-5F;  // sums of two numbers below 32: a few roundings of 2^-20 each
  return *std::max_element(worst.begin(), worst.end()) <= kTolerance ? 0 : 1;
}
