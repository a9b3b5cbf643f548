#ifndef FERRY_CUDA_INTRANODE_RECORD_LAYOUT_HPP
#define FERRY_CUDA_INTRANODE_RECORD_LAYOUT_HPP

/// What travels beside a token's payload: scales, ids, weights, and, where a token may take several rows, those rows.
/// In words of 4 bytes, padded to 16 bytes; the same for all ranks of a call.

#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::cuda {

struct RecordLayout {
  int ids_word = 0;      ///< K x i32 global expert id, or -1
  int weights_word = 0;  ///< K x f32
  int rows_word = 0;     ///< K x i32 row on the receiver, -1 where the expert is elsewhere
  int end_word = 0;
  int num_words = 0;  ///< end_word rounded up to 16 bytes; 0: nothing but payload travels
  bool has_ids = false;
  bool has_weights = false;
  bool has_rows = false;

  struct Parts {
    std::int64_t scale_bytes = 0;
    int num_topk = 0;
    bool ids = false;
    bool weights = false;
    bool rows = false;
  };

  FERRY_HOST_DEVICE static constexpr RecordLayout of(const Parts& parts) {
    RecordLayout layout;
    layout.ids_word = static_cast<int>((parts.scale_bytes + 3) / 4);
    layout.weights_word = layout.ids_word + (parts.ids ? parts.num_topk : 0);
    layout.rows_word = layout.weights_word + (parts.weights ? parts.num_topk : 0);
    layout.end_word = layout.rows_word + (parts.rows ? parts.num_topk : 0);
    layout.num_words = (layout.end_word + 3) / 4 * 4;
    layout.has_ids = parts.ids;
    layout.has_weights = parts.weights;
    layout.has_rows = parts.rows;
    return layout;
  }
  FERRY_HOST_DEVICE constexpr std::int64_t size_bytes() const { return std::int64_t{4} * num_words; }
};

static_assert(RecordLayout::of({224, 8, true, true, false}).size_bytes() == 288);
static_assert(RecordLayout::of({7, 1, false, true, true}).size_bytes() == 16);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_RECORD_LAYOUT_HPP
