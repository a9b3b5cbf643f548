#ifndef FERRY_CUDA_CONTEXT_RAIL_LINK_HPP
#define FERRY_CUDA_CONTEXT_RAIL_LINK_HPP

/// Memory that a rank's kernels share with its network and its host, in groups of several nodes: rings that the proxy
/// serves, with words in pinned memory and chunks there or in GPU memory; and the records of calls that were refused.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "call/call_sync.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "cuda/memory/table_memory.hpp"
#include "cuda/sync/rail_params.hpp"
#include "rail/rest.hpp"

namespace ferry::cuda {

/// Memory of the rings, allocated before the group exists.
struct RingMemory {
  PinnedBlock block;
  net::RingWords* words = nullptr;    ///< [nodes], in the block, as is the next
  std::span<std::byte> rails_memory;  ///< all memory that the network moves
  // With chunks in GPU memory: the hosts' rings, whose kernels' part are call headers, in the block too.
  net::RingWords* host_words = nullptr;
  std::span<std::byte> host_memory{};
  /// `numa_node`: of the rank's GPU, -1 if any node will do.
  static Result<RingMemory> create(const Topology& topology, int numa_node);

  /// Variant with chunks in memory of `device` that network cards reach, separate from all other memory.
  static Result<RingMemory> create_in_gpu(const Topology& topology, int device, int numa_node);
  std::shared_ptr<std::byte> gpu{};
  bool read_back_writes = false;  ///< !cards_write_in_order
};

/// Time between two looks of the watch, as often as hosts that wait look at their peers (src/call): a poll(2) for each
/// peer in another process, which is a few thousandths of a core.
inline constexpr std::chrono::milliseconds kLookInterval{20};

class RailLink {
 public:
  /// The network polls for `poll_ns` after the last movement of the rings; negative: always.
  RailLink(call::CallSync& sync, RingMemory memory, std::int64_t poll_ns);
  RailLink(const RailLink&) = delete;
  RailLink& operator=(const RailLink&) = delete;

  /// Prepares the memory that kernels use; `stream`: for zeroing.
  Status start(TableMemory& tables, cudaStream_t stream);
  const RailParams& params() const { return params_; }
  /// Whether chunks of the rings are in GPU memory.
  bool in_gpu_memory() const { return memory_.gpu != nullptr; }
  /// net::EngineOptions::read_back_gpu_writes, of this rank's GPU.
  bool reads_back_writes() const { return memory_.read_back_writes; }

  /// Sets of records that accompany a fault. A route, whose host waits, has a set of its own, since an earlier fault
  /// may not have been read.
  enum class FaultOf { kAnyCall, kRoute, kLatency };
  const FoundRecord* found(FaultOf fault) const { return found_at(found_.data.get(), fault); }
  FoundRecord* found_of_kernels(FaultOf fault) const { return found_at(found_.kernel_view, fault); }

  /// Wakes the network, because kernels are about to use the rings and cannot wake it.
  void wake() { sync_.rails().keep_polling(true); }
  /// Lets the network sleep after the rings have been idle for a while, and wakes it when they move again, as in
  /// replays of a graph. Called by the watch, every kLookInterval.
  void look();

 private:
  std::uint64_t sum_of_words() const;
  RailRings rings_of(const rail::Rails::Chunks& chunks, net::RingWords* words, bool in_gpu) const;
  FoundRecord* found_at(std::byte* base, FaultOf fault) const;

  call::CallSync& sync_;
  RingMemory memory_;
  PinnedBlock found_;
  RailParams params_;
  std::shared_ptr<std::byte> state_;
  std::shared_ptr<std::byte> log_;
  rail::Rest rest_;  // used by the watch's thread only
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_RAIL_LINK_HPP
