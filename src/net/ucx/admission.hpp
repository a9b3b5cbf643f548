#ifndef FERRY_NET_UCX_ADMISSION_HPP
#define FERRY_NET_UCX_ADMISSION_HPP

/// Admits only the peers. When this end has reached all of them and their messages have reached its receiver, it names
/// to each peer the sockets that connect the two; when all peers have done the same, it stops listening and ends the
/// connections that no peer has named (net/ucx/ports.hpp).

#include <span>

#include "net/ucx/peer.hpp"
#include "net/ucx/scopes.hpp"

namespace ferry::net::ucx {

class Admission {
 public:
  /// Takes each step that has become possible. Called from every poll. True if it sent messages.
  bool advance(std::span<Peer> peers, Scopes& scopes);

  /// True if every peer has connected or is lost.
  bool is_closed() const { return closed_; }

 private:
  bool name_sockets(std::span<Peer> peers);
  void close(std::span<const Peer> peers, Scopes& scopes);

  bool named_sockets_ = false;
  bool closed_ = false;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_ADMISSION_HPP
