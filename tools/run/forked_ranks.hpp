#ifndef FERRY_TOOLS_RUN_FORKED_RANKS_HPP
#define FERRY_TOOLS_RUN_FORKED_RANKS_HPP

#include <cstddef>
#include <functional>
#include <span>

#include "run/launcher.hpp"

namespace ferry::tools {

/// Forks options.plan.num_ranks ranks, runs `rank_main` in each and waits for all; returns the memory with their
/// results. See run_ranks.
Result<launch::SharedArea> run_forked_ranks(const RunOptions& options,
                                            const std::function<Status(RankContext&)>& rank_main);

/// Part of the area that holds `rank`'s result.
std::span<std::byte> forked_rank_result(const launch::SharedArea& area, const RunOptions& options, int rank);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_FORKED_RANKS_HPP
