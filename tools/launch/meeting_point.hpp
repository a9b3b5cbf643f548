#ifndef FERRY_TOOLS_LAUNCH_MEETING_POINT_HPP
#define FERRY_TOOLS_LAUNCH_MEETING_POINT_HPP

#include <cstdint>
#include <string>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::launch {

/// Meeting point of ranks that one process starts: a fresh secret and a socket that already listens on a free port of
/// the loopback interface, so that no other process can take the port before rank 0 accepts on it. `listen_fd` is not
/// closed automatically: rank 0's bootstrap takes it, and every other process that inherited it calls `close_listener`,
/// so that the port is free again when rank 0 ends.
struct MeetingPoint {
  std::string secret;  ///< 256 random bits, 64 hexadecimal digits
  std::uint16_t port = 0;
  int listen_fd = -1;

  /// @errors kSystem
  static Result<MeetingPoint> open();

  /// Options of create_tcp_bootstrap for `rank`.
  TcpBootstrapOptions options(int rank, int num_ranks, std::int64_t timeout_ns) const;
  void close_listener() const;
};

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_MEETING_POINT_HPP
