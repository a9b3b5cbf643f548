#ifndef FERRY_CORE_DESCRIPTORS_HPP
#define FERRY_CORE_DESCRIPTORS_HPP

/// Running out of file descriptors: recognised, and reported with the limit and what to do.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/unique_fd.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Whether `error`, an errno value, says that this process (EMFILE), this user (ETOOMANYREFS, of descriptors on their
/// way through sockets) or this machine (ENFILE) has no file descriptors left.
bool is_out_of_descriptors(int error);

/// For a message: "file descriptors: limit 16, needs about 21; raise it (ulimit -n)". `num_missing`: how many more than
/// the limit were needed.
std::string describe_descriptor_limit(int error, std::int64_t num_missing);

/// So many descriptors that this process can open later, since nothing else gets them meanwhile. Dropping the result
/// makes them free.
/// @errors kSystem: `what` needs more than there are
Result<std::vector<UniqueFd>> reserve_descriptors(std::int64_t count, std::string_view what);

}  // namespace ferry

#endif  // FERRY_CORE_DESCRIPTORS_HPP
