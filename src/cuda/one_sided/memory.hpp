#ifndef FERRY_CUDA_ONE_SIDED_MEMORY_HPP
#define FERRY_CUDA_ONE_SIDED_MEMORY_HPP

/// Memory of a OneSided whose ranks have GPUs. If all ranks are in one node, symmetric memory is GPU memory. With
/// several nodes it is locked host memory, which every network and every GPU of the node reaches. Only processors
/// change words there, because a GPU's atomics on host memory are atomic only for that GPU.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/driver/own_stream.hpp"
#include "cuda/memory/arena_exchange.hpp"
#include "cuda/memory/device_arena.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "ferry/device/world.hpp"
#include "one_sided/backend.hpp"
#include "one_sided/fabric.hpp"
#include "one_sided/ring_source.hpp"

namespace ferry::cuda {

class OneSidedMemory {
 public:
  /// Collective: succeeds on all ranks or fails on all.
  static Result<std::unique_ptr<OneSidedMemory>> create(const one_sided::Context& context);

  OneSidedMemory() = default;
  OneSidedMemory(const OneSidedMemory&) = delete;
  OneSidedMemory& operator=(const OneSidedMemory&) = delete;

  int device() const { return device_; }
  unsigned num_sms() const { return num_sms_; }
  cudaStream_t stream() const { return stream_->get(); }
  one_sided::Fabric& fabric() { return *fabric_; }
  const ::ferry::device::World& world() const { return world_; }
  std::byte* heap() const { return world_.heap; }
  std::size_t heap_bytes() const { return world_.heap_bytes; }
  /// Address of the heap of `rank` on this rank's GPU; null if the GPU cannot reach it.
  std::byte* peer_heap(int rank) const;
  bool is_on_host() const { return !world_.gpu_words; }

  /// The team in the form that kernels take. Any thread, but one at a time for a team requested for the first time.
  Result<::ferry::device::TeamView> view_of(const one_sided::TeamState& team);

  /// Error record in pinned memory.
  ::ferry::device::ErrorRecord& errors() { return *errors_; }
  /// Address at which a kernel leaves a result for the host, and the host's address of it.
  std::uint64_t* result_of_kernels() const { return on_device(result_); }
  const std::uint64_t& result() const { return *result_; }

  /// Options of the ring that the proxy reads; without slots if all ranks are in one node.
  one_sided::RingSource::Options ring_options() const;

 private:
  Status examine_device(int wanted);
  Status make_local_parts(const one_sided::Context& context);
  Status adopt_heaps(const one_sided::Context& context);
  Status upload(void* to, const void* from, std::size_t num_bytes, std::string_view what);
  template <typename T>
  T* on_device(T* host) const {
    return reinterpret_cast<T*>(pinned_.kernel_view + (reinterpret_cast<std::byte*>(host) - pinned_.data.get()));
  }

  int device_ = 0;
  unsigned num_sms_ = 1;
  std::size_t total_bytes_ = 0;  // symmetric memory: the heap, followed by the words of barriers
  std::shared_ptr<OwnStream> stream_;
  PinnedBlock pinned_;
  ::ferry::device::ErrorRecord* errors_ = nullptr;  // in pinned_, as is the next
  std::uint64_t* result_ = nullptr;
  one_sided::RequestRingMemory ring_;
  std::byte* staging_ = nullptr;
  std::size_t staging_bytes_ = 0;
  std::unique_ptr<one_sided::Fabric> fabric_;
  std::vector<std::shared_ptr<std::byte>> registered_;  // memory of the fabric
  std::shared_ptr<DeviceArena> arena_;
  std::unique_ptr<ArenaExchange> exchange_;  // with one node
  std::vector<std::byte*> peer_heaps_;       // by index in the node
  // Tables of kernels in the arena, by team.
  std::uint64_t* epochs_ = nullptr;
  ::ferry::device::TeamMate* team_mates_ = nullptr;  // [kMaxTeams][R]
  std::vector<bool> has_mates_;
  ::ferry::device::World world_;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_MEMORY_HPP
