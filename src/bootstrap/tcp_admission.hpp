#ifndef FERRY_BOOTSTRAP_TCP_ADMISSION_HPP
#define FERRY_BOOTSTRAP_TCP_ADMISSION_HPP

/// Formation of the group by rank 0: the assignment of authenticated connections to ranks.

#include <string>
#include <vector>

#include "bootstrap/channel.hpp"
#include "bootstrap/vigil.hpp"
#include "core/unique_fd.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// Waits for ranks 1 … num_ranks - 1, sends them the start frame, and returns their channels in rank order. On failure
/// all connected ranks, and those that connect within a short grace period, receive the error.
/// @errors kInvalidArgument: ranks disagree, or two processes claim one rank; kTimeout: names the lowest missing rank
Result<std::vector<Channel>> admit_ranks(const TcpBootstrapOptions& options, UniqueFd listener,
                                         const std::string& version, const Vigil& vigil);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_ADMISSION_HPP
