#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>

#include "gating_gpu.hpp"

namespace ferry::bench {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kUnroll = 4;

/// As a read at full speed is written: sixteen bytes a thread, four such loads on their way.
__global__ void read_kernel(const uint4* words, std::size_t count, unsigned* sink) {
  unsigned mixed = 0;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t at = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; at + (kUnroll - 1) * stride < count; at += kUnroll * stride) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) loaded[i] = words[at + i * stride];
#pragma unroll
    for (const uint4& word : loaded) mixed ^= word.x ^ word.y ^ word.z ^ word.w;
  }
  for (; at < count; at += stride) mixed ^= words[at].x ^ words[at].y ^ words[at].z ^ words[at].w;
  if (mixed == 0x9E3779B9U && sink != nullptr) *sink = mixed;  // never: keeps the loads
}

}  // namespace

void throw_if_cuda_error(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

void read_all(const float* values, std::size_t count, Stream stream) {
  int num_sms = 0;
  throw_if_cuda_error(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  constexpr std::size_t kWordValues = sizeof(uint4) / sizeof(float);
  constexpr unsigned kBlocksPerSm = 8;
  const std::size_t num_words = count / kWordValues;
  const auto most = static_cast<std::size_t>(num_sms) * kBlocksPerSm;
  const auto num_blocks = static_cast<unsigned>(std::clamp<std::size_t>(num_words / kThreads, 1, most));
  read_kernel<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(
      reinterpret_cast<const uint4*>(values), num_words, nullptr);
  throw_if_cuda_error(cudaGetLastError());
}

RotatedInput::RotatedInput(const std::vector<float>& values, int max_copies) : count_(values.size()) {
  constexpr std::size_t kRotatedBytes = std::size_t{256} << 20;  // several times the second-level cache
  const std::size_t bytes = count_ * sizeof(float);
  const std::size_t wanted = (kRotatedBytes + bytes - 1) / bytes;
  num_copies_ = static_cast<int>(std::min(wanted, static_cast<std::size_t>(max_copies)));
  throw_if_cuda_error(cudaMalloc(&data_, bytes * static_cast<std::size_t>(num_copies_)));
  for (int copy = 0; copy < num_copies_; ++copy) {
    void* const to = static_cast<float*>(data_) + static_cast<std::size_t>(copy) * count_;
    throw_if_cuda_error(cudaMemcpy(to, values.data(), bytes, cudaMemcpyHostToDevice));
  }
}

double time_in_graph_us(int num_calls, const std::function<void(int, Stream)>& call) {
  constexpr int kRounds = 10;
  cudaStream_t stream = nullptr;
  throw_if_cuda_error(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::array<cudaEvent_t, 2> events{};
  for (cudaEvent_t& event : events) throw_if_cuda_error(cudaEventCreate(&event));
  call(0, {stream});  // loads the kernel
  throw_if_cuda_error(cudaStreamSynchronize(stream));
  throw_if_cuda_error(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int turn = 0; turn < num_calls; ++turn) call(turn, {stream});
  cudaGraph_t graph = nullptr;
  throw_if_cuda_error(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t replay = nullptr;
  throw_if_cuda_error(cudaGraphInstantiate(&replay, graph, 0));
  double best_us = 0;
  for (int round = 0; round < kRounds; ++round) {
    throw_if_cuda_error(cudaEventRecord(events[0], stream));
    throw_if_cuda_error(cudaGraphLaunch(replay, stream));
    throw_if_cuda_error(cudaEventRecord(events[1], stream));
    throw_if_cuda_error(cudaStreamSynchronize(stream));
    float ms = 0;
    throw_if_cuda_error(cudaEventElapsedTime(&ms, events[0], events[1]));
    const double us = static_cast<double>(ms) * 1e3 / num_calls;
    best_us = round == 0 ? us : std::min(best_us, us);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  cudaStreamDestroy(stream);
  return best_us;
}

}  // namespace ferry::bench
