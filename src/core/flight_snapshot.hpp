#ifndef FERRY_CORE_FLIGHT_SNAPSHOT_HPP
#define FERRY_CORE_FLIGHT_SNAPSHOT_HPP

/// Readers of flight records. A record may be of a process that is writing it, has ended, or is faulty: whatever it
/// holds, the result is well-formed, and calls that are being overwritten are left out.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/flight_record.hpp"
#include "ferry/recorded_calls.hpp"

namespace ferry {

/// The record's rank, its last `num_calls` calls at most, and its waits; `has_left` is not in the record.
RecordedRank take_snapshot(const FlightRecord& record, std::size_t num_calls = kNumRecordedCalls);

/// Whether all ranks make this call of RecordedCall::operation together.
bool is_collective(std::string_view operation);

/// "rank 3", "ranks 1, 2".
std::string name_ranks(std::span<const int> ranks);

}  // namespace ferry

#endif  // FERRY_CORE_FLIGHT_SNAPSHOT_HPP
