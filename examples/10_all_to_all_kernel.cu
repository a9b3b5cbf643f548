// An all-to-all in one kernel, without a library call on the host: every rank puts a part of its rows into the memory
// of every other rank and signals it, and uses received rows as soon as their signal has arrived. One rank per GPU,
// each a thread of this program; four ranks share the GPU if there is only one. Pass "nodes" to make every two ranks a
// node, joined by an emulated network: the kernel stays the same.
//
// Without a usable GPU it prints the reason and exits with 0.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/device/one_sided.cuh"
#include "ferry/ferry.hpp"

namespace {

constexpr int kNumRanks = 4;
constexpr unsigned kThreads = 256;
constexpr std::uint64_t kNumWords = 3000;  // from each rank to each

// Block b sends to rank (own + b), then uses the rows from rank (own - b).
__global__ void all_to_all(const __grid_constant__ ferry::device::World world, const std::uint64_t* send,
                           std::uint64_t* receive, std::uint64_t* came, std::uint64_t* sum) {
  using namespace ferry::device;
  const int step = static_cast<int>(blockIdx.x);
  const int to = (world.rank + step) % world.num_ranks;
  const int from = (world.rank + world.num_ranks - step) % world.num_ranks;
  const Code sent = put_signal<Scope::kBlock>(world, to, receive + world.rank * kNumWords, send + to * kNumWords,
                                              kNumWords * sizeof(*send), came + world.rank, 1, ferry::SignalOp::kSet);
  if (sent != Code::kOk) return;  // the host reports it by poll_errors, here and below
  if (wait_until<Scope::kBlock>(world, came + from, ferry::Comparison::kEqual, 1) != Code::kOk) return;
  std::uint64_t mine = 0;
  for (std::uint64_t i = threadIdx.x; i < kNumWords; i += kThreads) mine += receive[from * kNumWords + i];
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), mine);
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
void check(const ferry::Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}
template <typename T>
T check(ferry::Result<T> result) {
  check(result.status());
  return std::move(*result);
}

// Words that rank `from` sends to rank `to`.
std::uint64_t word(std::uint64_t from, std::uint64_t to, std::uint64_t i) { return from * 1'000'003 + to * 97 + i; }

void run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap, int device, int ranks_per_node) {
  check(cudaSetDevice(device));
  const auto rank = static_cast<std::uint64_t>(bootstrap->rank());
  std::vector<std::uint64_t> rows(kNumRanks * kNumWords);
  std::uint64_t expected = 0;
  for (std::uint64_t other = 0; other < kNumRanks; ++other) {
    for (std::uint64_t i = 0; i < kNumWords; ++i) {
      rows[other * kNumWords + i] = word(rank, other, i);
      expected += word(other, rank, i);
    }
  }
  std::uint64_t* send = nullptr;
  std::uint64_t* sum = nullptr;
  cudaStream_t stream = nullptr;
  check(cudaMalloc(&send, rows.size() * sizeof(std::uint64_t)));
  check(cudaMalloc(&sum, sizeof(*sum)));
  check(cudaMemcpy(send, rows.data(), rows.size() * sizeof(std::uint64_t), cudaMemcpyHostToDevice));
  check(cudaMemset(sum, 0, sizeof(*sum)));
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaDeviceSynchronize());

  // "loopback" joins threads of one process; omit it with ranks on several hosts.
  const auto shm = check(ferry::OneSided::create(
      bootstrap, {.backend = "cuda", .ranks_per_node = ranks_per_node, .transport = "loopback", .device = device}));
  // Runs a stream's first kernel before others may wait for it on a GPU that ranks share.
  check(shm->quiet({stream}));
  check(cudaStreamSynchronize(stream));
  const auto receive = check(shm->allocate<std::uint64_t>(rows.size()));
  const auto came = check(shm->allocate<std::uint64_t>(kNumRanks));
  all_to_all<<<kNumRanks, kThreads, 0, stream>>>(check(shm->device_world()), send, receive.data(), came.data(), sum);
  std::uint64_t got = 0;
  check(cudaMemcpyAsync(&got, sum, sizeof(got), cudaMemcpyDeviceToHost, stream));
  check(cudaStreamSynchronize(stream));
  check(shm->poll_errors());
  if (got != expected) throw std::runtime_error("a sum is wrong");
  check(shm->destroy());
  // Memory and stream end with the process: freeing them now could wait for ranks that share the GPU.
}

}  // namespace

int main(int argc, char** argv) {
  // Ranks that share a GPU must not wait for each other when CUDA loads kernels or runs out of queues.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int num_devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&num_devices); error != cudaSuccess || num_devices == 0) {
    std::printf("skipped: no GPU (%s)\n", cudaGetErrorString(error));
    return 0;
  }
  const int ranks_per_node = argc > 1 && std::string_view(argv[1]) == "nodes" ? 2 : kNumRanks;
  const auto bootstraps = check(ferry::create_in_process_bootstraps(kNumRanks));
  std::vector<std::string> errors(kNumRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto idx = static_cast<std::size_t>(rank);
      try {
        run_rank(bootstraps[idx], rank % num_devices, ranks_per_node);
      } catch (const std::exception& error) {
        errors[idx] = error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  bool failed = false;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    const std::string& error = errors[static_cast<std::size_t>(rank)];
    if (!error.empty()) std::printf("rank %d: %s\n", rank, error.c_str());
    failed = failed || !error.empty();
  }
  std::printf("%d ranks, %d a node: %s\n", kNumRanks, ranks_per_node, failed ? "FAILED" : "every row arrived");
  return failed ? 1 : 0;
}
