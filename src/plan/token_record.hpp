#ifndef FERRY_PLAN_TOKEN_RECORD_HPP
#define FERRY_PLAN_TOKEN_RECORD_HPP

/// What travels beside a token's payload: scales, global expert ids, weights, in one record of fixed size per batch.
///
///     offset 0                    scales   S elements of the caller's scale type
///     rounded up to 4             ids      K x i32, global expert id or -1
///     after the ids               weights  K x f32
///     rounded up to 16            next record

#include <cstddef>
#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::plan {

struct TokenRecord {
  std::size_t ids_offset = 0;
  std::size_t weights_offset = 0;
  std::size_t size_bytes = 0;  ///< 0: nothing travels beside the payload

  FERRY_HOST_DEVICE static constexpr TokenRecord of(std::size_t scale_row_bytes, std::size_t num_topk, bool ids,
                                                    bool weights) {
    TokenRecord record;
    record.ids_offset = (scale_row_bytes + 3) / 4 * 4;
    record.weights_offset = record.ids_offset + (ids ? num_topk * sizeof(std::int32_t) : 0);
    const std::size_t end = record.weights_offset + (weights ? num_topk * sizeof(float) : 0);
    record.size_bytes = (end + 15) / 16 * 16;
    return record;
  }
};

static_assert(TokenRecord::of(0, 8, false, false).size_bytes == 0);
static_assert(TokenRecord::of(224, 8, true, true).size_bytes == 288);
static_assert(TokenRecord::of(7, 1, true, true).ids_offset == 8);

}  // namespace ferry::plan

#endif  // FERRY_PLAN_TOKEN_RECORD_HPP
