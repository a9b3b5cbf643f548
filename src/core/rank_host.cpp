#include "core/rank_host.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace ferry {
namespace {

constexpr const char* kPrefix = "Group::create: ranks_per_node is 0, so each host's ranks form a node, but ";

/// One past the last rank of the run that begins at `first` and shares its host.
std::size_t end_of_host(std::span<const RankHost> ranks, std::size_t first) {
  std::size_t end = first + 1;
  while (end < ranks.size() && ranks[end].shares_node_with(ranks[first])) ++end;
  return end;
}

Status apart(std::size_t before, std::size_t rank) {
  return Status(ErrorCode::kUnsupported,
                fmt::format("{}ranks {} and {} share a host and rank {} runs on another; number the ranks host by host "
                            "(torchrun does; mpirun --map-by slot, srun --distribution=block)",
                            kPrefix, before, rank, rank - 1),
                static_cast<int>(rank));
}

Status uneven(std::size_t num_first, std::size_t first, std::size_t num_ranks) {
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("{}rank 0's host has {} of them and rank {}'s has {}; start as many ranks on each host, or "
                  "set GroupOptions::ranks_per_node to a number that divides the number of ranks of every host, or to "
                  "kDividedHosts (-1)",
                  kPrefix, num_first, first, num_ranks),
      static_cast<int>(first));
}

}  // namespace

Result<int> find_ranks_per_node(std::span<const RankHost> ranks) {
  const std::size_t num_first = end_of_host(ranks, 0);
  Status first_uneven;
  for (std::size_t first = num_first; first < ranks.size();) {
    const auto earlier = ranks.first(first);
    const auto same =
        std::ranges::find_if(earlier, [&](const RankHost& rank) { return rank.shares_node_with(ranks[first]); });
    // Checked before uneven numbers, because ranks out of order also look uneven.
    if (same != earlier.end()) return apart(static_cast<std::size_t>(same - earlier.begin()), first);
    const std::size_t end = end_of_host(ranks, first);
    if (end - first != num_first && first_uneven.ok()) first_uneven = uneven(num_first, first, end - first);
    first = end;
  }
  if (!first_uneven.ok()) return first_uneven;
  return static_cast<int>(num_first);
}

int divide_hosts(std::span<const RankHost> ranks) {
  std::size_t size = 0;
  for (std::size_t first = 0; first < ranks.size();) {
    const std::size_t end = end_of_host(ranks, first);
    size = std::gcd(size, end - first);
    first = end;
  }
  return static_cast<int>(size);
}

RankHost RankHost::here(int rank) {
  struct stat info {};
  const bool is_known = stat("/proc/self/ns/user", &info) == 0;
  return {this_process(), this_host(), rank, geteuid(), is_known ? info.st_ino : 0};
}

Status check_users(std::span<const RankHost> ranks, int ranks_per_node) {
  const auto node_size = static_cast<std::size_t>(ranks_per_node);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::size_t first = rank / node_size * node_size;
    // Ids of different namespaces are not comparable; then the linking of ranks detects the problem.
    const bool can_compare = ranks[rank].process.same_host(ranks[first].process) &&
                             ranks[rank].user_namespace == ranks[first].user_namespace;
    if (!can_compare || ranks[rank].user == ranks[first].user) continue;
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("Group::create: rank {} runs as user {} and rank {}, on the same host, as user {}; ranks of "
                    "a host share memory: start them as one user",
                    first, ranks[first].user, rank, ranks[rank].user),
        static_cast<int>(rank));
  }
  return {};
}

}  // namespace ferry
