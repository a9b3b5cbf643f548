#ifndef FERRY_CORE_EXPERT_PLACEMENT_HPP
#define FERRY_CORE_EXPERT_PLACEMENT_HPP

/// Which rank owns each expert, as calls take it from their options, and what every call needs to know about it.
/// Programs use one placement for a long time, so the latest is kept: checking and hashing it would be a tenth of a
/// call's time.

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/agreement.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

struct ExpertPlacement {
  std::vector<std::int32_t> expert_to_rank;  ///< [E]
  std::int64_t num_local_experts = 0;        ///< of this rank
  std::int64_t hash = 0;                     ///< equal maps give equal numbers on every rank
  std::vector<char> digest;                  ///< see placement_digest.hpp

  /// Writes the digest into the record of a call that passed its checks.
  void describe(CallRecord& record) const;
};

class ExpertPlacements {
 public:
  ExpertPlacements(int rank, int num_ranks) : rank_(rank), num_ranks_(num_ranks) {}

  /// `num_experts` is positive and within core's bound; `expert_to_rank` as RouteOptions has it. `operation` begins the
  /// message of an error.
  /// @errors kInvalidArgument
  Result<std::shared_ptr<const ExpertPlacement>> find(std::string_view operation, std::int64_t num_experts,
                                                      const std::vector<std::int32_t>& expert_to_rank);

 private:
  Status check(std::string_view operation, std::int64_t num_experts,
               const std::vector<std::int32_t>& expert_to_rank) const;

  int rank_;
  int num_ranks_;
  bool latest_is_default_ = false;
  std::shared_ptr<const ExpertPlacement> latest_;
};

}  // namespace ferry

#endif  // FERRY_CORE_EXPERT_PLACEMENT_HPP
