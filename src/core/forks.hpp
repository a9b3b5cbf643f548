#ifndef FERRY_CORE_FORKS_HPP
#define FERRY_CORE_FORKS_HPP

#include <string_view>

#include "ferry/status.hpp"

namespace ferry {

/// Number of forks that lead from the process that loaded the library to this one. Objects that share memory or
/// connections with other ranks store the number at their creation: a process with a larger number has a copy, and must
/// not act as that rank.
int num_forks();

/// Result of calls on such a copy.
Status refuse_copy(std::string_view operation);

}  // namespace ferry

#endif  // FERRY_CORE_FORKS_HPP
