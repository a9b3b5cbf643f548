#ifndef FERRY_NUMERIC_WITHOUT_EXCEPTIONS_HPP
#define FERRY_NUMERIC_WITHOUT_EXCEPTIONS_HPP

#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "ferry/status.hpp"

namespace ferry::numeric {

/// Result of `call`, a Status or a Result. kSystem if memory is short: what containers throw then ends here.
/// @param name  public function, the first word of the message
template <typename Call>
std::invoke_result_t<Call> without_exceptions(std::string_view name, Call&& call) {
  try {
    return std::forward<Call>(call)();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  return Status(ErrorCode::kSystem, std::string(name) + ": out of memory; pass less at a time, or free memory");
}

}  // namespace ferry::numeric

#endif  // FERRY_NUMERIC_WITHOUT_EXCEPTIONS_HPP
