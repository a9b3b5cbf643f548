#ifndef FERRY_TOOLS_DEMO_RANK_STEPS_HPP
#define FERRY_TOOLS_DEMO_RANK_STEPS_HPP

/// Steps of a rank of the demonstration that all modes share.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "demo/demo_run.hpp"
#include "demo/expert_homes.hpp"
#include "device/rank_device.hpp"
#include "ferry/group.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

/// Number of FP8 scales of a row.
std::int64_t num_scales(const LayerShape& shape);

template <typename T>
std::size_t bytes_of(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows * columns) * sizeof(T);
}

inline std::uint16_t* as_bfloat16(const MirroredBlock& block) { return reinterpret_cast<std::uint16_t*>(block.host()); }

Result<std::shared_ptr<Group>> create_group(const DemoPlan& plan, RankContext& context, const RankDevice& device);

/// Runs every expert of this rank on its rows: x -> y, both [num_recv_rows, H] bf16 in host memory. With `homes` the
/// Routing's experts are places.
Status run_experts(const DemoPlan& plan, const Routing& routing, const ExpertHomes* homes, const std::uint16_t* x,
                   std::uint16_t* y);

/// Adds the rows of a Routing to the rank's figures. With `homes` its experts are places.
void add_routing(const Routing& routing, int rank, const ExpertHomes* homes, MutableRankArea* area);

/// Rows that leave this rank's node in a dispatch and return in a combine, from the ids alone.
std::int64_t count_wire_rows(const DemoPlan& plan, int rank, std::span<const std::int64_t> topk_idx,
                             std::int64_t num_experts);

/// Adds the bytes that dispatch and combine must send between nodes for this many rows.
void add_formulas(const DemoPlan& plan, std::int64_t num_wire_rows, MutableRankArea* area);

/// Records how long this rank's calls have waited for each rank so far.
void keep_waits(const Group& group, MutableRankArea* area);

/// Spoils the result of the token that the user chose, if it belongs to this rank.
void spoil(const DemoPlan& plan, int rank, MutableRankArea* area);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_RANK_STEPS_HPP
