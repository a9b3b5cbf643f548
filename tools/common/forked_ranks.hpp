#ifndef FERRY_TOOLS_COMMON_FORKED_RANKS_HPP
#define FERRY_TOOLS_COMMON_FORKED_RANKS_HPP

/// The parent's side of ranks that are forked: starts them, watches them, ends them.

#include <cstddef>
#include <functional>
#include <span>

#include "common/launcher.hpp"

namespace ferry::tools {

/// Fork options.plan.num_ranks children, run `rank_main` in each, and wait for all. See run_ranks.
Result<SharedArea> run_forked_ranks(const RunOptions& options, const std::function<Status(RankContext&)>& rank_main);

/// The part of the area that is `rank`'s result.
std::span<std::byte> forked_rank_result(const SharedArea& area, const RunOptions& options, int rank);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_COMMON_FORKED_RANKS_HPP
