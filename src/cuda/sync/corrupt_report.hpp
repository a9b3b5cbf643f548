#ifndef FERRY_CUDA_SYNC_CORRUPT_REPORT_HPP
#define FERRY_CUDA_SYNC_CORRUPT_REPORT_HPP

/// Findings of kernels in groups that verify their rows (GroupOptions::verify), in pinned memory of the host.
///
///   field   writer                                      reader  order
///   state   the last block of the first check of a      host    st.release.sys after the other fields / acquire load;
///           call that finds a wrong row (once)                  never reset, since the group is broken

#include <cstdint>

namespace ferry::cuda {

enum class CheckedCall : std::int32_t { kDispatch = 0, kCombine = 1 };

struct CorruptReport {
  std::uint64_t state;  ///< 1: the other fields are valid
  std::uint64_t epoch;  ///< of the call
  std::int32_t call;    ///< CheckedCall
  std::int32_t sender;  ///< dispatch: the source of the first wrong row; combine: its holder
  std::int64_t row;     ///< that row, of the output (dispatch) or at its holder (combine)
  std::int64_t token;   ///< its token, of the source (dispatch) or of this rank (combine)
  std::int64_t num_wrong;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_CORRUPT_REPORT_HPP
