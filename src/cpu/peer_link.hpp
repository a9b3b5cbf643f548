#ifndef FERRY_CPU_PEER_LINK_HPP
#define FERRY_CPU_PEER_LINK_HPP

/// Sockets between ranks of different processes on one host: they carry the arenas' file descriptors once, and later
/// tell when a peer is gone. Names are in the kernel's abstract namespace, so no file is left behind.

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "cpu/unique_fd.hpp"
#include "ferry/status.hpp"

namespace ferry::cpu {

/// Proves on a local socket that the caller got this rank's announcement through the (authenticated) bootstrap.
using LinkToken = std::array<std::uint8_t, 16>;

/// A connection to one peer process.
class PeerLink {
 public:
  PeerLink(UniqueFd socket, UniqueFd process) : socket_(std::move(socket)), process_(std::move(process)) {}

  /// Has the peer's process ended, or closed its end? Never blocks.
  bool gone() const;

 private:
  UniqueFd socket_;
  UniqueFd process_;  // pidfd: also true when a forked child of the peer still holds its socket. Invalid on old kernels
};

/// What a rank brings to each link: who it is, and its arena.
struct LinkHello {
  int rank = 0;
  LinkToken token{};
  int arena_fd = -1;
};

/// The other side of a new link.
struct LinkedPeer {
  int rank = 0;
  std::unique_ptr<PeerLink> link;
  UniqueFd arena_fd;
};

class LinkListener {
 public:
  /// Listens under a fresh random name.
  static Result<LinkListener> create(int backlog);

  const std::string& name() const { return name_; }

  /// Wait for one peer that knows `hello.token`; strangers, and processes of other users, are dropped.
  Result<LinkedPeer> accept_peer(const LinkHello& hello, std::int64_t deadline_ns) const;

 private:
  LinkListener(UniqueFd socket, std::string name) : socket_(std::move(socket)), name_(std::move(name)) {}
  UniqueFd socket_;
  std::string name_;
};

/// Connect to the listener `name` of `peer_rank`, whose token is `peer_token`.
Result<LinkedPeer> connect_peer(const std::string& name, int peer_rank, const LinkToken& peer_token,
                                const LinkHello& hello, std::int64_t deadline_ns);

/// Fresh random bytes from the kernel.
Status fill_random(void* data, std::size_t bytes);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_PEER_LINK_HPP
