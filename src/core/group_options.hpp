#ifndef FERRY_CORE_GROUP_OPTIONS_HPP
#define FERRY_CORE_GROUP_OPTIONS_HPP

/// First exchange of a group's ranks: they check each other's options and version, and agree on a backend and a
/// topology.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/backend.hpp"

namespace ferry {

struct AgreedOptions {
  Topology topology;
  const BackendFactory* factory = nullptr;
  std::string ring_memory = "auto";            ///< GroupOptions::ring_memory, or the variable that replaces it
  int num_reserved_sms = kDefaultReservedSms;  ///< GroupOptions::num_reserved_sms, or the variable that replaces it
  std::int64_t network_poll_ns = 0;            ///< nanoseconds, or kAlwaysPoll
  std::vector<TuningTable> tuning;             ///< this rank's tables, which may differ between ranks
};

/// Collective. Every rank gets the same result: agreed options, or the first disagreement with the same message, or the
/// error of a rank whose `my_status` is one. `bootstrap`: of all ranks, absent ones too (core/present_ranks.hpp).
Result<AgreedOptions> agree_on_options(Bootstrap& bootstrap, const GroupOptions& options, const Status& my_status = {});

/// Deadline of exchanges in which ranks compare their options: peers must receive this rank's error even if the error
/// is its timeout.
std::int64_t time_to_agree_ns(std::int64_t timeout_ns);

}  // namespace ferry

#endif  // FERRY_CORE_GROUP_OPTIONS_HPP
