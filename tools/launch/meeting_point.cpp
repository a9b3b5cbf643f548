#include "launch/meeting_point.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace ferry::launch {

namespace {

Status system_error(const char* what) {
  return {ErrorCode::kSystem, fmt::format("{}: {}", what, std::strerror(errno))};
}

Status make_secret(std::string* secret) {
  std::array<unsigned char, 32> random{};
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    return system_error("cannot get random bytes for the group's secret");
  }
  for (unsigned char byte : random) *secret += fmt::format("{:02x}", byte);
  return {};
}

Status listen_on_loopback(MeetingPoint* point) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return system_error("cannot make a TCP socket");
  const int enabled = 1;  // lets a later rank 0 listen on the port while connections of an earlier one are in TIME_WAIT
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &enabled, sizeof enabled);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t address_bytes = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(fd, generic, address_bytes) != 0 || listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, generic, &address_bytes) != 0) {
    const Status status = system_error("cannot listen on 127.0.0.1; bring the loopback interface up");
    close(fd);
    return status;
  }
  point->listen_fd = fd;
  point->port = ntohs(address.sin_port);
  return {};
}

}  // namespace

Result<MeetingPoint> MeetingPoint::open() {
  MeetingPoint point;
  if (Status status = make_secret(&point.secret); !status) return status;
  if (Status status = listen_on_loopback(&point); !status) return status;
  return point;
}

TcpBootstrapOptions MeetingPoint::options(int rank, int num_ranks, std::int64_t timeout_ns) const {
  TcpBootstrapOptions options;
  options.rank = rank;
  options.num_ranks = num_ranks;
  options.port = port;
  options.secret = secret;
  options.timeout_ns = timeout_ns;
  if (rank == 0) options.listen_fd = listen_fd;
  return options;
}

void MeetingPoint::close_listener() const { close(listen_fd); }

}  // namespace ferry::launch
