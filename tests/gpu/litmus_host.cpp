#include "gpu/litmus_host.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace ferry::test {
namespace {

constexpr std::chrono::seconds kDeadline{60};
constexpr std::chrono::microseconds kPollInterval{50};

}  // namespace

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

int num_litmus_gpus() {
  // A kernel that is loaded at its first launch may wait until the one that waits for it has ended.
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

bool connect_gpus(int one, int other) {
  for (const auto& [from, to] : {std::pair(one, other), std::pair(other, one)}) {
    int reachable = 0;
    check_cuda(cudaDeviceCanAccessPeer(&reachable, from, to), "cudaDeviceCanAccessPeer");
    if (reachable == 0) return false;
    check_cuda(cudaSetDevice(from), "cudaSetDevice");
    const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      check_cuda(error, "cudaDeviceEnablePeerAccess");
    }
  }
  return true;
}

GpuBytes::GpuBytes(int gpu, std::size_t num_bytes) {
  check_cuda(cudaSetDevice(gpu), "cudaSetDevice");
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, num_bytes), "cudaMalloc");
  data_ = static_cast<std::byte*>(data);
  check_cuda(cudaMemset(data_, 0, num_bytes), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

GpuBytes::~GpuBytes() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

GpuBytes::GpuBytes(GpuBytes&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}

void GpuBytes::read(void* to, std::size_t num_bytes) const {
  check_cuda(cudaMemcpy(to, data_, num_bytes, cudaMemcpyDeviceToHost), "copy from the GPU");
}

void GpuBytes::write(const void* from, std::size_t num_bytes) const {
  check_cuda(cudaMemcpy(data_, from, num_bytes, cudaMemcpyHostToDevice), "copy to the GPU");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

GpuStream::GpuStream(int gpu) : gpu_(gpu) {
  check_cuda(cudaSetDevice(gpu), "cudaSetDevice");
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
}

GpuStream::~GpuStream() {
  if (event_ != nullptr) (void)cudaEventDestroy(event_);
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

GpuStream::GpuStream(GpuStream&& other) noexcept
    : gpu_(other.gpu_), stream_(std::exchange(other.stream_, nullptr)), event_(std::exchange(other.event_, nullptr)) {}

cudaStream_t GpuStream::enter() const {
  check_cuda(cudaSetDevice(gpu_), "cudaSetDevice");
  return stream_;
}

void finish(std::initializer_list<const GpuStream*> streams) { finish(std::vector<const GpuStream*>(streams)); }

void finish(const std::vector<const GpuStream*>& streams) {
  for (const GpuStream* one : streams) check_cuda(cudaEventRecord(one->event_, one->enter()), "cudaEventRecord");
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  for (const GpuStream* one : streams) {
    cudaError_t state = cudaEventQuery(one->event_);
    for (; state == cudaErrorNotReady; state = cudaEventQuery(one->event_)) {
      if (std::chrono::steady_clock::now() >= deadline) {
        (void)std::fprintf(stderr, "[  FAILED  ] a kernel did not end within %d s\n",
                           static_cast<int>(kDeadline.count()));
        (void)std::fflush(nullptr);
        std::_Exit(1);
      }
      std::this_thread::sleep_for(kPollInterval);
    }
    check_cuda(state, "kernels of a litmus test");
  }
}

LitmusRanks::LitmusRanks(const std::vector<int>& gpus, std::chrono::nanoseconds timeout) : timeout_(timeout) {
  const std::size_t num_bytes = cuda::Control::at(nullptr, gpus.size()).size_bytes;
  std::vector<std::byte*> bases;
  for (int gpu : gpus) bases.push_back(arenas_.emplace_back(gpu, num_bytes).data());
  bases_ = bases;
  void* reports = nullptr;
  check_cuda(cudaHostAlloc(&reports, gpus.size() * sizeof(cuda::DeviceReport), cudaHostAllocPortable), "cudaHostAlloc");
  reports_ = static_cast<cuda::DeviceReport*>(reports);
  for (std::size_t rank = 0; rank < gpus.size(); ++rank) reports_[rank] = {};
}

LitmusRanks::~LitmusRanks() { (void)cudaFreeHost(reports_); }

cuda::Control LitmusRanks::control(int rank) const {
  return cuda::Control::at(arenas_[static_cast<std::size_t>(rank)].data(), arenas_.size());
}

cuda::RankParams LitmusRanks::params(int rank) const {
  cuda::RankParams ranks;
  ranks.rank = rank;
  ranks.num_ranks = static_cast<int>(arenas_.size());
  std::copy(bases_.begin(), bases_.end(), std::begin(ranks.peer_bases));
  ranks.control = control(rank);
  ranks.report = &reports_[rank];  // the same address for hosts and GPUs, with unified addressing
  ranks.timeout_ns = static_cast<std::uint64_t>(timeout_.count());
  return ranks;
}

cuda::LocalState LitmusRanks::local(int rank) const {
  cuda::LocalState local;
  check_cuda(cudaMemcpy(&local, control(rank).local, sizeof(local), cudaMemcpyDeviceToHost), "copy of LocalState");
  return local;
}

std::uint64_t LitmusRanks::progress(int rank, int sender) const {
  std::uint64_t word = 0;
  check_cuda(cudaMemcpy(&word, control(rank).progress + sender, sizeof(word), cudaMemcpyDeviceToHost), "copy");
  return word;
}

void LitmusRanks::set_progress(int rank, int sender, std::uint64_t value) const {
  check_cuda(cudaMemcpy(control(rank).progress + sender, &value, sizeof(value), cudaMemcpyHostToDevice), "progress");
}

void LitmusRanks::set_done(int rank, int sender, std::uint64_t epoch) const {
  check_cuda(cudaMemcpy(control(rank).done + sender, &epoch, sizeof(epoch), cudaMemcpyHostToDevice), "done");
}

}  // namespace ferry::test
