#include "membership/endpoint.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>

#include <array>
#include <cerrno>
#include <utility>

#include "bootstrap/socket.hpp"
#include "ferry/version.hpp"

namespace ferry::membership {
namespace {

/// Time after which a dismissed connection is closed although the other end has not done so: a stopped process that
/// goes on within it still learns what it was told.
constexpr std::int64_t kLingerNs = 60 * kNsPerSecond;

/// Least number of the descriptor on which a member listens. The port of a process that was killed is to refuse at
/// once, but Linux closes the descriptors of an ending process one after another, the highest first, and those of a GPU
/// take long: ports of processes that use one refused 50 ms after SIGKILL, those of processes with PyTorch 190 to 330
/// (H200). CUDA opens fewer than this, and every process may open as many (the usual soft limit is 1024).
constexpr int kLeastDescriptor = 512;

/// Gives a descriptor a high number, if the process may have one.
UniqueFd move_up(UniqueFd fd) {
  UniqueFd moved(fcntl(fd.get(), F_DUPFD_CLOEXEC, kLeastDescriptor));
  return moved.valid() ? std::move(moved) : std::move(fd);
}

std::uint16_t port_of(int fd) {
  bootstrap::Address address;
  address.size = sizeof address.storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0) return 0;
  const bool is_v6 = address.storage.ss_family == AF_INET6;
  return ntohs(is_v6 ? reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_port
                     : reinterpret_cast<const sockaddr_in&>(address.storage).sin_port);
}

}  // namespace

Result<Listener> listen_anywhere(const std::string& host) {
  constexpr std::array<std::uint16_t, 1> kAnyPort{0};
  Result<UniqueFd> fd = bootstrap::listen_on(host, kAnyPort);
  if (!fd.ok()) {
    return Status(fd.status().code(), fmt::format("Membership: no socket on host '{}' (MembershipOptions::host): {}",
                                                  host, fd.status().message()));
  }
  const std::uint16_t port = port_of(fd->get());
  return Listener{move_up(std::move(*fd)), port};
}

Endpoint::Endpoint(UniqueFd listener, std::uint16_t port, const std::string& secret, int num_members)
    : acceptor_({.listener = std::move(listener), .secret = secret, .num_ranks = num_members}), port_(port) {}

Result<std::unique_ptr<Endpoint>> Endpoint::open(const std::string& host, const std::string& secret, int num_members) {
  Result<Listener> listener = listen_anywhere(host);
  if (!listener.ok()) return listener.status();
  return std::unique_ptr<Endpoint>(new Endpoint(std::move(listener->fd), listener->port, secret, num_members));
}

void Endpoint::add_poll_entries(std::vector<pollfd>* entries) const {
  for (const Connection& connection : connections_) {
    entries->push_back({connection.channel.fd(), connection.channel.poll_events(), 0});
  }
  acceptor_.add_poll_entries(entries);
}

Status Endpoint::serve(std::span<const pollfd> entries, std::vector<Arrival>* arrivals) {
  const std::size_t num_connections = connections_.size();
  std::vector<Connection> open;
  for (std::size_t i = 0; i < num_connections; ++i) {
    Connection& connection = connections_[i];
    connection.channel.flush();
    const bool is_open = entries[i].revents == 0 || read(connection, arrivals);
    const bool is_over = connection.dismissed && connection.dismissed->expired();
    if (is_open && !is_over) open.push_back(std::move(connection));
  }
  connections_ = std::move(open);
  std::vector<bootstrap::AuthenticatedPeer> peers;
  Status status = acceptor_.serve(entries.subspan(num_connections), &peers);
  for (bootstrap::AuthenticatedPeer& peer : peers) welcome(std::move(peer));
  return status;
}

Status Endpoint::serve_now(std::vector<Arrival>* arrivals) {
  std::vector<pollfd> entries;
  add_poll_entries(&entries);
  if (Status status = bootstrap::wait_until_ready(entries, bootstrap::Deadline::after(0)); !status.ok()) return status;
  return serve(entries, arrivals);
}

void Endpoint::welcome(bootstrap::AuthenticatedPeer peer) {
  Connection connection{
      .key = next_key_++, .from = peer.hello.rank, .channel = std::move(peer.channel), .dismissed = {}};
  if (peer.hello.version != version()) {
    const Status status(ErrorCode::kInvalidArgument,
                        fmt::format("Membership: a process runs Ferry {} and a member runs {}; run the same version "
                                    "in all processes",
                                    peer.hello.version, version()));
    if (connection.channel.queue(bootstrap::FrameType::kFailure, bootstrap::encode_failure(status)).ok()) {
      connection.channel.flush();
      connection.channel.finish_sending();
    }
    return;
  }
  if (!connection.channel.queue(bootstrap::FrameType::kWelcome, {}).ok()) return;
  connection.channel.flush();
  connections_.push_back(std::move(connection));
}

bool Endpoint::read(Connection& connection, std::vector<Arrival>* arrivals) {
  for (;;) {
    bootstrap::Frame frame;
    const bootstrap::ReceiveOutcome outcome = connection.channel.receive(&frame);
    if (outcome == bootstrap::ReceiveOutcome::kWouldBlock) return true;
    Result<Letter> letter = Status();
    const bool is_letter = outcome == bootstrap::ReceiveOutcome::kFrame && frame.type == bootstrap::FrameType::kMessage;
    if (is_letter) letter = decode(frame.payload);
    if (!is_letter || !letter.ok()) {
      if (!connection.dismissed) arrivals->push_back({connection.key, connection.from, {}});
      return false;
    }
    if (!connection.dismissed) arrivals->push_back({connection.key, connection.from, std::move(*letter)});
  }
}

void Endpoint::send(Key key, const View& view, const Content& content) {
  for (Connection& connection : connections_) {
    if (connection.key != key) continue;
    if (connection.channel.queue(bootstrap::FrameType::kMessage, encode(view, content)).ok()) {
      connection.channel.flush();
    }
  }
}

void Endpoint::close(Key key) {
  std::erase_if(connections_, [key](const Connection& connection) { return connection.key == key; });
}

void Endpoint::dismiss(Key key) {
  for (Connection& connection : connections_) {
    if (connection.key == key) connection.dismissed = bootstrap::Deadline::after(kLingerNs);
  }
}

}  // namespace ferry::membership
