#ifndef FERRY_CORE_ERROR_RECORD_HPP
#define FERRY_CORE_ERROR_RECORD_HPP

/// Reason why a rank gave up the group, as plain bytes that can be in shared memory or cross the network.

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ferry/status.hpp"

namespace ferry {

/// Room for the message; longer messages are cut.
inline constexpr std::size_t kErrorMessageBytes = 512;

struct ErrorRecord {
  ErrorCode code = ErrorCode::kOk;
  std::int32_t culprit = -1;  ///< rank at fault, -1: none
  std::int32_t message_bytes = 0;
  std::array<char, kErrorMessageBytes> message{};
};
static_assert(std::is_trivially_copyable_v<ErrorRecord>);

/// An error that another rank reported.
struct ReportedError {
  int reporter = -1;
  ErrorRecord record;
};

}  // namespace ferry

#endif  // FERRY_CORE_ERROR_RECORD_HPP
