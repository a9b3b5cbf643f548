#ifndef FERRY_NODE_RENDEZVOUS_HPP
#define FERRY_NODE_RENDEZVOUS_HPP

/// Exchange of arenas at creation of a group: every rank gets the arena of every other rank of its node.

#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend_context.hpp"
#include "core/rank_place.hpp"
#include "node/arena.hpp"
#include "node/peer_link.hpp"

namespace ferry::node {

/// One rank as seen by a rank of its node; also a rank's view of itself.
struct Peer {
  std::shared_ptr<ArenaMapping> arena;
  bool same_process = false;
  std::unique_ptr<PeerLink> link;  ///< null for ranks of this process, and for absent ones
  bool is_absent = false;          ///< it has no process (GroupOptions::present_ranks)
};

struct Rendezvous {
  std::shared_ptr<Arena> arena;   ///< this rank's own
  std::vector<Peer> peers;        ///< ranks of this node in order, this rank included
  std::vector<RankPlace> places;  ///< places of all ranks of the group
  std::uint64_t group_id = 0;     ///< the same on all ranks, and not 0
};

/// Collective over all ranks of all nodes, see core/create_together.hpp. All of `my_place` but what is
/// relative is published to all; an address has at most 63 characters, a longer one counts as not known. If `my_status`
/// is an error, all ranks fail with it.
Result<Rendezvous> rendezvous(const BackendContext& context, const RankPlace& my_place, const Status& my_status);

}  // namespace ferry::node

#endif  // FERRY_NODE_RENDEZVOUS_HPP
