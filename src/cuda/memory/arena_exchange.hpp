#ifndef FERRY_CUDA_MEMORY_ARENA_EXCHANGE_HPP
#define FERRY_CUDA_MEMORY_ARENA_EXCHANGE_HPP

/// Makes every rank's device memory accessible to all others: at creation of a group, and as the arenas grow.

#include <cstddef>
#include <memory>
#include <vector>

#include "core/backend_context.hpp"
#include "cuda/memory/arena_service.hpp"
#include "cuda/memory/device_arena.hpp"
#include "cuda/memory/peer_mapping.hpp"
#include "ferry/status.hpp"
#include "node/peers.hpp"

namespace ferry::cuda {

struct ArenaAnnouncement;  // private

class ArenaExchange {
  struct Private {};  // lets only `create` construct

 public:
  /// Collective: succeeds on all ranks or fails on all. Ranks may share a GPU, be threads of one process, or both. Each
  /// arena serves one exchange. `peers` must outlive the exchange, whose thread reads from their links.
  /// @errors kUnsupported: two ranks' GPUs cannot reach each other; kTimeout, kPeerLost; kSystem, kCuda, kTransport
  static Result<std::unique_ptr<ArenaExchange>> create(const BackendContext& context, node::Peers& peers,
                                                       std::shared_ptr<DeviceArena> arena);

  ArenaExchange(Private, int rank, std::shared_ptr<DeviceArena> arena) : rank_(rank), arena_(std::move(arena)) {}
  /// Ends the thread, then unmaps the peers: none of this rank's work on the GPU may still touch their memory.
  /// Growth of the arena is no longer announced.
  ~ArenaExchange();
  ArenaExchange(const ArenaExchange&) = delete;
  ArenaExchange& operator=(const ArenaExchange&) = delete;

  /// Where this rank's GPU sees the arena of `rank`; this rank's own included. Never changes. Only what its owner has
  /// allocated may be touched.
  std::byte* peer_base(int rank) const { return peers_[static_cast<std::size_t>(rank)].base; }
  /// Size of that arena's address range.
  std::size_t peer_size_bytes(int rank) const { return peers_[static_cast<std::size_t>(rank)].size_bytes; }

 private:
  struct Peer {
    std::byte* base = nullptr;
    std::size_t size_bytes = 0;
    std::shared_ptr<DeviceArena> same_process;  // keeps the memory alive while this rank may touch it
    std::unique_ptr<PeerMapping> mapping;       // other processes
  };

  Status meet(const node::Peers& peers, const std::vector<ArenaAnnouncement>& announcements,
              const ArenaService::Options& options);
  Status adopt_bases(const node::Peers& peers);

  int rank_;
  std::shared_ptr<DeviceArena> arena_;
  std::vector<Peer> peers_;  // by rank, this rank included
  std::unique_ptr<ArenaService> service_;
  std::vector<const node::PeerLink*> shared_links_;  // those that the arena holds too
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_ARENA_EXCHANGE_HPP
