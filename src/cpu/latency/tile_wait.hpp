#ifndef FERRY_CPU_LATENCY_TILE_WAIT_HPP
#define FERRY_CPU_LATENCY_TILE_WAIT_HPP

#include "call/group_state.hpp"
#include "core/backend.hpp"

namespace ferry::cpu {

/// Waits until each tile that holds a received row is finished (TileSignals); all rows may be read afterwards. Breaks
/// the group if no tile finishes for its deadline.
/// @errors kTimeout; those of a wait for ranks
Status await_tiles(const LatencyCombineCall& call, call::GroupState& state);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_LATENCY_TILE_WAIT_HPP
