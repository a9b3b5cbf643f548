#ifndef FERRY_CORE_PRESENT_RANKS_HPP
#define FERRY_CORE_PRESENT_RANKS_HPP

/// Groups of which some ranks have no process (GroupOptions::present_ranks).

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Whether `rank` has a process.
bool is_present(const GroupOptions& options, int rank);
/// Whether some rank has none.
bool has_absent_ranks(const GroupOptions& options);

/// Checks num_ranks and present_ranks against the bootstrap of the ranks that are present.
/// @errors kInvalidArgument
Status check_present_ranks(const GroupOptions& options, const Bootstrap& bootstrap);

/// All ranks of a group, by way of the bootstrap of those that are present. An absent rank's message is what
/// gather_or_fail takes for a rank without an error that has nothing to say.
class PresentRanks final : public Bootstrap {
 public:
  /// Both must outlive it, and have passed check_present_ranks.
  PresentRanks(Bootstrap& members, const GroupOptions& options);

  int rank() const override { return rank_of(members_.rank()); }
  int num_ranks() const override { return num_ranks_; }
  std::string local_address() const override { return members_.local_address(); }
  /// For messages of gather_or_fail alone. Errors name ranks of the group.
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override;

 private:
  int rank_of(int member) const { return present_.empty() ? member : present_[static_cast<std::size_t>(member)]; }

  Bootstrap& members_;
  const std::vector<int>& present_;
  int num_ranks_;
};

}  // namespace ferry

#endif  // FERRY_CORE_PRESENT_RANKS_HPP
