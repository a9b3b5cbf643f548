#ifndef FERRY_CORE_TILE_SIGNALS_HPP
#define FERRY_CORE_TILE_SIGNALS_HPP

/// Checks and errors of ferry::TileSignals, for all backends.

#include <cstdint>
#include <string>

#include "core/backend.hpp"
#include "ferry/latency.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Tiles of `tile_rows` rows that hold `num_rows`. For all C rows of an expert: the words of each expert.
constexpr std::int64_t num_tiles(std::int64_t num_rows, std::int64_t tile_rows) {
  return num_rows / tile_rows + (num_rows % tile_rows != 0 ? 1 : 0);
}

/// Checks the signals, which may be absent, of a combine with `num_slab_rows` rows of all local experts.
Status check_signals(const TileSignals& signals, std::int64_t num_local_experts, std::int64_t num_slab_rows,
                     const Rows& out_x);
/// Whether latency_combine can wait for tiles in a group with these options.
Status check_signals_reach(const TileSignals& signals, bool verifies, bool masks);

/// A tile that latency_combine has waited for in vain.
struct UnfinishedTile {
  int rank = 0;
  std::int64_t local_expert = 0;
  std::int64_t tile = 0;
  std::int32_t word = 0;
  std::int32_t threshold = 0;
  std::int64_t timeout_ns = 0;
};
/// Message of the error.
std::string describe(const UnfinishedTile& tile);

}  // namespace ferry

#endif  // FERRY_CORE_TILE_SIGNALS_HPP
