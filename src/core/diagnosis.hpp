#ifndef FERRY_CORE_DIAGNOSIS_HPP
#define FERRY_CORE_DIAGNOSIS_HPP

/// Cause of a hung or broken group, from the records of its ranks. A pure function: it reads no memory but its
/// arguments.
///
/// Each rank that waits, or has failed, points at ranks that it misses. At fault is a missing rank that does not wait
/// itself: its process has ended or is stopped, it makes another call, it has not made the call yet, its GPU has not
/// begun it, or it has done its part and the network has not delivered it. Where several ranks fit, the first kind in
/// that order is the cause, and among equals the rank that most others miss.

#include <cstdint>

#include "ferry/recorded_calls.hpp"

namespace ferry {

Diagnosis diagnose(const RecordedGroup& group);

}  // namespace ferry

#endif  // FERRY_CORE_DIAGNOSIS_HPP
