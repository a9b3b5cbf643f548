#ifndef FERRY_CUDA_NUMERIC_WIRE_ROW_HPP
#define FERRY_CUDA_NUMERIC_WIRE_ROW_HPP

/// Layout of a staged row of a combine with WireFormat::kFp8. Four blocks of 128 channels form a group: their E4M3
/// codes, then their f32 scales, which fill one granule of a bulk copy. So one copy moves any number of groups with
/// their scales. The last group may have fewer blocks; the rest of it is not written.

#include <cstdint>

#include "ferry/quantization.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

inline constexpr int kGroupBlocks = 4;
inline constexpr int kGroupChannels = kGroupBlocks * static_cast<int>(kQuantBlockSize);
inline constexpr int kGroupScalesAt = kGroupChannels;
inline constexpr int kGroupBytes = kGroupChannels + kGroupBlocks * static_cast<int>(sizeof(float));
static_assert(kGroupBytes % 16 == 0, "whole granules of a bulk copy");
/// Alignment of rows: that of landings in shared memory (copy/bulk_copy.cuh).
inline constexpr int kWireRowAlignment = 128;

/// Bytes of a row of `hidden` channels, a multiple of kQuantBlockSize.
FERRY_HOST_DEVICE constexpr std::int64_t wire_row_bytes(std::int64_t hidden) {
  const std::int64_t bytes = (hidden + kGroupChannels - 1) / kGroupChannels * kGroupBytes;
  return (bytes + kWireRowAlignment - 1) / kWireRowAlignment * kWireRowAlignment;
}

/// Offset of a block's codes in its row.
FERRY_HOST_DEVICE constexpr std::int64_t block_codes_at(int block) {
  return static_cast<std::int64_t>(block / kGroupBlocks) * kGroupBytes +
         block % kGroupBlocks * static_cast<int>(kQuantBlockSize);
}

/// Offset of the scales of the group that a block belongs to.
FERRY_HOST_DEVICE constexpr std::int64_t group_scales_at(int block) {
  return static_cast<std::int64_t>(block / kGroupBlocks) * kGroupBytes + kGroupScalesAt;
}

/// Offset of a block's scale in its row.
FERRY_HOST_DEVICE constexpr std::int64_t block_scale_at(int block) {
  return group_scales_at(block) + block % kGroupBlocks * static_cast<int>(sizeof(float));
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_NUMERIC_WIRE_ROW_HPP
