#ifndef FERRY_CORE_OTHER_CALL_HPP
#define FERRY_CORE_OTHER_CALL_HPP

/// Search for the first call number under which ranks of a hung or broken group made different calls. On GPUs hosts go
/// on after such a call, so their latest calls may be alike.

#include <optional>

#include "ferry/recorded_calls.hpp"

namespace ferry {

/// Diagnosis of kind kOtherCall. None if ranks made the same calls as far as their records go back, or if the group has
/// gone on since they differed: a later call of all ranks has succeeded, or a rank got the error and made more calls.
std::optional<Diagnosis> find_other_call(const RecordedGroup& group);

}  // namespace ferry

#endif  // FERRY_CORE_OTHER_CALL_HPP
