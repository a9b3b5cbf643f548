#ifndef FERRY_NODE_RENDEZVOUS_HPP
#define FERRY_NODE_RENDEZVOUS_HPP

/// Gives every rank the arena of every other rank of its node, at creation of a group.

#include <memory>
#include <string_view>
#include <vector>

#include "core/backend_context.hpp"
#include "core/rank_place.hpp"
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
  std::shared_ptr<Arena> arena;   ///< this rank's own
  std::vector<Peer> peers;        ///< the ranks of this node in order, this rank included
  std::vector<RankPlace> places;  ///< of all ranks of the group
};

/// Collective over all ranks of all nodes: succeeds on all ranks or fails on all. `network_address` is published to all
/// as this rank's RankPlace::address; at most 63 characters, longer ones count as not known.
Result<Rendezvous> rendezvous(const BackendContext& context, std::string_view network_address);

}  // namespace ferry::node

#endif  // FERRY_NODE_RENDEZVOUS_HPP
