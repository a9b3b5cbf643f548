#ifndef FERRY_CUDA_INTERNODE_CHUNK_DIVISION_HPP
#define FERRY_CUDA_INTERNODE_CHUNK_DIVISION_HPP

/// Division of an exchange with a rail peer into chunks. Both ends derive the same one from what both know.

#include <cstddef>
#include <cstdint>

#include "plan/host_device.hpp"
#include "rail/rail_memory.hpp"

namespace ferry::cuda {

/// Contents of a chunk: bytes [begin, end) of `num_items` items, starting with item `first`.
struct ItemChunk {
  std::uint64_t chunk_idx;  ///< number among the exchange's chunks with items
  std::int64_t first;
  std::int64_t num_items;
  std::int64_t begin;
  std::int64_t end;
};

/// Items longer than a chunk are divided into slices: the first slices of all items precede the second ones. Otherwise
/// the exchange begins and ends with smaller chunks, in stages of an eighth, a quarter and half of a whole one: the
/// network has nothing to do while the first chunk is filled and the last one emptied, which takes a block 30 us for 1
/// MiB (benchmarks/gpu_rings on an H200, one block at 35 GB/s).
class ChunkDivision {
 public:
  struct Params {
    std::int64_t num_items = 0;
    std::int64_t item_bytes = 0;
    std::size_t ring_chunk_bytes = 0;  ///< chunks of the ring, header included
    int chunk_items = 0;  ///< most items of a chunk, if the sender has such a number and a chunk holds as many; else 0
  };

  FERRY_HOST_DEVICE explicit constexpr ChunkDivision(const Params& params) : num_items_(params.num_items) {
    if (params.item_bytes == 0 || params.num_items == 0) return;
    const auto exchange_bytes = static_cast<std::size_t>(params.num_items * params.item_bytes);
    const auto room = static_cast<std::int64_t>(rail::exchange_chunk_bytes(params.ring_chunk_bytes, exchange_bytes) -
                                                rail::kChunkHeaderBytes);
    item_bytes_ = params.item_bytes;
    slice_bytes_ = item_bytes_ < room ? item_bytes_ : room;
    num_slices_ = (item_bytes_ + slice_bytes_ - 1) / slice_bytes_;
    per_chunk_ = room / slice_bytes_;
    if (params.chunk_items > 0) {
      const auto most_room = static_cast<std::int64_t>(params.ring_chunk_bytes - rail::kChunkHeaderBytes);
      const std::int64_t most = most_room / slice_bytes_;
      per_chunk_ = params.chunk_items < most ? params.chunk_items : most;
    }
    if (num_slices_ == 1) find_stages();
    const std::int64_t middle = num_items_ - 2 * ramp_items_;
    num_middle_ = (middle + per_chunk_ - 1) / per_chunk_;
  }

  FERRY_HOST_DEVICE constexpr std::int64_t num_chunks() const {
    return num_slices_ * (num_middle_ + 2 * std::int64_t{kStageChunks} * num_stages_);
  }

  FERRY_HOST_DEVICE constexpr ItemChunk at(std::int64_t idx) const {
    ItemChunk chunk{static_cast<std::uint64_t>(idx), 0, 0, 0, item_bytes_};
    const std::int64_t num_ramp = std::int64_t{kStageChunks} * num_stages_;
    if (num_stages_ > 0 && idx < num_ramp) {
      chunk.num_items = stage_items(static_cast<int>(idx / kStageChunks));
      chunk.first = items_before(idx);
    } else if (num_stages_ > 0 && idx >= num_ramp + num_middle_) {
      const std::int64_t from_end = num_chunks() - 1 - idx;
      chunk.num_items = stage_items(static_cast<int>(from_end / kStageChunks));
      chunk.first = num_items_ - items_before(from_end) - chunk.num_items;
    } else {
      const std::int64_t middle = idx - num_ramp;
      const std::int64_t first = middle % num_middle_ * per_chunk_;
      const std::int64_t left = num_items_ - 2 * ramp_items_ - first;
      chunk.begin = middle / num_middle_ * slice_bytes_;
      chunk.end = chunk.begin + slice_bytes_ < item_bytes_ ? chunk.begin + slice_bytes_ : item_bytes_;
      chunk.first = ramp_items_ + first;
      chunk.num_items = left < per_chunk_ ? left : per_chunk_;
    }
    return chunk;
  }

 private:
  /// Chunks of a stage: as many as blocks that fill a ring at the same time.
  static constexpr int kStageChunks = 4;
  static constexpr int kMostStages = 3;
  /// Fixed costs of a chunk (a put, its flush, a message, the proxy) outweigh what smaller ones would gain.
  static constexpr std::int64_t kLeastStageBytes = std::int64_t{64} << 10;

  FERRY_HOST_DEVICE constexpr void find_stages() {
    const std::int64_t least = (kLeastStageBytes + item_bytes_ - 1) / item_bytes_;
    for (int stages = kMostStages; stages > 0; --stages) {
      const std::int64_t smallest = per_chunk_ >> stages;
      if (smallest < least) continue;
      std::int64_t items = 0;
      for (int stage = 0; stage < stages; ++stage) items += kStageChunks * (per_chunk_ >> (stages - stage));
      if (2 * items > num_items_) continue;
      num_stages_ = stages;
      ramp_items_ = items;
      return;
    }
  }
  FERRY_HOST_DEVICE constexpr std::int64_t stage_items(int stage) const { return per_chunk_ >> (num_stages_ - stage); }
  /// Items in the chunks of a ramp before chunk `idx`.
  FERRY_HOST_DEVICE constexpr std::int64_t items_before(std::int64_t idx) const {
    std::int64_t items = 0;
    const auto stage = static_cast<int>(idx / kStageChunks);
    for (int before = 0; before < stage; ++before) items += kStageChunks * stage_items(before);
    return items + idx % kStageChunks * stage_items(stage);
  }

  std::int64_t num_items_ = 0;
  std::int64_t item_bytes_ = 0;
  std::int64_t slice_bytes_ = 0;
  std::int64_t num_slices_ = 0;
  std::int64_t per_chunk_ = 0;
  std::int64_t num_middle_ = 0;  ///< whole chunks between the stages, of each slice
  std::int64_t ramp_items_ = 0;  ///< items of all stages at one end
  int num_stages_ = 0;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_CHUNK_DIVISION_HPP
