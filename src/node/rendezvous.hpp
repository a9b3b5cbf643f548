#ifndef FERRY_NODE_RENDEZVOUS_HPP
#define FERRY_NODE_RENDEZVOUS_HPP

/// Gives every rank every other rank's arena, at creation of a group.

#include <memory>
#include <vector>

#include "core/backend.hpp"
#include "node/arena.hpp"
#include "node/peer_link.hpp"

namespace ferry::node {

/// One rank as another sees it; also a rank's view of itself.
struct Peer {
  std::shared_ptr<ArenaMapping> arena;
  bool same_process = false;
  std::unique_ptr<PeerLink> link;  ///< null for ranks of this process
};

struct Rendezvous {
  std::shared_ptr<Arena> arena;  ///< this rank's own
  std::vector<Peer> peers;       ///< by rank, this rank included
};

/// Collective: succeeds on all ranks or fails on all.
Result<Rendezvous> rendezvous(const BackendContext& context);

}  // namespace ferry::node

#endif  // FERRY_NODE_RENDEZVOUS_HPP
