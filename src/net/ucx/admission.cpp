#include "net/ucx/admission.hpp"

#include <algorithm>
#include <set>
#include <vector>

namespace ferry::net::ucx {

bool Admission::advance(std::span<Peer> peers, Scopes& scopes) {
  const bool named = name_sockets(peers);
  close(peers, scopes);
  return named;
}

bool Admission::name_sockets(std::span<Peer> peers) {
  if (named_sockets_ || !std::ranges::all_of(peers, [](const Peer& peer) {
        return peer.connection == nullptr || peer.lost || peer.is_connected();
      })) {
    return false;
  }
  named_sockets_ = true;
  const std::vector<ConnectedSocket> sockets = connected_sockets();
  for (Peer& peer : peers) {
    if (peer.connection == nullptr) continue;
    for (const ConnectedSocket& socket : sockets) {
      if (!may_contain_port(peer.address, socket.remote_port)) continue;
      peer.connection->notify(0, {.kind = MessageKind::kSocket, .value = socket.local_name});
    }
    peer.connection->notify(0, {.kind = MessageKind::kSettled});
  }
  return true;
}

void Admission::close(std::span<const Peer> peers, Scopes& scopes) {
  if (closed_ || !named_sockets_ || !std::ranges::all_of(peers, [](const Peer& peer) {
        return peer.connection == nullptr || peer.settled || peer.has_ended();
      })) {
    return;
  }
  closed_ = true;
  std::set<SocketName> known_ends;
  for (const Peer& peer : peers) known_ends.insert(peer.sockets.begin(), peer.sockets.end());
  scopes.stop_listening(known_ends);
}

}  // namespace ferry::net::ucx
