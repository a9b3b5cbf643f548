#include "core/tile_signals.hpp"

#include <fmt/format.h>

#include <array>

#include "core/checks.hpp"
#include "core/overlap.hpp"

namespace ferry {
namespace {

constexpr std::string_view kCombine = "latency_combine";

}  // namespace

Status check_signals(const TileSignals& signals, std::int64_t num_local_experts, std::int64_t num_slab_rows,
                     const Rows& out_x) {
  if (!signals.present()) return {};
  const std::int64_t tile_rows = signals.tile_rows;
  if (tile_rows < 1) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: signals.tile_rows is {}, expected the number of rows that one word reports, at "
                              "least 1",
                              kCombine, tile_rows));
  }
  if (signals.threshold < 1) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: signals.threshold is {}, expected the value of a finished tile's word, at least 1",
                              kCombine, signals.threshold));
  }
  // A rank without experts has no rows, and its words no memory: any number of tiles is right.
  const std::int64_t slab_capacity = num_local_experts > 0 ? num_slab_rows / num_local_experts : 0;
  const std::int64_t num_words = num_local_experts > 0 ? num_tiles(slab_capacity, tile_rows) : signals.words.extent(1);
  if (Status status =
          check_table("latency_combine: signals.words", signals.words, {num_local_experts, num_words}, {DType::kInt32});
      !status.ok()) {
    return Status(status.code(), fmt::format("{} (a word for each {} of an expert's {} rows)", status.message(),
                                             tile_rows, slab_capacity));
  }
  const std::array outputs{Footprint("output x", out_x)};
  const std::array inputs{Footprint("signals.words", signals.words)};
  return check_overlap(kCombine, outputs, inputs);
}

Status check_signals_reach(const TileSignals& signals, bool verifies, bool masks) {
  if (!signals.present() || (!verifies && !masks)) return {};
  return Status(ErrorCode::kUnsupported,
                fmt::format("{}: signals are given in a group with GroupOptions::{}, expected one without; order the "
                            "computation of all rows before the call, and give no signals",
                            kCombine, verifies ? "verify" : "mask_lost_ranks"));
}

std::string describe(const UnfinishedTile& tile) {
  constexpr double kNsPerMillisecond = 1e6;
  return fmt::format(
      "{}: tile {} of local expert {} on rank {} did not finish within {:.0f} ms: its word is {}, "
      "expected at least {}; compute the rows where they can finish while the combine runs, and zero "
      "the words before; then destroy this group and create a new one",
      kCombine, tile.tile, tile.local_expert, tile.rank, static_cast<double>(tile.timeout_ns) / kNsPerMillisecond,
      tile.word, tile.threshold);
}

}  // namespace ferry
