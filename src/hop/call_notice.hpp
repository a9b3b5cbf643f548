#ifndef FERRY_HOP_CALL_NOTICE_HPP
#define FERRY_HOP_CALL_NOTICE_HPP

/// What ranks tell their rail peers besides payload: which call they make, and why they gave up. Raw bytes that a peer
/// wrote as it liked, verdicts in memory that it can write at any moment, so whoever uses them takes a copy here, once,
/// and looks at that alone.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "core/agreement.hpp"
#include "ferry/status.hpp"
#include "node/control_block.hpp"

namespace ferry::hop {

/// What a rank says of its call.
struct CallNotice {
  std::uint64_t call = 0;
  CallRecord record;
  std::int64_t max_recv_rows = 0;  ///< route
  std::int64_t num_entries = 0;    ///< route: T * K
};
static_assert(std::is_trivially_copyable_v<CallNotice>, "peers read it as it lies in memory");

/// Takes any bytes, even such as change meanwhile. A notice that it accepts is of call number `call`, its enumerators
/// exist, its numbers of rows and entries fit the i32 tables of route, and its message, if the call failed, is plain
/// text inside of its room. `*notice` stays as it was where a notice is refused, and so does what it has of a
/// message beyond the new one's end.
/// @errors kTransport, in words that follow "rank 3 …"
Status parse_call_notice(std::span<const std::byte, sizeof(CallNotice)> bytes, std::uint64_t call, CallNotice* notice);

/// A verdict whose code is a failure's, whose culprit is one of `num_ranks` or nobody, and whose message is plain text
/// inside of its room, whatever the bytes are: its sender has given up in any case.
node::Verdict usable_verdict(std::span<const std::byte, sizeof(node::Verdict)> bytes, int num_ranks);

}  // namespace ferry::hop

#endif  // FERRY_HOP_CALL_NOTICE_HPP
