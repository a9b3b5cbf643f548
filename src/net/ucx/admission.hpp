#ifndef FERRY_NET_UCX_ADMISSION_HPP
#define FERRY_NET_UCX_ADMISSION_HPP

/// Who may connect: the peers. When this end has reached all of them, and they its receiver, it names to each the
/// sockets by which they are connected; when all of them have done so too, it stops listening, and ends the connections
/// that none has named (net/ucx/ports.hpp).

#include <span>

#include "net/ucx/peer.hpp"
#include "net/ucx/scopes.hpp"

namespace ferry::net::ucx {

class Admission {
 public:
  /// Does what has become possible. Called from every poll. True if something is to be sent.
  bool advance(std::span<Peer> peers, Scopes& scopes);

  /// Everybody who may connect has done so, or was lost.
  bool is_closed() const { return closed_; }

 private:
  bool name_sockets(std::span<Peer> peers);
  void close(std::span<const Peer> peers, Scopes& scopes);

  bool named_sockets_ = false;
  bool closed_ = false;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_ADMISSION_HPP
