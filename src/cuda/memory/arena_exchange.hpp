#ifndef FERRY_CUDA_MEMORY_ARENA_EXCHANGE_HPP
#define FERRY_CUDA_MEMORY_ARENA_EXCHANGE_HPP

/// Makes every rank's device memory accessible to all other ranks: at creation of a group, and as the arenas grow.

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

/// Address of a rank's arena, which outlives an exchange: the next one maps the arena of another process there. Neither
/// is set where that is not possible (kIpc), or not known yet.
struct PeerPlace {
  std::shared_ptr<PeerMapping> mapping;       ///< of another process, or of an absent rank
  std::shared_ptr<DeviceArena> same_process;  ///< of a rank of this process

  /// Size of its addresses, 0 if there are none.
  std::size_t size_bytes() const {
    if (same_process != nullptr) return same_process->size_bytes();
    return mapping != nullptr ? mapping->size_bytes() : 0;
  }
};
using PeerPlaces = std::vector<PeerPlace>;  ///< by rank

class ArenaExchange {
  struct Private {};  // lets only `create` construct

 public:
  /// Collective: succeeds on all ranks or fails on all. Ranks may share a GPU, be threads of one process, or both. Each
  /// arena serves one exchange at a time. `peers` must outlive the exchange, whose thread reads from their links.
  /// `places`: kept by the group. `head_bytes`: what other ranks may reach of an absent rank.
  /// @errors kUnsupported: two ranks' GPUs cannot reach each other; kTimeout, kPeerLost; kSystem, kCuda, kTransport
  static Result<std::unique_ptr<ArenaExchange>> create(const BackendContext& context, node::Peers& peers,
                                                       std::shared_ptr<DeviceArena> arena, PeerPlaces& places,
                                                       std::size_t head_bytes);

  ArenaExchange(Private, int rank, std::shared_ptr<DeviceArena> arena) : rank_(rank), arena_(std::move(arena)) {}
  /// Ends the thread, then unmaps the peers' memory, which no GPU work of this rank may still use. Growth of the arena
  /// is no longer announced.
  ~ArenaExchange();
  ArenaExchange(const ArenaExchange&) = delete;
  ArenaExchange& operator=(const ArenaExchange&) = delete;

  /// Address of the arena of `rank` on this rank's GPU, this rank's own included. Constant. Only memory that the owner
  /// has allocated may be used.
  std::byte* peer_base(int rank) const { return peers_[static_cast<std::size_t>(rank)].base; }
  /// Size of the address range of the arena of `rank`.
  std::size_t peer_size_bytes(int rank) const { return peers_[static_cast<std::size_t>(rank)].size_bytes; }

 private:
  struct Peer {
    std::byte* base = nullptr;
    std::size_t size_bytes = 0;
    PeerPlace place;  // keeps the memory alive while this rank may use it
  };

  struct Meeting {
    const BackendContext& context;
    const node::Peers& peers;
    const std::vector<ArenaAnnouncement>& announcements;
    PeerPlaces& places;
    std::size_t head_bytes = 0;
  };
  Status meet(const Meeting& meeting);
  /// Addresses for the arena of another process, or an absent one.
  Result<std::shared_ptr<PeerMapping>> place_of(const Meeting& meeting, int rank) const;
  Status adopt_bases(const node::Peers& peers);

  int rank_;
  std::shared_ptr<DeviceArena> arena_;
  std::vector<Peer> peers_;  // by rank, this rank included
  std::unique_ptr<ArenaService> service_;
  std::vector<const node::PeerLink*> shared_links_;  // links that the arena holds too
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_ARENA_EXCHANGE_HPP
