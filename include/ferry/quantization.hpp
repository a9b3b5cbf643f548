#ifndef FERRY_QUANTIZATION_HPP
#define FERRY_QUANTIZATION_HPP

/// Quantisation of rows, common to dispatch (`DispatchOptions::quantize`) and separate calls (ferry/fp8.hpp,
/// ferry/int8.hpp): the modes, and where such a call runs.

#include <cstdint>
#include <string_view>

namespace ferry {

/// Channels that share a scale. (DeepSeek-V3 technical report, section 3.3.2: 1x128 tiles of activations.)
inline constexpr std::int64_t kQuantBlockSize = 128;
/// Smallest block maximum that a scale is made from, so that an all-zero block does not divide by zero. (The value in
/// DeepEP's kernels and DeepGEMM's casts; kept so that scales agree bit for bit.)
inline constexpr float kQuantAmaxFloor = 1e-4F;

/// Formats of one byte per channel, with one scale per block of 128 channels.
enum class Quantization : std::int32_t {
  kNone = 0,
  kFp8 = 1,            ///< E4M3; f32 scales: amax / 448
  kFp8PowerOfTwo = 2,  ///< E4M3; f32 scales: 2^ceil(log2(amax / 448))
  kFp8Ue8m0 = 3,       ///< E4M3; the same scales as biased exponents (+127): u8, or four in an i32, first in the low
                       ///< byte
  kInt8 = 4,           ///< i8 from -127 to 127; f32 scales: amax / 127
};

/// Execution place of a call that needs no group.
struct ExecutionOptions {
  /// "cpu": host memory, done on return. "cuda": memory of `device`; puts one kernel on the stream, never blocks, and
  /// may be captured in a graph.
  std::string_view backend = "cpu";
  int device = -1;  ///< backend "cuda": ordinal of the GPU; -1: the calling thread's current one
};

}  // namespace ferry

#endif  // FERRY_QUANTIZATION_HPP
