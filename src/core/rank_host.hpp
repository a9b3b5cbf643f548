#ifndef FERRY_CORE_RANK_HOST_HPP
#define FERRY_CORE_RANK_HOST_HPP

/// Grouping of ranks into nodes by the hosts that they run on.

#include <cstdint>
#include <span>

#include "core/host_identity.hpp"
#include "core/process_identity.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Host, process and user of a rank. Plain bytes, exchanged at creation.
struct RankHost {
  ProcessIdentity process;
  HostIdentity host;
  std::int64_t rank = 0;
  std::int64_t user = 0;  ///< effective id, in user_namespace
  std::uint64_t user_namespace = 0;

  static RankHost here(int rank);
  /// Containers that share only the machine reach each other only over the network. Ranks whose machine cannot be
  /// identified count as neighbours: linking them gives a better error than this check could.
  bool shares_node_with(const RankHost& other) const {
    return process == other.process ||
           (process.same_host(other.process) && host.network_namespace == other.host.network_namespace);
  }
};

/// The number of ranks on each host, for GroupOptions::ranks_per_node = 0.
/// @errors kUnsupported: hosts have different numbers of ranks, or the ranks of a host are not consecutive
Result<int> find_ranks_per_node(std::span<const RankHost> ranks);

/// The number for GroupOptions::ranks_per_node = kDividedHosts: the largest that divides every run of ranks on one
/// host.
int divide_hosts(std::span<const RankHost> ranks);

/// Checks that each node's ranks belong to one user: ranks of a node map each other's memory, which only processes of
/// one user may.
/// @errors kUnsupported: naming two ranks and their users
Status check_users(std::span<const RankHost> ranks, int ranks_per_node);

}  // namespace ferry

#endif  // FERRY_CORE_RANK_HOST_HPP
