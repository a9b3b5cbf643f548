#include "node/peer_link.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "core/descriptors.hpp"
#include "ferry/bootstrap.hpp"
#include "node/futex.hpp"

namespace ferry::node {
namespace {

/// Time for which an unknown process that connects and sends nothing may hold up the listener.
constexpr std::int64_t kStrangerPatienceNs = 2 * kNsPerSecond;
constexpr std::int64_t kNsPerMillisecond = 1'000'000;

struct Message {
  std::int64_t rank = 0;
  LinkToken token{};
};

Status system_error(std::string_view what) {
  const int error = errno;
  return Status(ErrorCode::kSystem,
                fmt::format("linking ranks of one host: {} failed: {}{}", what, std::strerror(error),
                            is_out_of_descriptors(error) ? fmt::format("; {}", describe_descriptor_limit(error, 1))
                                                         : std::string()));
}

/// Error for a peer's descriptor that the kernel dropped.
Status no_descriptor_left(std::string_view what) {
  return Status(ErrorCode::kSystem,
                fmt::format("{}: its descriptor was lost: {}", what, describe_descriptor_limit(EMFILE, 1)));
}

/// Waits until `fd` is ready; false at the deadline.
bool wait_ready(int fd, short events, std::int64_t deadline_ns) {
  while (true) {
    const std::int64_t left_ns = deadline_ns - monotonic_ns();
    pollfd entry{fd, events, 0};
    const int timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left_ns / kNsPerMillisecond + 1, 0, 1000));
    const int ready = poll(&entry, 1, left_ns <= 0 ? 0 : timeout_ms);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the next call reports the error
    if (left_ns <= 0) return false;
  }
}

/// Sends one packet, with a descriptor unless `fd` is -1. A sequenced-packet socket takes all of it or nothing.
bool send_packet(int socket, std::span<const std::byte> bytes, int fd, int flags) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};  // sendmsg only reads it
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(socket, &header, MSG_NOSIGNAL | flags);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes.size());
}

struct Packet {
  ssize_t bytes = 0;  // result of recvmsg
  bool truncated = false;
  bool rights_cut = false;  // a descriptor was sent but is not in `fd`
  UniqueFd fd;
};

/// Receives one packet, if there is one, with its descriptor. errno gives the reason when bytes < 0.
Packet receive_packet(int socket, std::span<std::byte> room) {
  Packet packet;
  iovec part{room.data(), room.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = CMSG_LEN(sizeof(int));  // room for one descriptor: the kernel closes any more
  do {
    packet.bytes = recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (packet.bytes < 0 && errno == EINTR);
  if (packet.bytes < 0) return packet;
  packet.truncated = (header.msg_flags & MSG_TRUNC) != 0;
  packet.rights_cut = (header.msg_flags & MSG_CTRUNC) != 0;
  if (cmsghdr* rights = CMSG_FIRSTHDR(&header); rights != nullptr && rights->cmsg_level == SOL_SOCKET &&
                                                rights->cmsg_type == SCM_RIGHTS &&
                                                rights->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(rights), sizeof(int));
    packet.fd = UniqueFd(fd);
  }
  return packet;
}

Status peer_gave_up(std::string_view what) {
  return Status(ErrorCode::kPeerLost, fmt::format("linking ranks of one host: a peer gave up before {}", what));
}

/// Error of a link, which is the peer's unless this rank's system refused something.
Status about_peer(const Status& status, int peer_rank) {
  if (status.code() == ErrorCode::kSystem) return status;
  return Status(status.code(), std::string(status.message()), peer_rank);
}

Status send_hello(int socket, const LinkHello& hello, const LinkToken& token) {
  const Message message{hello.rank, token};
  // One small packet always fits.
  if (send_packet(socket, std::as_bytes(std::span(&message, 1)), hello.arena_fd, 0)) return {};
  return errno == EPIPE || errno == ECONNRESET ? peer_gave_up("this rank's hello") : system_error("sendmsg");
}

/// A hello message and its descriptor.
struct ReceivedHello {
  Message message;
  UniqueFd arena_fd;  // invalid if this process had no room for it
};

Result<ReceivedHello> receive_hello(int socket, std::int64_t deadline_ns) {
  if (!wait_ready(socket, POLLIN, deadline_ns)) {
    return Status(ErrorCode::kTimeout, "linking ranks of one host: a peer connected but sent nothing");
  }
  ReceivedHello received;
  Packet packet = receive_packet(socket, std::as_writable_bytes(std::span(&received.message, 1)));
  received.arena_fd = std::move(packet.fd);
  if (packet.bytes == 0 || (packet.bytes < 0 && errno == ECONNRESET)) return peer_gave_up("its hello");
  if (packet.bytes < 0) return system_error("recvmsg");
  const bool has_fd = received.arena_fd.valid() || packet.rights_cut;
  if (packet.bytes != static_cast<ssize_t>(sizeof(Message)) || !has_fd) {
    return Status(ErrorCode::kTransport, "linking ranks of one host: a peer sent something other than a hello message");
  }
  return received;
}

/// Credentials of the process at the other end, if it belongs to this user.
Result<ucred> same_user(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return system_error("SO_PEERCRED");
  if (credentials.uid != geteuid()) {
    return Status(ErrorCode::kTransport,
                  fmt::format("linking ranks of one host: a process of user {} connected, but this "
                              "process runs as user {}",
                              credentials.uid, geteuid()));
  }
  return credentials;
}

UniqueFd open_process(pid_t pid) {
#if defined(SYS_pidfd_open)
  if (pid > 0) return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#endif
  return {};
}

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t name_bytes = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), name_bytes);  // a leading zero byte: no file (unix(7))
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name_bytes);
  return address;
}

}  // namespace

Status fill_random(void* data, std::size_t bytes) {
  auto* out = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t got = getrandom(out, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return system_error("getrandom");
    out += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return {};
}

bool PeerLink::gone() const {
  std::array<pollfd, 2> entries{pollfd{socket_.get(), POLLRDHUP, 0}, pollfd{process_.get(), POLLIN, 0}};
  if (poll(entries.data(), entries.size(), 0) <= 0) return false;
  return entries[0].revents != 0 || entries[1].revents != 0;
}

Result<std::unique_ptr<PeerLink>> PeerLink::share() const {
  UniqueFd socket(fcntl(socket_.get(), F_DUPFD_CLOEXEC, 0));
  UniqueFd process(process_.valid() ? fcntl(process_.get(), F_DUPFD_CLOEXEC, 0) : -1);
  if (!socket.valid() || process.valid() != process_.valid()) return system_error("fcntl");
  return std::make_unique<PeerLink>(std::move(socket), std::move(process));
}

void PeerLink::end_sending() const {
  // Fails only if the peer is gone already.
  static_cast<void>(shutdown(socket_.get(), SHUT_WR));
}

Status PeerLink::send(std::span<const std::byte> message, int fd) const {
  if (message.empty() || message.size() > kMaxLinkMessageBytes) {
    return Status(ErrorCode::kInternal, fmt::format("message to a peer: {} bytes, expected 1 to {}; please report this",
                                                    message.size(), kMaxLinkMessageBytes));
  }
  if (send_packet(socket_.get(), message, fd, MSG_DONTWAIT)) return {};
  if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) {
    return Status(ErrorCode::kPeerLost, "message to a peer: it has closed its end or died");
  }
  if (errno == EAGAIN) {
    return Status(ErrorCode::kTransport,
                  "message to a peer: it has left too many messages unread; it may be stopped or overloaded");
  }
  return Status(
      ErrorCode::kSystem,
      fmt::format("message to a peer: sendmsg of {} bytes{} failed: {}; raise the open-file limit (ulimit -n) "
                  "if descriptors ran out",
                  message.size(), fd >= 0 ? " and a descriptor" : "", std::strerror(errno)));
}

Result<ReceivedMessage> PeerLink::receive() const {
  std::array<std::byte, kMaxLinkMessageBytes> room;
  Packet packet = receive_packet(socket_.get(), room);
  ReceivedMessage received;
  if (packet.bytes < 0) {
    if (errno == EAGAIN) return received;
    if (errno != ECONNRESET && errno != ENOTCONN) {
      return Status(ErrorCode::kSystem, fmt::format("message from a peer: recvmsg failed: {}", std::strerror(errno)));
    }
    packet.bytes = 0;
  }
  if (packet.truncated) {
    return Status(ErrorCode::kTransport,
                  fmt::format("message from a peer: longer than the {} bytes allowed; run the same build on every rank",
                              kMaxLinkMessageBytes));
  }
  if (packet.rights_cut && !packet.fd.valid()) return no_descriptor_left("message from a peer");
  // Messages are never empty, so zero bytes mean that the peer closed its end.
  received.kind = packet.bytes == 0 ? ReceivedMessage::Kind::kClosed : ReceivedMessage::Kind::kMessage;
  received.bytes.assign(room.begin(), room.begin() + packet.bytes);
  received.fd = std::move(packet.fd);
  return received;
}

Result<LinkListener> LinkListener::create(int backlog) {
  std::array<std::uint8_t, 16> random{};
  if (Status status = fill_random(random.data(), random.size()); !status.ok()) return status;
  std::string name = "ferry-";
  for (std::uint8_t byte : random) name += fmt::format("{:02x}", byte);
  UniqueFd socket_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket_fd.valid()) return system_error("socket");
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  if (bind(socket_fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return system_error("bind");
  if (listen(socket_fd.get(), backlog) != 0) return system_error("listen");
  return LinkListener(std::move(socket_fd), std::move(name));
}

Result<LinkedPeer> LinkListener::accept_peer(const LinkHello& hello, std::int64_t deadline_ns) const {
  while (wait_ready(socket_.get(), POLLIN, deadline_ns)) {
    UniqueFd connection(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) {
      if (errno == EINTR || errno == ECONNABORTED || errno == EAGAIN) continue;
      return system_error("accept");
    }
    Result<ucred> credentials = same_user(connection.get());
    const std::int64_t patience_ns = std::min(deadline_ns, monotonic_ns() + kStrangerPatienceNs);
    Result<ReceivedHello> received =
        credentials.ok() ? receive_hello(connection.get(), patience_ns) : credentials.status();
    // The connection may be a peer's, which does not come again.
    if (received.status().code() == ErrorCode::kSystem) return received.status();
    if (!received.ok() || received->message.token != hello.token) continue;
    if (!received->arena_fd.valid()) return no_descriptor_left("linking ranks of one host: the arena of a peer");
    if (Status status = send_hello(connection.get(), hello, hello.token); !status.ok()) {
      return about_peer(status, static_cast<int>(received->message.rank));
    }
    return LinkedPeer{static_cast<int>(received->message.rank),
                      std::make_unique<PeerLink>(std::move(connection), open_process(credentials->pid)),
                      std::move(received->arena_fd)};
  }
  return Status(ErrorCode::kTimeout, "linking ranks of one host: not every rank connected in time");
}

Result<OpenedLink> open_link(const std::string& name, int peer_rank, const LinkToken& peer_token,
                             const LinkHello& hello) {
  UniqueFd connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!connection.valid()) return system_error("socket");
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  int failed = 0;
  do {
    failed = connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length);
  } while (failed != 0 && errno == EINTR);
  if (failed != 0 && errno == EAGAIN) {
    return Status(ErrorCode::kSystem,
                  fmt::format("linking ranks of one host: the backlog of rank {} is full; raise sysctl "
                              "net.core.somaxconn to the number of ranks of a host, or more",
                              peer_rank),
                  peer_rank);
  }
  if (failed != 0 && errno != ECONNREFUSED) return system_error("connect");
  if (failed != 0) {
    return Status(ErrorCode::kTransport,
                  fmt::format("linking ranks of one host: connecting to rank {} failed: {}; ranks must share a network "
                              "namespace",
                              peer_rank, std::strerror(ECONNREFUSED)),
                  peer_rank);
  }
  Result<ucred> credentials = same_user(connection.get());
  if (!credentials.ok()) return credentials.status();
  if (Status status = send_hello(connection.get(), hello, peer_token); !status.ok()) {
    return about_peer(status, peer_rank);
  }
  return OpenedLink{peer_rank, std::move(connection), open_process(credentials->pid)};
}

Result<LinkedPeer> await_answer(OpenedLink opened, std::int64_t deadline_ns) {
  Result<ReceivedHello> received = receive_hello(opened.socket.get(), deadline_ns);
  if (!received.ok()) return about_peer(received.status(), opened.peer_rank);
  if (!received->arena_fd.valid()) return no_descriptor_left("linking ranks of one host: the arena of a peer");
  if (received->message.rank != opened.peer_rank) {
    return Status(ErrorCode::kTransport, fmt::format("linking ranks of one host: rank {} answered as rank {}",
                                                     opened.peer_rank, received->message.rank));
  }
  return LinkedPeer{opened.peer_rank, std::make_unique<PeerLink>(std::move(opened.socket), std::move(opened.process)),
                    std::move(received->arena_fd)};
}

}  // namespace ferry::node
