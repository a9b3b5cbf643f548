#ifndef FERRY_TOOLS_DEMO_RANK_STEPS_HPP
#define FERRY_TOOLS_DEMO_RANK_STEPS_HPP

/// What a rank of the demonstration does in every mode.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "demo/demo_run.hpp"
#include "device/rank_device.hpp"
#include "ferry/group.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

/// FP8 scales of a row.
std::int64_t num_scales(const LayerShape& shape);

template <typename T>
std::size_t bytes_of(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows * columns) * sizeof(T);
}

inline std::uint16_t* as_bfloat16(const MirroredBlock& block) { return reinterpret_cast<std::uint16_t*>(block.host()); }

Result<std::shared_ptr<Group>> create_group(const DemoPlan& plan, RankContext& context, const RankDevice& device);

/// Every expert of this rank on its rows: x -> y, both [num_recv_rows, H] bf16 in host memory.
void run_experts(const DemoPlan& plan, const Routing& routing, const std::uint16_t* x, std::uint16_t* y);

/// Add the rows of a Routing to the rank's figures.
void add_routing(const Routing& routing, int rank, MutableRankArea* area);

/// Add what dispatch and combine have to send between nodes for these tokens, by the ids alone.
void add_formulas(const DemoPlan& plan, int rank, const Choice& choice, MutableRankArea* area);

/// If the token that a user wants to see fail is this rank's.
void spoil(const DemoPlan& plan, int rank, MutableRankArea* area);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_RANK_STEPS_HPP
