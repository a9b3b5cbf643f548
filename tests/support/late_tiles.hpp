#ifndef FERRY_TESTS_LATE_TILES_HPP
#define FERRY_TESTS_LATE_TILES_HPP

/// Rows of a latency_combine that become final tile by tile, also while the call runs.

#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "ferry/latency.hpp"
#include "support/exchange_case.hpp"
#include "support/group_memory.hpp"

namespace ferry::test {

class LateTiles {
 public:
  /// A tile that holds a received row.
  struct Tile {
    std::int64_t local_expert = 0;
    std::int64_t index = 0;
  };

  /// Takes the rows in use out of `x`, a rank's input of a combine of this case, and makes zeroed words for their
  /// tiles. `x` must outlive this object.
  LateTiles(const Group& group, const PreparedCase& prepared, int rank, const ConstTensorView& x,
            std::int64_t tile_rows, std::int32_t threshold);

  const TileSignals& signals() const { return signals_; }
  const std::vector<Tile>& tiles() const { return tiles_; }

  /// Puts a tile's rows back, and then raises its word to the threshold in several steps, of which the first comes
  /// before its rows.
  void finish(const Tile& tile);
  /// Raises a tile's word to one below the threshold.
  void almost_finish(const Tile& tile);
  /// Finishes all tiles, in random order.
  void finish_all();
  /// Finishes all tiles on a thread of its own, some time after it has begun. Join it before this object ends.
  std::thread finish_late();
  /// Makes the rows and words as they were when this object was made.
  void reset();

 private:
  std::byte* word_at(const Tile& tile);
  void set_word(const Tile& tile, std::int32_t value);
  /// Bytes of the tile's rows in use, within `rows_`.
  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
  };
  Range range_of(const Tile& tile) const;

  bool on_device_;
  int device_ = 0;
  std::byte* x_ = nullptr;
  std::int64_t row_bytes_ = 0;
  std::int64_t stride_bytes_ = 0;
  std::int64_t slab_capacity_ = 0;
  std::int64_t tiles_per_expert_ = 0;
  std::vector<std::int32_t> num_rows_;  // [L]
  Bytes rows_;                          // final contents of x
  PlainMemory words_;
  TileSignals signals_;
  std::vector<Tile> tiles_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_LATE_TILES_HPP
