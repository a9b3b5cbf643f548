#ifndef FERRY_C_STATUS_HPP
#define FERRY_C_STATUS_HPP

/// Statuses as handles, and the wall that no exception passes.

#include <utility>

#include "ferry/ferry.h"
#include "ferry/status.hpp"

struct ferry_status {  // NOLINT(readability-identifier-naming)
  ferry::Status value;
};

namespace ferry::c {

/// Null if ok. Without memory for a status, the one that says so.
ferry_status* to_handle(Status status) noexcept;

/// Of the exception that is being handled: it left the library, or a callback of the program.
ferry_status* handle_of_exception() noexcept;

/// kInvalidArgument with the message "<call>: <what>".
Status invalid(const char* call, const char* what);

/// What `call` returns, or throws, as a handle.
template <typename Call>
ferry_status* guarded(Call&& call) noexcept {
  try {
    return to_handle(std::forward<Call>(call)());
  } catch (...) {
    return handle_of_exception();
  }
}

/// What `call` returns, or `otherwise` if it throws: of functions that return no status.
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
