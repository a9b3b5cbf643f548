#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "oracle/oracle.hpp"

namespace ferry::oracle {
namespace {

constexpr std::size_t kChannelsPerScale = 128;
constexpr float kSmallestMaximum = 1e-4F;
constexpr int kNanCode = 0x7F;
constexpr int kLargestCode = 0x7E;

float value_at(const Bytes& x, std::size_t idx, DType dtype = DType::kBfloat16) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, x.data() + idx * sizeof(value), sizeof(value));
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, x.data() + idx * sizeof(bits), sizeof(bits));
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Magnitude of an E4M3 code that is not NaN: 4 exponent bits with bias 7, 3 fraction bits.
double magnitude_of(int code) {
  const int exponent = code >> 3;
  const int fraction = code & 7;
  return exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
}

/// Code nearest to `magnitude`, the even one of two; beyond the largest, the largest.
int nearest_code(double magnitude) {
  if (std::isnan(magnitude)) return kNanCode;
  static const std::vector<double> magnitudes = [] {
    std::vector<double> all;
    for (int code = 0; code <= kLargestCode; ++code) all.push_back(magnitude_of(code));
    return all;
  }();
  const auto next = std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude);
  if (next == magnitudes.end()) return kLargestCode;
  const int above = static_cast<int>(next - magnitudes.begin());
  if (*next == magnitude) return above;
  const double half = (*(next - 1) + *next) / 2;
  if (magnitude == half) return above % 2 == 0 ? above : above - 1;
  return magnitude > half ? above : above - 1;
}

std::byte fp8_of(float x, float multiplier) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x) * multiplier;
  return static_cast<std::byte>(sign | nearest_code(static_cast<double>(magnitude)));
}

std::byte int8_of(float x, float multiplier) {
  const float rounded = std::nearbyint(x * multiplier);
  return static_cast<std::byte>(static_cast<int>(std::clamp(rounded, -127.0F, 127.0F)));
}

/// Smallest power of two not below `value`.
float power_of_two_from(float value) {
  if (std::isinf(value)) return value;
  float power = std::ldexp(1.0F, std::ilogb(value));
  if (power < value) power *= 2;
  return power;
}

struct Block {
  float scale = 0;
  std::vector<std::byte> codes;
};

Block quantize_fp8_block(const std::vector<float>& values, bool powers) {
  float amax = kSmallestMaximum;
  for (float value : values) amax = std::isnan(value) ? amax : std::max(amax, std::fabs(value));
  Block block;
  block.scale = powers ? power_of_two_from(amax / 448.0F) : amax / 448.0F;
  const float multiplier = powers ? 1.0F / block.scale : 448.0F / amax;
  for (float value : values) block.codes.push_back(fp8_of(value, multiplier));
  return block;
}

Block quantize_int8_block(const std::vector<float>& values) {
  float amax = kSmallestMaximum;
  for (float value : values) {
    // Once NaN, the maximum stays NaN.
    if (std::isnan(value) || std::fabs(value) > amax) amax = std::isnan(value) ? value : std::fabs(value);
    if (std::isnan(amax)) break;
  }
  Block block;
  block.scale = std::isnan(amax) ? std::bit_cast<float>(0x7FFFFFFFU) : amax / 127.0F;
  for (float value : values) {
    block.codes.push_back(std::isfinite(amax) ? int8_of(value, 127.0F / amax) : std::byte{0});
  }
  return block;
}

std::uint8_t exponent_of(float power) { return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(power) >> 23); }

}  // namespace

QuantizedRows quantize(const Bytes& x, std::size_t hidden, Quantization mode, DType scale_dtype) {
  const std::size_t num_rows = x.size() / (hidden * size_bytes(DType::kBfloat16));
  const std::size_t num_blocks = (hidden + kChannelsPerScale - 1) / kChannelsPerScale;
  QuantizedRows out;
  out.scale_row_bytes = num_blocks * size_bytes(scale_dtype);
  if (scale_dtype == DType::kInt32) out.scale_row_bytes = (num_blocks + 3) / 4 * size_bytes(scale_dtype);
  out.scales.resize(num_rows * out.scale_row_bytes);
  for (std::size_t row = 0; row < num_rows; ++row) {
    std::byte* const scales = out.scales.data() + row * out.scale_row_bytes;
    for (std::size_t at = 0; at < num_blocks; ++at) {
      std::vector<float> values;
      for (std::size_t col = at * kChannelsPerScale; col < std::min(hidden, (at + 1) * kChannelsPerScale); ++col) {
        values.push_back(value_at(x, row * hidden + col));
      }
      const Block block = mode == Quantization::kInt8 ? quantize_int8_block(values)
                                                      : quantize_fp8_block(values, mode != Quantization::kFp8);
      out.x.insert(out.x.end(), block.codes.begin(), block.codes.end());
      if (scale_dtype == DType::kFloat32) {
        std::memcpy(scales + at * sizeof(float), &block.scale, sizeof(float));
      } else {
        scales[at] = std::byte{exponent_of(block.scale)};
      }
    }
  }
  return out;
}

std::vector<float> after_fp8(const Bytes& x, DType dtype) {
  const std::size_t num_values = x.size() / size_bytes(dtype);
  std::vector<float> values;
  for (std::size_t first = 0; first < num_values; first += kChannelsPerScale) {
    std::vector<float> given;
    for (std::size_t i = 0; i < kChannelsPerScale; ++i) given.push_back(value_at(x, first + i, dtype));
    const Block block = quantize_fp8_block(given, false);
    for (const std::byte code : block.codes) {
      const int bits = std::to_integer<int>(code);
      const int magnitude = bits & kNanCode;
      const float value = magnitude == kNanCode ? std::nanf("") : static_cast<float>(magnitude_of(magnitude));
      values.push_back((bits == magnitude ? value : -value) * block.scale);
    }
  }
  return values;
}

}  // namespace ferry::oracle
