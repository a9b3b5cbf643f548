#ifndef FERRY_PLAN_TOKEN_RECORD_HPP
#define FERRY_PLAN_TOKEN_RECORD_HPP

/// Data sent with a token's payload: scales, expert ids, weights, and, if a token may take several rows of one
/// receiver, those rows. One record of fixed size per token, the same for all ranks of a call, in words of 4 bytes:
///
///     word 0         scales   S elements of the caller's scale type, padded to a word
///     ids_word       ids      K x i32, -1 where there is none
///     weights_word   weights  K x f32
///     rows_word      rows     K x i32 row on the receiver, -1 where the expert is on another rank
///     end_word       padding to 16 bytes
///
/// Parts that a call does not need take no words. Each backend decides whether ids are global or local to the receiver.

#include <cstddef>
#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::plan {

struct TokenRecord {
  int ids_word = 0;
  int weights_word = 0;
  int rows_word = 0;
  int end_word = 0;
  int num_words = 0;  ///< end_word rounded up to 16 bytes; 0: only the payload is sent
  bool has_ids = false;
  bool has_weights = false;
  bool has_rows = false;

  struct Parts {
    std::int64_t scale_bytes = 0;  ///< scales of a token; at most 4 GiB
    int num_topk = 0;
    bool ids = false;
    bool weights = false;
    bool rows = false;
  };

  FERRY_HOST_DEVICE static constexpr TokenRecord of(const Parts& parts) {
    TokenRecord record;
    record.ids_word = static_cast<int>((parts.scale_bytes + 3) / 4);
    record.weights_word = record.ids_word + (parts.ids ? parts.num_topk : 0);
    record.rows_word = record.weights_word + (parts.weights ? parts.num_topk : 0);
    record.end_word = record.rows_word + (parts.rows ? parts.num_topk : 0);
    record.num_words = (record.end_word + 3) / 4 * 4;
    record.has_ids = parts.ids;
    record.has_weights = parts.weights;
    record.has_rows = parts.rows;
    return record;
  }

  FERRY_HOST_DEVICE constexpr std::int64_t ids_offset() const { return std::int64_t{4} * ids_word; }
  FERRY_HOST_DEVICE constexpr std::int64_t weights_offset() const { return std::int64_t{4} * weights_word; }
  FERRY_HOST_DEVICE constexpr std::int64_t size_bytes() const { return std::int64_t{4} * num_words; }
};

static_assert(TokenRecord::of({.num_topk = 8}).size_bytes() == 0);
static_assert(TokenRecord::of({224, 8, true, true, false}).size_bytes() == 288);
static_assert(TokenRecord::of({7, 1, false, true, true}).size_bytes() == 16);
static_assert(TokenRecord::of({7, 1, true, true, false}).ids_offset() == 8);

}  // namespace ferry::plan

#endif  // FERRY_PLAN_TOKEN_RECORD_HPP
