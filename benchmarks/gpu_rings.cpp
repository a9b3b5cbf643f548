/// The rings of GPU ranks without a network: how fast the blocks of a kernel fill a ring in pinned or GPU memory and
/// empty another at the same time, which is what a node's PCIe, its host memory and the ring's shape leave of the
/// network's rate. One GPU is both ends: a thread passes on what the kernel has filled, without its payload, and says
/// at once that it was used.
///
/// Prints JSON: for each number of blocks, chunk size and chunks of a ring the median time of an exchange of as many
/// items each way, and GB/s of one way.

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/internode/exchange_params.hpp"
#include "ferry/types.hpp"
#include "options.hpp"
#include "rail/rail_memory.hpp"

namespace {

namespace cuda = ferry::cuda;

struct Plan {
  std::int64_t num_items = 4096;
  std::int64_t row_bytes = 14'336;
  std::int64_t record_bytes = 64;
  std::vector<int> blocks_per_ring{1, 2, 4, 8};
  std::vector<std::size_t> chunk_bytes{std::size_t{128} << 10, std::size_t{512} << 10};
  std::size_t num_chunks = 16;
  bool one_way = false;
  bool gpu_memory = false;
  int num_iterations = 20;
};

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

struct FreeDevice {
  void operator()(std::byte* memory) const { cudaFree(memory); }
};
struct FreePinned {
  void operator()(std::byte* memory) const { cudaFreeHost(memory); }
};
using DeviceBytes = std::unique_ptr<std::byte, FreeDevice>;
using PinnedBytes = std::unique_ptr<std::byte, FreePinned>;

DeviceBytes take_device(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "taking GPU memory");
  DeviceBytes taken(static_cast<std::byte*>(memory));
  check(cudaMemset(memory, 0, bytes), "zeroing GPU memory");
  return taken;
}

PinnedBytes take_pinned(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "locking host memory");
  std::memset(memory, 0, bytes);
  return PinnedBytes(static_cast<std::byte*>(memory));
}

/// A rank of node 0, and what makes it believe in a rail peer in node 1.
class Rings {
 public:
  Rings(const Plan& plan, std::size_t chunk_bytes)
      : plan_(plan),
        arena_(take_device(cuda::Control::at(nullptr, 1).size_bytes)),
        state_(take_device(sizeof(cuda::RailState))),
        rows_(take_device(bytes_of(plan.row_bytes))),
        records_(take_device(bytes_of(plan.record_bytes))),
        to_rows_(take_device(bytes_of(plan.row_bytes))),
        to_records_(take_device(bytes_of(plan.record_bytes))),
        flows_(take_device(kNumNodes * sizeof(cuda::ItemFlow))),
        report_(take_pinned(sizeof(cuda::DeviceReport))),
        words_(take_pinned(kNumNodes * sizeof(ferry::net::RingWords))) {
    const std::size_t ring_bytes = plan.num_chunks * chunk_bytes;
    if (plan.gpu_memory) {
      gpu_chunks_ = take_device(ring_bytes);
    } else {
      chunks_in_ = take_pinned(ring_bytes);
      chunks_out_ = take_pinned(ring_bytes);
    }
    auto* const flows = reinterpret_cast<cuda::ItemFlow*>(flows_.get());
    params_.ranks.peer_bases[0] = arena_.get();
    params_.ranks.control = cuda::Control::at(arena_.get(), 1);
    params_.ranks.report = reinterpret_cast<cuda::DeviceReport*>(report_.get());
    params_.ranks.timeout_ns = params_.rail_timeout_ns = kTimeoutNs;
    params_.rails.num_nodes = kNumNodes;
    params_.rails.state = reinterpret_cast<cuda::RailState*>(state_.get());
    params_.rails.rings.words = reinterpret_cast<ferry::net::RingWords*>(words_.get());
    // In GPU memory both rings are one, since no thread copies headers there: a chunk is filled again once it was used.
    params_.rails.rings.chunks_in = plan.gpu_memory ? gpu_chunks_.get() : chunks_in_.get();
    params_.rails.rings.chunks_out = plan.gpu_memory ? gpu_chunks_.get() : chunks_out_.get();
    params_.rails.rings.num_chunks = plan.num_chunks;
    params_.rails.rings.chunk_bytes = chunk_bytes;
    params_.flows = flows;
    params_.row = {rows_.get(), plan.row_bytes, to_rows_.get(), plan.row_bytes, plan.row_bytes};
    params_.item_record = {records_.get(), plan.record_bytes, to_records_.get(), plan.record_bytes, plan.record_bytes};
    const auto num_items = static_cast<std::int32_t>(plan.num_items);
    const cuda::ItemFlow to_peer{0, num_items, 0, plan.one_way ? 0 : num_items};
    cuda::RailState& state = *params_.rails.state;
    constexpr std::uint32_t kValid = 1;
    check(cudaMemcpy(flows + kPeer, &to_peer, sizeof(to_peer), cudaMemcpyHostToDevice), "writing flows");
    check(cudaMemcpy(&state.gate.valid, &kValid, sizeof(kValid), cudaMemcpyHostToDevice), "opening the gate");
  }

  /// Median nanoseconds of an exchange.
  double time_ns(int blocks_per_ring) {
    params_.blocks_per_ring = blocks_per_ring;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    check(cudaEventCreate(&begin), "making an event");
    check(cudaEventCreate(&end), "making an event");
    std::atomic<bool> over{false};
    std::thread network([this, &over] {
      while (!over.load(std::memory_order_relaxed)) move();
    });
    std::vector<double> times_ns;
    cudaError_t error = cudaSuccess;
    for (int i = 0; i <= plan_.num_iterations && error == cudaSuccess; ++i) {
      float ms = 0;
      error = cudaEventRecord(begin);
      if (error == cudaSuccess) error = cuda::launch_rail_exchange(params_, nullptr);
      if (error == cudaSuccess) error = cudaEventRecord(end);
      if (error == cudaSuccess) error = cudaEventSynchronize(end);
      if (error == cudaSuccess) error = cudaEventElapsedTime(&ms, begin, end);
      if (i > 0) times_ns.push_back(1e6 * ms);
    }
    over = true;
    network.join();
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    check(error, "an exchange");
    if (reinterpret_cast<cuda::DeviceReport*>(report_.get())->lost.state != 0) {
      throw std::runtime_error("an exchange gave up waiting for the network");
    }
    const auto middle = times_ns.begin() + static_cast<std::ptrdiff_t>(times_ns.size() / 2);
    std::nth_element(times_ns.begin(), middle, times_ns.end());
    return *middle;
  }

 private:
  static constexpr int kNumNodes = 2;
  static constexpr int kPeer = 1;
  static constexpr std::uint64_t kTimeoutNs = 5'000'000'000;

  std::size_t bytes_of(std::int64_t item_bytes) const {
    return static_cast<std::size_t>(std::max<std::int64_t>(plan_.num_items * item_bytes, 1));
  }

  /// Work of a proxy without the payload: a chunk keeps its old bytes, and only its header is the one that was sent.
  void move() {
    ferry::net::RingWords& words = params_.rails.rings.words[kPeer];
    const auto load = [](std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); };
    const std::uint64_t num_moved = num_moved_;
    while (ferry::net::is_filled(load(words.filled[num_moved_ % plan_.num_chunks]), num_moved_)) {
      const std::size_t offset = num_moved_ % plan_.num_chunks * params_.rails.rings.chunk_bytes;
      if (!plan_.gpu_memory && !plan_.one_way) {
        std::memcpy(chunks_in_.get() + offset, chunks_out_.get() + offset, ferry::rail::kChunkHeaderBytes);
      }
      ++num_moved_;
    }
    if (num_moved_ != num_moved) {
      std::atomic_ref(plan_.one_way ? words.credits : words.arrived).store(num_moved_, std::memory_order_release);
    }
    std::uint64_t used = words.credits;
    if (plan_.one_way) return;
    while (load(words.used[used % plan_.num_chunks]) == used + 1) ++used;
    if (used != words.credits) std::atomic_ref(words.credits).store(used, std::memory_order_release);
  }

  const Plan& plan_;
  DeviceBytes arena_;
  DeviceBytes state_;
  DeviceBytes rows_;
  DeviceBytes records_;
  DeviceBytes to_rows_;
  DeviceBytes to_records_;
  DeviceBytes flows_;
  PinnedBytes report_;
  PinnedBytes words_;
  PinnedBytes chunks_in_;
  PinnedBytes chunks_out_;
  DeviceBytes gpu_chunks_;
  cuda::ExchangeParams params_;
  std::uint64_t num_moved_ = 0;
};

nlohmann::json measure(const Plan& plan) {
  nlohmann::json results = nlohmann::json::array();
  for (const std::size_t chunk_bytes : plan.chunk_bytes) {
    Rings rings(plan, chunk_bytes);
    for (const int blocks : plan.blocks_per_ring) {
      const double time_ns = rings.time_ns(blocks);
      const auto bytes = static_cast<double>(plan.num_items * (plan.row_bytes + plan.record_bytes));
      results.push_back({{"blocks_per_ring", blocks},
                         {"chunk_bytes", chunk_bytes},
                         {"num_chunks", plan.num_chunks},
                         {"time_us", time_ns / 1e3},
                         {"gbps_one_way", bytes / time_ns}});
    }
  }
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "asking for the GPU");
  return {{"gpu", device.name},
          {"items", plan.num_items},
          {"item_bytes", plan.row_bytes + plan.record_bytes},
          {"ways", plan.one_way ? 1 : 2},
          {"chunk_memory", plan.gpu_memory ? "gpu" : "host"},
          {"results", results}};
}

}  // namespace

int main(int argc, char** argv) try {
  Plan plan;
  ferry::benchmarks::Options options("The rings of GPU ranks without a network");
  options.add("--items", plan.num_items, "Each way", {{1, 1 << 20}});
  options.add("--row-bytes", plan.row_bytes, "Payload of an item, a multiple of 16", {{16, 1 << 20}});
  options.add("--record-bytes", plan.record_bytes, "Record of an item, a multiple of 16", {{0, 1 << 12}});
  options.add("--blocks", plan.blocks_per_ring, "At each ring");
  options.add("--chunk-bytes", plan.chunk_bytes, "A multiple of 128");
  options.add("--chunks", plan.num_chunks, "Chunks of a ring", {{1, ferry::net::kMaxRingChunks}});
  options.add_flag("--one-way", plan.one_way, "Fill a ring, and empty none");
  options.add_flag("--gpu-memory", plan.gpu_memory, "Chunks in GPU memory; the same for both rings");
  options.add("--iterations", plan.num_iterations, "Timed runs of each shape", {{1, 100'000}});
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  std::puts(measure(plan).dump(2).c_str());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "gpu_rings: %s\n", error.what());
  return 1;
}
