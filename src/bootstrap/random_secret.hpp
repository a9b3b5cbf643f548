#ifndef FERRY_BOOTSTRAP_RANDOM_SECRET_HPP
#define FERRY_BOOTSTRAP_RANDOM_SECRET_HPP

/// For a parent that forks its own ranks: a secret and a port that cannot be taken by somebody else in between.

#include <cstdint>
#include <string>

#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// 32 random bytes in hexadecimal, as `openssl rand -hex 32` prints them.
Result<std::string> make_random_secret();

/// A socket that listens on 127.0.0.1 and a free port, written to `port`. For TcpBootstrapOptions::listen_fd of rank 0;
/// the parent and the other ranks close their copies, so that rank 0's death frees the port.
Result<int> listen_on_loopback(std::uint16_t* port);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_RANDOM_SECRET_HPP
