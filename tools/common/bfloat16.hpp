#ifndef FERRY_TOOLS_COMMON_BFLOAT16_HPP
#define FERRY_TOOLS_COMMON_BFLOAT16_HPP

/// Conversions of bf16, the upper half of an f32. Independent of the library's own conversion, so that a check made
/// with these does not inherit its mistakes.

#include <bit>
#include <cmath>
#include <cstdint>

namespace ferry::tools {

/// Half the distance between 1 and the next bf16: 8 significant bits, round to nearest.
inline constexpr float kBfloat16UnitRoundoff = 1.0F / 256.0F;

inline float float_from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

/// Rounds to nearest, ties to even.
inline std::uint16_t bfloat16_from_float(float value) {
  constexpr std::uint16_t kQuietNan = 0x7FC0;
  if (std::isnan(value)) return kQuietNan;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t half_minus_tie = 0x7FFFU + ((bits >> 16U) & 1U);
  return static_cast<std::uint16_t>((bits + half_minus_tie) >> 16U);
}

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_COMMON_BFLOAT16_HPP
