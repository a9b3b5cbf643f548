#ifndef FERRY_TOOLS_DEMO_DEMO_RANK_HPP
#define FERRY_TOOLS_DEMO_DEMO_RANK_HPP

#include "demo/demo_run.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

/// Runs the layer as one rank: gate, route, dispatch, experts, combine. Leaves figures and outputs in the context's
/// result.
Status run_demo_rank(const DemoPlan& plan, RankContext& context);

/// `x` [rows, H] bf16 as experts receive it: unchanged, or rounded by FP8 and its scales.
Result<std::vector<std::uint16_t>> round_as_payload(const DemoPlan& plan, std::vector<std::uint16_t> x);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_DEMO_RANK_HPP
