#ifndef FERRY_CUDA_CONTEXT_RAIL_LINK_HPP
#define FERRY_CUDA_CONTEXT_RAIL_LINK_HPP

/// What the kernels of a rank share with its network and its host, in groups of several nodes: rings, which the proxy
/// serves, with words in pinned memory and chunks there or in GPU memory; and the records of calls that were refused.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "call/call_sync.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "cuda/memory/table_memory.hpp"
#include "cuda/sync/rail_params.hpp"

namespace ferry::cuda {

/// The memory of the rings, before there is a group.
struct RingMemory {
  PinnedBlock block;
  net::RingWords* words = nullptr;    ///< [nodes], in the block, as is the next
  std::span<std::byte> rails_memory;  ///< of all that the network moves
  static Result<RingMemory> create(const Topology& topology);

  /// Chunks in memory of `device` that network cards reach, apart from all else.
  static Result<RingMemory> create_in_gpu(const Topology& topology, int device);
  std::shared_ptr<std::byte> gpu{};
  std::function<Status()> make_visible{};  ///< card_write_flush
};

class RailLink {
 public:
  RailLink(call::CallSync& sync, RingMemory memory) : sync_(sync), memory_(std::move(memory)) {}
  RailLink(const RailLink&) = delete;
  RailLink& operator=(const RailLink&) = delete;

  /// Prepares what kernels use; `stream`: for zeroing.
  Status start(TableMemory& tables, cudaStream_t stream);
  const RailParams& params() const { return params_; }

  /// The records that come with a fault. A route, whose host waits, has its own, since a fault before may not have been
  /// read.
  enum class FaultOf { kAnyCall, kRoute };
  const FoundRecord* found(FaultOf fault) const { return found_at(found_.data.get(), fault); }
  FoundRecord* found_of_kernels(FaultOf fault) const { return found_at(found_.kernel_view, fault); }

  /// Kernels are about to use the rings: the network must look, since they cannot wake it.
  void wake() { sync_.rails().keep_polling(true); }
  /// Lets the network sleep when the rings have been still for a while, and wakes it when they move again, as they do
  /// in a graph's replays. For the watch.
  void look();

 private:
  std::uint64_t sum_of_words() const;
  FoundRecord* found_at(std::byte* base, FaultOf fault) const;

  call::CallSync& sync_;
  RingMemory memory_;
  PinnedBlock found_;
  RailParams params_;
  std::shared_ptr<std::byte> state_;
  std::shared_ptr<std::byte> log_;
  // Of the watch.
  std::uint64_t last_sum_ = 0;
  int num_still_looks_ = 0;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_RAIL_LINK_HPP
