#ifndef FERRY_CORE_FORKS_HPP
#define FERRY_CORE_FORKS_HPP

#include <string_view>

#include "ferry/status.hpp"

namespace ferry {

/// How often the processes from which this one descends have forked since the library was loaded. Objects that share
/// memory or connections with other ranks keep what it was when they were made: a process in which it is more has a
/// copy, by which it must not act as that rank.
int num_forks();

/// What calls on such a copy return.
Status refuse_copy(std::string_view operation);

}  // namespace ferry

#endif  // FERRY_CORE_FORKS_HPP
