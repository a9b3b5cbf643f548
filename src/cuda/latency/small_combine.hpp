#ifndef FERRY_CUDA_LATENCY_SMALL_COMBINE_HPP
#define FERRY_CUDA_LATENCY_SMALL_COMBINE_HPP

/// What the kernel of a small combine takes.

#include <cstdint>

#include "cuda/latency/params.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Divides numbers whose product with the divisor is below 2^32, by a multiplication.
struct SmallDivisor {
  std::int32_t divisor = 1;
  std::uint64_t inverse = std::uint64_t{1} << 32;  ///< 2^32 / divisor, rounded up

  static constexpr SmallDivisor of(int divisor) {
    return {divisor,
            ((std::uint64_t{1} << 32) + static_cast<std::uint64_t>(divisor) - 1) / static_cast<std::uint64_t>(divisor)};
  }
  FERRY_HOST_DEVICE constexpr int divide(int value) const {
    return static_cast<int>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(value)) * inverse >> 32);
  }
};

/// How warps share rows: unit u is part u % parts of row u / parts.
struct SmallUnits {
  SmallDivisor per_row;
  int part_bytes = 0;
  int num_units = 0;
};

struct SmallCombineParams : LatencyCombineParams {
  SmallDivisor ranks;   ///< R
  SmallUnits sends;     ///< rows: (token, source), of M tokens of each rank; sources count from this rank on
  SmallUnits receives;  ///< rows: this rank's tokens
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_SMALL_COMBINE_HPP
