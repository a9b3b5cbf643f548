#ifndef FERRY_RAIL_CALL_HEADER_HPP
#define FERRY_RAIL_CALL_HEADER_HPP

/// Messages between rail peers other than payload: the call that a rank makes, and the reason why it gave up. The
/// peer's bytes are not trusted and may change at any moment, so readers copy them once, here, and check the copy.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "core/agreement.hpp"
#include "core/error_record.hpp"
#include "ferry/status.hpp"
#include "plan/carver.hpp"

namespace ferry::rail {

/// Description of one rank's call.
struct CallHeader {
  std::uint64_t call = 0;
  CallRecord record;
  std::int64_t max_recv_rows = 0;  ///< route
  std::int64_t num_entries = 0;    ///< route: T * K
};
static_assert(std::is_trivially_copyable_v<CallHeader>, "peers read its bytes");
/// Distance of the headers of several ranks in one array.
inline constexpr std::size_t kCallHeaderStride =
    (sizeof(CallHeader) + plan::kPartAlignment - 1) / plan::kPartAlignment * plan::kPartAlignment;

/// Accepts any bytes, even if they change meanwhile. A returned header has call number `call`, existing enumerators,
/// numbers of rows and entries that fit the i32 tables of route, and, if the call failed, a message that is plain text
/// within its bounds. `*header` is unchanged if the bytes are refused; so is its message beyond the end of the new one.
/// @errors kTransport; the message completes "rank 3 …"
Status parse_call_header(std::span<const std::byte, sizeof(CallHeader)> bytes, std::uint64_t call, CallHeader* header);

/// Sanitised record: a failure's code, a culprit among `num_ranks` or -1, and a message of plain text within its
/// bounds, for any bytes, because the sender has given up in any case.
ErrorRecord usable_error_record(std::span<const std::byte, sizeof(ErrorRecord)> bytes, int num_ranks);

}  // namespace ferry::rail

#endif  // FERRY_RAIL_CALL_HEADER_HPP
