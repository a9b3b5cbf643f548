#ifndef FERRY_TOOLS_LAUNCH_LISTENING_SOCKETS_HPP
#define FERRY_TOOLS_LAUNCH_LISTENING_SOCKETS_HPP

#include <sys/types.h>

#include <string>
#include <vector>

namespace ferry::launch {

/// TCP socket of a process that waits for connections.
struct ListeningSocket {
  std::string address;  ///< numeric; "0.0.0.0" and "::": all addresses of the host
  int port = 0;
  bool loopback = false;  ///< other hosts cannot reach it
};

/// Listening sockets of a process of this user, or of any process as root. Empty if /proc does not show them.
std::vector<ListeningSocket> listening_sockets(pid_t pid);

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_LISTENING_SOCKETS_HPP
