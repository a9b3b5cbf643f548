#ifndef FERRY_NODE_PEER_LINK_HPP
#define FERRY_NODE_PEER_LINK_HPP

/// Sockets between ranks of different processes on one host: they carry the arenas' file descriptors, then short
/// messages of a backend, and detect when a peer is gone. Names are in the kernel's abstract namespace, so no file is
/// left behind.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/unique_fd.hpp"
#include "ferry/status.hpp"

namespace ferry::node {

/// Proof on a local socket that the caller received this rank's announcement through the (authenticated) bootstrap.
using LinkToken = std::array<std::uint8_t, 16>;

/// Longest message that a link carries.
inline constexpr std::size_t kMaxLinkMessageBytes = 4096;

/// Result of PeerLink::receive.
struct ReceivedMessage {
  enum class Kind {
    kNothing,  ///< no message is waiting
    kMessage,
    kClosed,  ///< the peer closed its end or died, and every earlier message has been received
  };
  Kind kind = Kind::kNothing;
  std::vector<std::byte> bytes;
  UniqueFd fd;  ///< the descriptor sent with the message, if any
};

/// A connection to one peer process. Messages arrive whole and in order.
class PeerLink {
 public:
  PeerLink(UniqueFd socket, UniqueFd process) : socket_(std::move(socket)), process_(std::move(process)) {}

  /// Whether the peer's process has ended, or closed its end or its sending. Never blocks; ignores unread messages.
  bool gone() const;

  /// A second handle of the link: `gone` works on it after this object is destroyed. While it lives the peer does not
  /// notice that destruction, so call `end_sending` first.
  /// @errors kSystem: no file descriptor is left
  Result<std::unique_ptr<PeerLink>> share() const;
  /// Makes this side gone for the peer. Nothing can be sent afterwards.
  void end_sending() const;

  /// Sends 1 to kMaxLinkMessageBytes bytes, and a copy of the descriptor `fd` unless it is -1. Never blocks. Callable
  /// from any thread: the kernel keeps a message in one piece.
  /// @errors kPeerLost: the peer is gone; kTransport: it left so many messages unread that no more fit; kSystem
  Status send(std::span<const std::byte> message, int fd = -1) const;
  /// The next message, if one is waiting. Never blocks. One thread at a time.
  /// @errors kTransport: the message is longer than any that `send` sends; kSystem: also if this process had no
  ///         descriptor left for the message's
  Result<ReceivedMessage> receive() const;
  /// Descriptor for poll(2): POLLIN means that `receive` has something to return. Owned by the link.
  int poll_fd() const { return socket_.get(); }

 private:
  UniqueFd socket_;
  UniqueFd process_;  // pidfd: ends with the peer even if a forked child still holds its socket. Invalid on old kernels
};

/// First message of a rank on each new link: its number, the token, and its arena.
struct LinkHello {
  int rank = 0;
  LinkToken token{};
  int arena_fd = -1;
};

/// Other side of a new link.
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

  /// Wait for one peer that has `hello.token`; unknown processes and processes of other users are dropped.
  /// @errors kTimeout; kPeerLost: the peer has given up; kSystem: also if file descriptors ran out
  Result<LinkedPeer> accept_peer(const LinkHello& hello, std::int64_t deadline_ns) const;

 private:
  LinkListener(UniqueFd socket, std::string name) : socket_(std::move(socket)), name_(std::move(name)) {}
  UniqueFd socket_;
  std::string name_;
};

/// A link that the listening peer has not answered yet.
struct OpenedLink {
  int peer_rank = 0;
  UniqueFd socket;
  UniqueFd process;
};

/// Connects to the listener `name` of `peer_rank`, whose token is `peer_token`, and sends `hello`. Does not wait.
/// @errors kTransport: the peer does not listen, or not to this user; kSystem: also if its backlog is full
Result<OpenedLink> open_link(const std::string& name, int peer_rank, const LinkToken& peer_token,
                             const LinkHello& hello);

/// Waits for the listening peer's answer.
/// @errors kTimeout; kPeerLost: the peer has given up; kSystem: also if file descriptors ran out
Result<LinkedPeer> await_answer(OpenedLink opened, std::int64_t deadline_ns);

/// Fresh random bytes from the kernel.
Status fill_random(void* data, std::size_t bytes);

}  // namespace ferry::node

#endif  // FERRY_NODE_PEER_LINK_HPP
