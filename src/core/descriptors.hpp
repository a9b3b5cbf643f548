#ifndef FERRY_CORE_DESCRIPTORS_HPP
#define FERRY_CORE_DESCRIPTORS_HPP

/// Exhaustion of file descriptors: its detection, and its report with the limit and the remedy.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/unique_fd.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Whether `error`, an errno value, means that this process (EMFILE), this user (ETOOMANYREFS: descriptors in flight
/// through sockets) or this machine (ENFILE) has no file descriptors left.
bool is_out_of_descriptors(int error);

/// Text for a message: "file descriptors: limit 16, needs about 21; raise it (ulimit -n)". `num_missing`: descriptors
/// needed beyond the limit.
std::string describe_descriptor_limit(int error, std::int64_t num_missing);

/// Reserves `count` descriptors, so that this process can open as many later. Dropping the result frees them.
/// @errors kSystem: `what` needs more descriptors than there are
Result<std::vector<UniqueFd>> reserve_descriptors(std::int64_t count, std::string_view what);

}  // namespace ferry

#endif  // FERRY_CORE_DESCRIPTORS_HPP
