#ifndef FERRY_BOOTSTRAP_TCP_ADMISSION_HPP
#define FERRY_BOOTSTRAP_TCP_ADMISSION_HPP

/// How rank 0 forms the group: which authenticated connection becomes which rank.

#include <string>
#include <vector>

#include "bootstrap/channel.hpp"
#include "core/unique_fd.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// Waits for ranks 1 … num_ranks - 1, sends them the start frame, and returns their channels in rank order. If this
/// fails, all ranks that are connected, and those that still connect within a short grace period, receive the error.
/// @errors kInvalidArgument: ranks disagree, or two claim one number; kTimeout: names the lowest missing rank
Result<std::vector<Channel>> admit_ranks(const TcpBootstrapOptions& options, UniqueFd listener,
                                         const std::string& version);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_ADMISSION_HPP
