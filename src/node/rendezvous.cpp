#include "node/rendezvous.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/group_options.hpp"
#include "node/futex.hpp"
#include "node/process_identity.hpp"
#include "node/same_process.hpp"

namespace ferry::node {
namespace {

/// How peers reach this rank. Plain bytes, exchanged through the bootstrap.
struct Announcement {
  ProcessIdentity process;
  LinkToken token{};
  std::array<char, 64> listener_name{};
};

Result<std::vector<Announcement>> exchange(const BackendContext& context, const Status& my_status,
                                           const Announcement& mine) {
  Result<std::vector<std::vector<std::byte>>> all =
      gather_or_fail(*context.bootstrap, my_status, std::as_bytes(std::span(&mine, 1)), context.options.timeout_ns);
  if (!all.ok()) return all.status();
  std::vector<Announcement> announcements(all->size());
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    if ((*all)[rank].size() != sizeof(Announcement)) {
      return Status(
          ErrorCode::kTransport,
          fmt::format("Group::create: rank {} announced {} bytes, expected {}; run the same build on every rank", rank,
                      (*all)[rank].size(), sizeof(Announcement)),
          static_cast<int>(rank));
    }
    std::memcpy(&announcements[rank], (*all)[rank].data(), sizeof(Announcement));
  }
  return announcements;
}

Status check_hosts(const std::vector<Announcement>& announcements) {
  for (std::size_t rank = 1; rank < announcements.size(); ++rank) {
    if (announcements[rank].process.same_host(announcements[0].process)) continue;
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("Group::create: ranks 0 and {} run on different hosts; this build connects ranks of one host only",
                    rank),
        static_cast<int>(rank));
  }
  return {};
}

Status add_linked(LinkedPeer linked, std::vector<Peer>& peers) {
  const auto rank = static_cast<std::size_t>(linked.rank);
  if (linked.rank < 0 || rank >= peers.size() || peers[rank].arena != nullptr) {
    return Status(ErrorCode::kTransport, fmt::format("Group::create: unexpected link from rank {}", linked.rank));
  }
  Result<std::shared_ptr<ArenaMapping>> mapping = ArenaMapping::map_peer(std::move(linked.arena_fd));
  if (!mapping.ok()) return mapping.status();
  peers[rank].arena = std::move(*mapping);
  peers[rank].link = std::move(linked.link);
  return {};
}

/// Lower ranks listen, higher ranks connect, so each pair makes one link. Connecting never waits for accepting (the
/// backlog holds all peers), so no order of ranks can deadlock; answers are awaited only from lower ranks.
Status connect_processes(const BackendContext& context, const std::vector<Announcement>& announcements,
                         const LinkListener& listener, const LinkHello& hello, std::vector<Peer>& peers) {
  const std::int64_t deadline_ns = monotonic_ns() + context.options.timeout_ns;
  const auto my_rank = static_cast<std::size_t>(context.topology.rank);
  for (std::size_t rank = 0; rank < my_rank; ++rank) {
    if (peers[rank].same_process) continue;
    const Announcement& peer = announcements[rank];
    const std::string name(peer.listener_name.data(), strnlen(peer.listener_name.data(), peer.listener_name.size()));
    Result<LinkedPeer> linked = connect_peer(name, static_cast<int>(rank), peer.token, hello, deadline_ns);
    if (!linked.ok()) return linked.status();
    if (Status status = add_linked(std::move(*linked), peers); !status.ok()) return status;
  }
  const auto num_awaited = std::count_if(peers.begin() + static_cast<std::ptrdiff_t>(my_rank) + 1, peers.end(),
                                         [](const Peer& peer) { return !peer.same_process; });
  for (std::ptrdiff_t i = 0; i < num_awaited; ++i) {
    Result<LinkedPeer> linked = listener.accept_peer(hello, deadline_ns);
    if (!linked.ok()) return linked.status();
    if (Status status = add_linked(std::move(*linked), peers); !status.ok()) return status;
  }
  return {};
}

}  // namespace

Result<Rendezvous> rendezvous(const BackendContext& context) {
  const int num_ranks = context.topology.num_ranks;
  Announcement mine;
  mine.process = this_process();
  Status status = fill_random(mine.token.data(), mine.token.size());
  Result<std::shared_ptr<Arena>> arena = Arena::create(context.options.arena_bytes);
  if (status.ok()) status = arena.status();
  Result<LinkListener> listener = LinkListener::create(num_ranks);
  if (status.ok()) status = listener.status();
  if (status.ok()) {
    std::copy_n(listener->name().data(), std::min(listener->name().size(), mine.listener_name.size()),
                mine.listener_name.data());
  }
  std::optional<OfferedMapping> offer;
  if (status.ok()) offer.emplace(mine.token, (*arena)->mapping());
  Result<std::vector<Announcement>> announcements = exchange(context, status, mine);
  if (!announcements.ok()) return announcements.status();
  if (Status hosts = check_hosts(*announcements); !hosts.ok()) return hosts;

  Rendezvous result;
  result.arena = *arena;
  result.peers.resize(announcements->size());
  for (std::size_t rank = 0; rank < announcements->size(); ++rank) {
    const Announcement& peer = (*announcements)[rank];
    if (!(peer.process == mine.process)) continue;
    result.peers[rank].same_process = true;
    result.peers[rank].arena = find_offered_mapping(peer.token);
    if (result.peers[rank].arena == nullptr && status.ok()) {
      status =
          Status(ErrorCode::kPeerLost, fmt::format("Group::create: rank {} gave up", rank), static_cast<int>(rank));
    }
  }
  const LinkHello hello{context.topology.rank, mine.token, (*arena)->mapping()->fd()};
  if (status.ok()) status = connect_processes(context, *announcements, *listener, hello, result.peers);
  // Everybody has found everybody's mapping when this returns; a failure anywhere fails all.
  Result<std::vector<std::vector<std::byte>>> ready =
      gather_or_fail(*context.bootstrap, status, {}, context.options.timeout_ns);
  if (!ready.ok()) return ready.status();
  return result;
}

}  // namespace ferry::node
