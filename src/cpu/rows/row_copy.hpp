#ifndef FERRY_CPU_ROWS_ROW_COPY_HPP
#define FERRY_CPU_ROWS_ROW_COPY_HPP

#include <cstddef>
#include <cstdint>

namespace ferry::cpu {

/// Cache behaviour of a call's copies.
enum class CopyMode {
  kCached,     ///< ordinary stores: the receiver finds small batches in its caches
  kStreaming,  ///< stores that bypass the caches, which also avoids reading every line before it is overwritten
};

/// Mode for a call that writes `written_bytes`.
CopyMode choose_copy_mode(std::int64_t written_bytes);

/// Copies a row; both sides are aligned to 16 bytes and `bytes` is a multiple of 16.
void copy_row(std::byte* to, const std::byte* from, std::size_t bytes, CopyMode mode);

/// Must follow a call's last streaming copy, before the flag that publishes it: a release store alone does not order
/// streaming stores (Intel SDM volume 1, section 10.4.6.2).
void finish_copies(CopyMode mode);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_ROW_COPY_HPP
