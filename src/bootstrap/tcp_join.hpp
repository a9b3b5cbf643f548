#ifndef FERRY_BOOTSTRAP_TCP_JOIN_HPP
#define FERRY_BOOTSTRAP_TCP_JOIN_HPP

/// The side of ranks 1 … num_ranks - 1 of forming the group.

#include <cstdint>
#include <string>

#include "bootstrap/channel.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

struct JoinParams {
  int rank = 0;
  int num_ranks = 0;
  std::string host;
  std::uint16_t port = 0;
  std::string version;
  std::string secret;
  std::int64_t timeout_ns = 0;
};

/// Connects to rank 0, again and again until the deadline (it may not be up yet, or busy with strangers), and returns
/// once rank 0 says that all ranks have arrived.
/// @errors what rank 0 says; kTimeout: rank 0 cannot be reached (names the last reason); kPeerLost: it went away
Result<Channel> join_group(const JoinParams& params);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_JOIN_HPP
