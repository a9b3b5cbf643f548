#ifndef FERRY_PLAN_EXPANSION_HPP
#define FERRY_PLAN_EXPANSION_HPP

/// Rows by token and rows by expert: the checked arguments of expand_rows and reduce_rows, and the computations shared
/// by host and kernels.

#include <cstddef>
#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::plan {

/// Slots of the copies of each row.
struct SlotTable {
  const std::int32_t* slots = nullptr;      ///< [N, K]
  const std::int8_t* last_equal = nullptr;  ///< [N, K]; null: all choices of a row have different experts
  std::int64_t stride = 0;                  ///< stride of a row of slots
  std::int64_t num_rows = 0;                ///< N
  std::int64_t num_slots = 0;               ///< P
  int num_topk = 1;

  /// Slot of a choice; -1 if it has none.
  FERRY_HOST_DEVICE std::int32_t slot(std::int64_t row, int k) const {
    const std::int32_t slot = slots[row * stride + k];
    return slot >= 0 && slot < num_slots ? slot : -1;
  }
  /// The choice whose slot choice `k` uses; -1 if its expert is not here.
  FERRY_HOST_DEVICE int owner(std::int64_t row, int k) const {
    if (last_equal == nullptr) return k;
    const int last = last_equal[row * num_topk + k];
    return last < num_topk ? last : -1;
  }
};

/// Elements of 4 bytes; strides in elements.
struct ScaleColumns {
  std::uint32_t* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;

  FERRY_HOST_DEVICE std::uint32_t& at(std::int64_t row, std::int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

/// Null tables are absent.
struct ExpandParams {
  SlotTable table;
  bool zero_padding = false;
  std::int64_t row_bytes = 0;
  const std::byte* x = nullptr;
  std::byte* out_x = nullptr;
  std::int64_t num_scales = 0;  ///< S; 0: none
  ScaleColumns scales;          ///< only read
  ScaleColumns out_scales;
  const float* weights = nullptr;
  float* out_weights = nullptr;
  std::int32_t* row_of_slot = nullptr;

  /// Weight of slot k of a row.
  FERRY_HOST_DEVICE float slot_weight(std::int64_t row, int k) const {
    float sum = 0;
    for (int choice = 0; choice <= k; ++choice) {
      if (table.owner(row, choice) == k) sum += weights[row * table.num_topk + choice];
    }
    return sum;
  }
};

/// Rows of bf16.
struct ReduceParams {
  SlotTable table;
  bool rounds = true;  ///< the sums are bf16, else f32
  std::int64_t hidden = 0;
  const std::byte* x = nullptr;
  std::byte* out_x = nullptr;
  const float* weights = nullptr;
  float* out_weights = nullptr;

  /// Weight of choice k of a row.
  FERRY_HOST_DEVICE float choice_weight(std::int64_t row, int k) const {
    const int owner = table.owner(row, k);
    const std::int32_t slot = owner < 0 ? -1 : table.slot(row, owner);
    return slot < 0 ? 0.0F : weights[slot];
  }
};

}  // namespace ferry::plan

#endif  // FERRY_PLAN_EXPANSION_HPP
