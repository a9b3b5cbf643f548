#ifndef FERRY_MEMBERSHIP_JOINING_HPP
#define FERRY_MEMBERSHIP_JOINING_HPP

/// How a process becomes a member of a view that others make.

#include "membership/founding.hpp"

namespace ferry::membership {

/// @errors those of Membership::join
Result<Founded> join(const JoinOptions& options);

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_JOINING_HPP
