#ifndef FERRY_TOOLS_COMMON_HASH_HPP
#define FERRY_TOOLS_COMMON_HASH_HPP

/// Counter-based random numbers: element i of a stream is a pure function of (seed, i), so any rank can compute any
/// part of a weight or an id list again without communication.

#include <cstdint>

namespace ferry::tools {

/// One step of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
inline std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

/// Seed for one part of a larger whole.
inline std::uint64_t derive_seed(std::uint64_t seed, std::uint64_t part) { return splitmix64(seed ^ splitmix64(part)); }

/// Uniform in [-1, 1) from 32 random bits; only the upper 24 are used, so that every value is exact in f32.
inline float signed_unit_float(std::uint32_t bits) {
  constexpr float kStep = 1.0F / static_cast<float>(1 << 23);
  return static_cast<float>(static_cast<std::int32_t>(bits >> 8U) - (1 << 23)) * kStep;
}

/// Uniform in (0, 1], from 53 of the 64 bits: never zero, so its logarithm is finite.
inline double positive_unit_double(std::uint64_t bits) {
  constexpr double kStep = 1.0 / static_cast<double>(std::uint64_t{1} << 53U);
  return static_cast<double>((bits >> 11U) + 1) * kStep;
}

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_COMMON_HASH_HPP
