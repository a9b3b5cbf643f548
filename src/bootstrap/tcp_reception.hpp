#ifndef FERRY_BOOTSTRAP_TCP_RECEPTION_HPP
#define FERRY_BOOTSTRAP_TCP_RECEPTION_HPP

/// Rank 0's side of forming the group.

#include <cstdint>
#include <string>
#include <vector>

#include "bootstrap/channel.hpp"
#include "bootstrap/socket.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

struct ReceptionParams {
  UniqueFd listener;
  int num_ranks = 0;
  std::string version;
  std::string secret;
  std::int64_t timeout_ns = 0;
};

/// Waits for ranks 1 … num_ranks - 1, tells them to start, and returns their channels in rank order. One poll loop
/// serves the listener, the strangers and the ranks that have arrived. When it fails, all ranks that have connected,
/// and those that still do within a short grace period, have been told the same.
/// @errors kInvalidArgument: ranks disagree, or two claim one number; kTimeout: naming the lowest that is missing
Result<std::vector<Channel>> receive_ranks(ReceptionParams params);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_RECEPTION_HPP
