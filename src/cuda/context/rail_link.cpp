#include "cuda/context/rail_link.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/memory/card_memory.hpp"
#include "net/numa.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

std::size_t words_bytes(int num_nodes) { return node::round_up_to_page(to_size(num_nodes) * sizeof(net::RingWords)); }

}  // namespace

Result<RingMemory> RingMemory::create(const Topology& topology, int numa_node) {
  const rail::RingShape shape = rail::kernel_ring_shape(to_size(topology.num_nodes()));
  const std::size_t rails_bytes = rail::Rails::memory_bytes(topology, shape);
  const std::size_t words = words_bytes(topology.num_nodes());
  const net::PreferNode prefer(numa_node);
  Result<PinnedBlock> block = take_pinned(words + rails_bytes, numa_node);
  if (!block.ok()) return block.status();
  RingMemory memory;
  memory.block = std::move(*block);
  memory.words = reinterpret_cast<net::RingWords*>(memory.block.data.get());
  memory.rails_memory = {memory.block.data.get() + words, rails_bytes};
  return memory;
}

Result<RingMemory> RingMemory::create_in_gpu(const Topology& topology, int device, int numa_node) {
  const rail::RingShape shape = rail::gpu_ring_shape(to_size(topology.num_nodes()));
  const std::size_t rings_bytes = rail::Rails::rings_bytes(topology, shape);
  RingMemory memory;
  const Result<bool> in_order = cards_write_in_order(device);
  if (!in_order.ok()) return in_order.status();
  memory.read_back_writes = !*in_order;
  Result<std::shared_ptr<std::byte>> gpu = take_card_memory(device, rings_bytes);
  if (!gpu.ok()) return gpu.status();
  memory.gpu = std::move(*gpu);
  memory.rails_memory = {memory.gpu.get(), rings_bytes};
  const net::PreferNode prefer(numa_node);
  const std::size_t words = words_bytes(topology.num_nodes());
  const std::size_t host_bytes =
      rail::Rails::memory_bytes(topology, rail::default_ring_shape(to_size(topology.num_nodes())));
  Result<PinnedBlock> block = take_pinned(2 * words + host_bytes, numa_node);
  if (!block.ok()) return block.status();
  memory.block = std::move(*block);
  std::byte* const base = memory.block.data.get();
  memory.words = reinterpret_cast<net::RingWords*>(base);
  memory.host_words = reinterpret_cast<net::RingWords*>(base + words);
  memory.host_memory = {base + 2 * words, host_bytes};
  return memory;
}

RailLink::RailLink(call::CallSync& sync, RingMemory memory, std::int64_t poll_ns)
    : sync_(sync), memory_(std::move(memory)), rest_(poll_ns, std::chrono::nanoseconds(kLookInterval).count()) {}

Status RailLink::start(TableMemory& tables, cudaStream_t stream) {
  constexpr std::string_view kPreparing = "Group::create: preparing the rings between nodes";
  const RelaxedCapture relaxed;
  Result<std::shared_ptr<std::byte>> state = tables.take(sizeof(RailState));
  if (!state.ok()) return state.status();
  state_ = *state;
  Result<std::shared_ptr<std::byte>> log = tables.take(sizeof(RailLog));
  if (!log.ok()) return log.status();
  log_ = *log;
  Status status = runtime_status(cudaMemsetAsync(state_.get(), 0, sizeof(RailState), stream), kPreparing);
  if (status.ok()) status = runtime_status(cudaMemsetAsync(log_.get(), 0, sizeof(RailLog), stream), kPreparing);
  if (status.ok()) status = runtime_status(cudaStreamSynchronize(stream), kPreparing);
  if (!status.ok()) return status;
  constexpr std::size_t kFaults = 3;
  Result<PinnedBlock> found = take_pinned(kFaults * to_size(sync_.topology().num_ranks) * sizeof(FoundRecord));
  if (!found.ok()) return found.status();
  found_ = std::move(*found);

  rail::Rails& rails = sync_.rails();
  params_.node = rails.node();
  params_.num_nodes = rails.num_nodes();
  params_.state = reinterpret_cast<RailState*>(state_.get());
  params_.log = reinterpret_cast<RailLog*>(log_.get());
  params_.rings = rings_of(rails.chunks(), memory_.words, in_gpu_memory());
  if (in_gpu_memory()) params_.call_rings = rings_of(rails.host_chunks(), memory_.host_words, false);
  return {};
}

/// The rings as kernels address them.
RailRings RailLink::rings_of(const rail::Rails::Chunks& chunks, net::RingWords* words, bool in_gpu) const {
  const std::ptrdiff_t to_kernels = memory_.block.kernel_view - memory_.block.data.get();
  const std::ptrdiff_t chunks_to_kernels = in_gpu ? 0 : to_kernels;
  return {.words = reinterpret_cast<net::RingWords*>(reinterpret_cast<std::byte*>(words) + to_kernels),
          .chunks_in = chunks.in + chunks_to_kernels,
          .chunks_out = chunks.out + chunks_to_kernels,
          .num_chunks = chunks.shape.num_chunks,
          .chunk_bytes = chunks.shape.chunk_bytes};
}

FoundRecord* RailLink::found_at(std::byte* base, FaultOf fault) const {
  return reinterpret_cast<FoundRecord*>(base) + static_cast<int>(fault) * sync_.topology().num_ranks;
}

std::uint64_t RailLink::sum_of_words() const {
  std::uint64_t sum = 0;
  for (const int node : sync_.rails().peer_nodes()) {
    for (net::RingWords* of_rings : {memory_.words, memory_.host_words}) {
      if (of_rings == nullptr) continue;
      net::RingWords& words = of_rings[node];
      const auto add = [&sum](std::uint64_t& word) { sum += std::atomic_ref(word).load(std::memory_order_relaxed); };
      std::ranges::for_each(words.filled, add);
      std::ranges::for_each(words.used, add);
      add(words.arrived);
      add(words.credits);
    }
  }
  return sum;
}

void RailLink::look() {
  const rail::Rest::Decision decision = rest_.look(sum_of_words());
  if (decision != rail::Rest::Decision::kNone) sync_.rails().keep_polling(decision == rail::Rest::Decision::kPoll);
}

}  // namespace ferry::cuda
