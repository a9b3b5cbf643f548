#ifndef FERRY_TOOLS_DEMO_LATENCY_RANK_HPP
#define FERRY_TOOLS_DEMO_LATENCY_RANK_HPP

#include "demo/demo_run.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

/// Runs the layer in latency mode as one rank: one step after another, each with a few tokens of this rank, like an
/// engine that decodes. Both calls are split:
///
///   send dispatch | router of the next step | receive | experts | send combine | count rows | receive
Status run_latency_demo_rank(const DemoPlan& plan, RankContext& context);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_LATENCY_RANK_HPP
