#ifndef FERRY_TOOLS_RUN_HOSTS_HPP
#define FERRY_TOOLS_RUN_HOSTS_HPP

#include <cstdint>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::tools {

/// Number of hosts on which the ranks run, where a launcher does not say. Collective. Hosts differ as they do for
/// GroupOptions::ranks_per_node = 0: in the machine or in the network that their processes see.
/// @errors as Bootstrap::all_gather
Result<int> find_num_hosts(Bootstrap& bootstrap, std::int64_t timeout_ns);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_HOSTS_HPP
