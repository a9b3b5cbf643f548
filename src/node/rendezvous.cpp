#include "node/rendezvous.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/create_together.hpp"
#include "core/descriptors.hpp"
#include "core/host_identity.hpp"
#include "core/process_identity.hpp"
#include "node/futex.hpp"
#include "node/same_process.hpp"

namespace ferry::node {
namespace {

/// Addresses at which peers reach this rank. Plain bytes, exchanged through the bootstrap.
struct Announcement {
  ProcessIdentity process;
  HostIdentity host;
  LinkToken token{};
  std::array<char, 64> listener_name{};
  std::array<char, 64> network_address{};
  LayerRates rates;
  RingProposal ring_proposal = RingProposal::kNotAsked;
};

/// Stands for an absent rank: it will be another process of this host.
Announcement absent_beside(const Announcement& mine) {
  Announcement absent;
  absent.process = mine.process;
  absent.process.pid = -1;
  absent.host = mine.host;
  return absent;
}

/// Heap of the arena that stands for that of an absent rank: more than ranks of one node keep at its start for each
/// other (masks, a call log).
constexpr std::size_t kAbsentArenaBytes = std::size_t{1} << 20;

Result<Peer> absent_peer() {
  Result<std::shared_ptr<Arena>> arena = Arena::create(kAbsentArenaBytes);
  if (!arena.ok()) return arena.status();
  Peer peer;
  peer.arena = (*arena)->mapping();
  peer.is_absent = true;
  return peer;
}

template <std::size_t kBytes>
std::string text_of(const std::array<char, kBytes>& bytes) {
  return {bytes.data(), strnlen(bytes.data(), bytes.size())};
}

Result<std::vector<Announcement>> exchange(const BackendContext& context, const Status& my_status,
                                           const Announcement& mine) {
  Result<std::vector<std::vector<std::byte>>> all =
      gather_or_fail(*context.bootstrap, my_status, std::as_bytes(std::span(&mine, 1)), context.options.timeout_ns);
  if (!all.ok()) return all.status();
  std::vector<Announcement> announcements(all->size());
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    if (context.is_absent(static_cast<int>(rank))) {
      announcements[rank] = absent_beside(mine);
      continue;
    }
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

/// Ranks of one node, by number.
struct NodeRanks {
  std::size_t first = 0;
  std::size_t count = 0;

  explicit NodeRanks(const Topology& topology)
      : first(static_cast<std::size_t>(topology.node_of(topology.rank) * topology.ranks_per_node)),
        count(static_cast<std::size_t>(topology.ranks_per_node)) {}
};

/// Checks all nodes, so that every rank reports the same error. Groups with absent ranks have one node.
Status check_hosts(const std::vector<Announcement>& announcements, std::size_t ranks_per_node) {
  for (std::size_t rank = 0; rank < announcements.size(); ++rank) {
    const std::size_t first = rank / ranks_per_node * ranks_per_node;
    const Announcement& theirs = announcements[rank];
    const Announcement& others = announcements[first];
    if (theirs.process.same_host(others.process)) {
      // Names of links belong to a network namespace.
      if (theirs.host.network_namespace == others.host.network_namespace || theirs.process == others.process) continue;
      return Status(ErrorCode::kUnsupported,
                    fmt::format("Group::create: ranks {} and {} belong to one node but run in containers (or network "
                                "namespaces) that do not share a network; start ranks of one node in one container or "
                                "with the host's network, or set GroupOptions::ranks_per_node to the number of ranks "
                                "in each",
                                first, rank),
                    static_cast<int>(rank));
    }
    return Status(ErrorCode::kUnsupported,
                  fmt::format("Group::create: ranks {} and {} belong to one node but run on different hosts; set "
                              "GroupOptions::ranks_per_node to the number of ranks on each host, and number the ranks "
                              "host by host",
                              first, rank),
                  static_cast<int>(rank));
  }
  return {};
}

std::vector<RankPlace> places_of(const std::vector<Announcement>& announcements, const Announcement& mine) {
  std::vector<RankPlace> places;
  for (const Announcement& theirs : announcements) {
    places.push_back({.on_this_host = theirs.host.same_host(mine.host),
                      .in_this_network = theirs.host.same_network(mine.host),
                      .address = text_of(theirs.network_address),
                      .rates = theirs.rates,
                      .ring_proposal = theirs.ring_proposal});
  }
  return places;
}

/// Number of the group that follows from all ranks' random tokens: FNV-1a (Fowler, Noll, Vo; 64-bit offset basis and
/// prime) over their bytes.
std::uint64_t group_id_of(const std::vector<Announcement>& announcements) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const Announcement& announcement : announcements) {
    for (const std::uint8_t byte : announcement.token) {
      hash ^= byte;
      hash *= 1099511628211ULL;
    }
  }
  return hash == 0 ? 1 : hash;
}

Status add_linked(LinkedPeer linked, std::size_t first_rank, std::vector<Peer>& peers) {
  const std::size_t idx = static_cast<std::size_t>(linked.rank) - first_rank;  // huge if the rank is not of this node
  if (idx >= peers.size() || peers[idx].arena != nullptr) {
    return Status(
        ErrorCode::kTransport,
        fmt::format("Group::create: unexpected link from rank {}; run the same build on every rank", linked.rank));
  }
  Result<std::shared_ptr<ArenaMapping>> mapping = ArenaMapping::map_peer(std::move(linked.arena_fd));
  if (!mapping.ok()) return mapping.status();
  peers[idx].arena = std::move(*mapping);
  peers[idx].link = std::move(linked.link);
  return {};
}

/// The timeout, with the missing rank that it waited for: one above `my_rank`.
Status name_missing(const std::vector<Peer>& peers, std::size_t first_rank, int my_rank, const Status& status) {
  auto rank = static_cast<std::size_t>(my_rank) + 1;
  while (peers[rank - first_rank].arena != nullptr) ++rank;
  return Status(status.code(), fmt::format("{}: rank {} is missing", status.message(), rank), static_cast<int>(rank));
}

/// Descriptors of a link to another process: the socket, the peer's process and its arena.
constexpr std::int64_t kDescriptorsOfLink = 3;
/// Those that are open before the peer answers.
constexpr std::int64_t kDescriptorsOfOpenedLink = 2;

/// Links to be made by a rank of a node.
struct Links {
  std::vector<OpenedLink> opened;  ///< to lower ranks
  std::ptrdiff_t num_awaited = 0;  ///< from higher ranks
};

/// Opens the links to lower ranks, which listen, so each pair makes one link. Listeners hold all connections in their
/// backlog, so no rank waits here. Checks that the rest of all links fits as well: no rank begins to wait for another
/// that has failed.
Result<Links> open_links(const std::vector<Announcement>& announcements, const NodeRanks& node, const LinkHello& hello,
                         const std::vector<Peer>& peers) {
  Links links;
  for (std::size_t idx = 0; idx < peers.size(); ++idx) {
    const auto rank = static_cast<int>(node.first + idx);
    if (peers[idx].arena != nullptr) continue;  // of this process, or absent
    if (rank > hello.rank) {
      ++links.num_awaited;
      continue;
    }
    const Announcement& peer = announcements[node.first + idx];
    Result<OpenedLink> link = open_link(text_of(peer.listener_name), rank, peer.token, hello);
    if (!link.ok()) return link.status();
    links.opened.push_back(std::move(*link));
  }
  const auto num_opened = static_cast<std::int64_t>(links.opened.size());
  const std::int64_t num_links = num_opened + links.num_awaited;
  const Result<std::vector<UniqueFd>> reserved =
      reserve_descriptors(kDescriptorsOfLink * num_links - kDescriptorsOfOpenedLink * num_opened,
                          fmt::format("Group::create: links to {} other processes of this host", num_links));
  if (!reserved.ok()) return reserved.status();
  return links;
}

/// Makes the links of this node once every rank has opened its own. Accepts first: nothing delays that, so no rank
/// waits for an answer that depends on another's.
Status complete_links(Links links, const NodeRanks& node, const LinkListener& listener, const LinkHello& hello,
                      std::int64_t timeout_ns, std::vector<Peer>& peers) {
  const std::int64_t deadline_ns = monotonic_ns() + timeout_ns;
  for (std::ptrdiff_t i = 0; i < links.num_awaited; ++i) {
    Result<LinkedPeer> linked = listener.accept_peer(hello, deadline_ns);
    if (linked.status().code() == ErrorCode::kTimeout)
      return name_missing(peers, node.first, hello.rank, linked.status());
    if (!linked.ok()) return linked.status();
    if (Status status = add_linked(std::move(*linked), node.first, peers); !status.ok()) return status;
  }
  for (OpenedLink& opened : links.opened) {
    Result<LinkedPeer> linked = await_answer(std::move(opened), deadline_ns);
    if (!linked.ok()) return linked.status();
    if (Status status = add_linked(std::move(*linked), node.first, peers); !status.ok()) return status;
  }
  return {};
}

}  // namespace

Result<Rendezvous> rendezvous(const BackendContext& context, const RankPlace& my_place, const Status& my_status) {
  const int num_ranks = context.topology.num_ranks;
  Announcement mine;
  mine.process = this_process();
  mine.host = this_host();
  mine.rates = my_place.rates;
  mine.ring_proposal = my_place.ring_proposal;
  if (my_place.address.size() < mine.network_address.size()) {
    std::ranges::copy(my_place.address, mine.network_address.begin());
  }
  Status status = my_status;
  if (status.ok()) status = fill_random(mine.token.data(), mine.token.size());
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
  if (Status hosts = check_hosts(*announcements, NodeRanks(context.topology).count); !hosts.ok()) return hosts;

  Rendezvous result;
  result.arena = *arena;
  result.places = places_of(*announcements, mine);
  result.group_id = group_id_of(*announcements);
  const NodeRanks node(context.topology);
  result.peers.resize(node.count);
  for (std::size_t idx = 0; idx < node.count; ++idx) {
    const std::size_t rank = node.first + idx;
    const Announcement& peer = (*announcements)[rank];
    if (context.is_absent(static_cast<int>(rank))) {
      Result<Peer> absent = absent_peer();
      if (status.ok()) status = absent.status();
      if (absent.ok()) result.peers[idx] = std::move(*absent);
      continue;
    }
    if (!(peer.process == mine.process)) continue;
    result.peers[idx].same_process = true;
    result.peers[idx].arena = find_offered_mapping(peer.token);
    if (result.peers[idx].arena == nullptr && status.ok()) {
      status = Status(ErrorCode::kPeerLost,
                      fmt::format("Group::create: rank {} failed before this rank could use its memory", rank),
                      static_cast<int>(rank));
    }
  }
  const LinkHello hello{context.topology.rank, mine.token, (*arena)->mapping()->fd()};
  Result<Links> links = open_links(*announcements, node, hello, result.peers);
  if (status.ok()) status = links.status();
  Result<std::vector<std::vector<std::byte>>> can_link =
      gather_or_fail(*context.bootstrap, status, {}, context.options.timeout_ns);
  if (!can_link.ok()) return can_link.status();
  status = complete_links(std::move(*links), node, *listener, hello, context.options.timeout_ns, result.peers);
  if (!status.ok()) return status;
  return result;
}

}  // namespace ferry::node
