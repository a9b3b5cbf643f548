#ifndef FERRY_C_STATUS_HPP
#define FERRY_C_STATUS_HPP

/// Statuses as handles, and the barrier that no exception passes.

#include <utility>

#include "ferry/ferry.h"
#include "ferry/status.hpp"

struct ferry_status {  // NOLINT(readability-identifier-naming)
  ferry::Status value;
};

namespace ferry::c {

/// Null if ok. If there is no memory for a status, a static one that reports this.
ferry_status* to_handle(Status status) noexcept;

/// Handle for the exception that is being handled, which left the library or a callback of the program.
ferry_status* handle_of_exception() noexcept;

/// kInvalidArgument with the message "<call>: <what>".
Status invalid(const char* call, const char* what);

/// Result of `call`, or the exception that it throws, as a handle.
template <typename Call>
ferry_status* guarded(Call&& call) noexcept {
  try {
    return to_handle(std::forward<Call>(call)());
  } catch (...) {
    return handle_of_exception();
  }
}

/// Result of `call`, or `otherwise` if it throws, for functions that return no status.
template <typename Value, typename Call>
Value guarded_or(Value otherwise, Call&& call) noexcept {
  try {
    return std::forward<Call>(call)();
  } catch (...) {
    return otherwise;
  }
}

}  // namespace ferry::c

#endif  // FERRY_C_STATUS_HPP
