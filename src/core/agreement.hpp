#ifndef FERRY_CORE_AGREEMENT_HPP
#define FERRY_CORE_AGREEMENT_HPP

/// Checks that all ranks make the same call. Each rank describes its call in a CallRecord; a backend gives every rank
/// all records and calls check_agreement, which returns the same Status with the same message on every rank.

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry {

enum class Operation : std::int32_t {
  kRoute = 0,
  kDispatch = 1,
  kCombine = 2,
  kLatencyDispatch = 3,
  kLatencyCombine = 4,
  kDestroy = 5,
};

std::string_view to_string(Operation operation);

/// Whether the record of such a call carries a placement digest as its message, provided that its own checks passed.
constexpr bool has_placement_digest(Operation operation) {
  return operation == Operation::kRoute || operation == Operation::kLatencyDispatch;
}

/// Largest number of values that ranks compare in one call.
inline constexpr std::size_t kMaxAgreedFields = 14;
/// Added to the field of a placement's choice if the placement has allow_homeless. A record has no room for one more
/// field where it is sent between nodes in latency mode (kFarHeaderBytes).
inline constexpr std::int64_t kHomelessBit = 256;
/// Room for the error message of a call that failed its rank's own checks; longer messages are cut.
inline constexpr std::size_t kCallMessageBytes = 640;

/// One rank's call, as plain bytes that can be in shared memory.
struct CallRecord {
  Operation operation = Operation::kRoute;
  ErrorCode code = ErrorCode::kOk;  ///< result of the rank's own checks
  std::int32_t num_fields = 0;
  std::int32_t message_bytes = 0;
  std::array<std::int64_t, kMaxAgreedFields> fields{};  ///< must be equal on all ranks; named by field_names()
  /// Error of the call's own checks; without an error its placement digest, if has_placement_digest(operation).
  std::array<char, kCallMessageBytes> message{};

  /// Copies everything but the unused end of the message, which is most of a record.
  void assign(const CallRecord& other);
  /// Describe a call that failed its own checks.
  void set_status(const Status& status);
};

/// Names of CallRecord::fields of an operation, in order.
std::span<const std::string_view> field_names(Operation operation);

/// Ok if every rank's checks passed and all made the same call; otherwise the lowest rank's error, or the first
/// difference from the lowest rank, naming both ranks and both values. Records of ranks that take no part are null.
Status check_agreement(std::span<const CallRecord* const> records);

}  // namespace ferry

#endif  // FERRY_CORE_AGREEMENT_HPP
