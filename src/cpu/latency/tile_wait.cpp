#include "cpu/latency/tile_wait.hpp"

#include <atomic>

#include "call/wait.hpp"
#include "core/tile_signals.hpp"
#include "node/futex.hpp"

namespace ferry::cpu {
namespace {

/// Finished tiles ring no doorbell. Short beside the exchange itself, and long enough to leave the core to the threads
/// that compute.
constexpr std::int64_t kLongestSleepNs = 20'000;

std::int32_t acquire(const std::int32_t& word) {
  return std::atomic_ref(const_cast<std::int32_t&>(word)).load(std::memory_order_acquire);
}

Status await_tile(const std::int32_t& word, UnfinishedTile& tile, call::GroupState& state) {
  if (acquire(word) >= tile.threshold) return {};
  call::Wait wait(state, "to finish a tile", kLongestSleepNs);
  const std::int64_t begin_ns = node::monotonic_ns();
  while (true) {
    wait.begin_poll();
    tile.word = acquire(word);
    if (tile.word >= tile.threshold) break;
    // It is no other rank whose part is missing.
    if (Status status = wait.idle([](std::vector<int>*) {}); !status.ok()) return status;
    if (node::monotonic_ns() - begin_ns < state.timeout_ns()) continue;
    return state.fail(ErrorCode::kTimeout, tile.rank, describe(tile));
  }
  wait.progressed();  // restarts the deadlines of ranks that wait for this one
  return {};
}

}  // namespace

Status await_tiles(const LatencyCombineCall& call, call::GroupState& state) {
  const TileSignals& signals = call.signals;
  const auto* const words = static_cast<const std::int32_t*>(signals.words.data);
  const std::vector<std::int32_t>& num_rows = call.combine.routing->num_rows_per_local_expert;
  state.set_operation(to_string(call.combine.record.operation));
  UnfinishedTile tile{.rank = state.rank(), .threshold = signals.threshold, .timeout_ns = state.timeout_ns()};
  for (std::size_t local = 0; local < num_rows.size(); ++local) {
    tile.local_expert = static_cast<std::int64_t>(local);
    const std::int64_t num_used_tiles = num_tiles(num_rows[local], signals.tile_rows);
    for (tile.tile = 0; tile.tile < num_used_tiles; ++tile.tile) {
      const std::int64_t word_idx = tile.local_expert * signals.words.extent(1) + tile.tile;
      if (Status status = await_tile(words[word_idx], tile, state); !status.ok()) return status;
    }
  }
  return {};
}

}  // namespace ferry::cpu
