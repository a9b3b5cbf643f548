#include "support/random_payload.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace ferry::test {
namespace {

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), whose state stays in a
/// register. With std::mt19937_64 and std::normal_distribution, drawing took half of the conformance suite's time.
class BitSource {
 public:
  explicit BitSource(std::mt19937_64& random) : state_(random()) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t bits = state_;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9U;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBU;
    return bits ^ (bits >> 31);
  }

  /// 0 to n - 1, for n below 2^32.
  std::uint64_t below(std::uint64_t n) { return (next() >> 32) * n >> 32; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

  /// Bits of an f32 of either sign from 1/8 up to 32.
  std::uint32_t number() {
    constexpr std::uint64_t kEighth = 124;  // biased exponent of 1/8
    const std::uint64_t bits = next();
    const std::uint64_t exponent = kEighth + (bits >> 23 & 7);
    return static_cast<std::uint32_t>(bits >> 63 << 31 | exponent << 23 | (bits & 0x7FFFFF));
  }

 private:
  std::uint64_t state_;
};

constexpr std::array<std::uint32_t, 12> kSpecialBits = {
    0x7FC00000, 0xFFC00000, 0x7F810000, 0xFFFFFFFF,  // quiet, negative, signalling and full NaN
    0x7F800000, 0xFF800000, 0x00000000, 0x80000000,  // infinities, zeros
    0x00010000, 0x807F0000, 0x7F7F0000, 0xFF7F0000,  // subnormals, the largest numbers
};

/// f32 bit patterns; bf16 takes the upper halves.
std::uint32_t payload_bits(BitSource& source, Values values) {
  if (values == Values::kSpecial && source.one_in(3)) return kSpecialBits[source.below(kSpecialBits.size())];
  return source.number();
}

/// Rows for quantisation, of bf16 or f32: blocks of 128 of any size, zeros, special values, numbers far below others.
std::vector<std::byte> random_blocks(std::mt19937_64& random, DType dtype, std::int64_t rows, std::int64_t hidden) {
  constexpr std::int64_t kBlock = 128;
  constexpr std::uint64_t kNumKinds = 6;
  constexpr std::uint64_t kNumExponents = 61;
  // Beside the block's largest number, halved numbers become subnormal in FP8 (below 2^-14 of it) or round to zero.
  constexpr std::uint64_t kNumHalvings = 17;
  BitSource source(random);
  const std::size_t element_bytes = size_bytes(dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows * hidden) * element_bytes);
  std::uint64_t kind = 0;
  float scale = 1.0F;
  for (std::int64_t i = 0; i < rows * hidden; ++i) {
    if (i % hidden % kBlock == 0) {
      kind = source.below(kNumKinds);
      scale = std::ldexp(1.0F, static_cast<int>(source.below(kNumExponents)) - 30);
    }
    std::uint32_t bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(source.number()) * scale);
    if (kind == 0) bits &= 0x80000000U;
    if (kind == 1 && source.one_in(64)) bits = payload_bits(source, Values::kSpecial);
    if (kind == 2) bits = static_cast<std::uint32_t>(source.next());
    if (kind == 3) bits -= static_cast<std::uint32_t>(source.below(kNumHalvings) << 23);
    const std::uint32_t stored = dtype == DType::kFloat32 ? bits : bits >> 16;
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * element_bytes, &stored, element_bytes);
  }
  return bytes;
}

}  // namespace

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t count) {
  BitSource source(random);
  std::vector<std::byte> bytes(count);
  for (std::size_t at = 0; at < count; at += sizeof(std::uint64_t)) {
    const std::uint64_t bits = source.next();
    std::memcpy(bytes.data() + at, &bits, std::min(sizeof(bits), count - at));
  }
  return bytes;
}

std::vector<float> random_floats(std::mt19937_64& random, std::size_t count) {
  BitSource source(random);
  std::vector<float> values(count);
  for (float& value : values) value = source.one_in(16) ? -0.0F : std::bit_cast<float>(source.number());
  return values;
}

std::vector<std::byte> random_payload(std::mt19937_64& random, const CombineSpec& spec, std::int64_t rows) {
  if (spec.values == Values::kBlocks) return random_blocks(random, spec.dtype, rows, spec.hidden);
  BitSource source(random);
  const std::size_t element_bytes = size_bytes(spec.dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows * spec.hidden) * element_bytes);
  for (std::size_t at = 0; at < bytes.size(); at += element_bytes) {
    const std::uint32_t bits = payload_bits(source, spec.values);
    const std::uint32_t stored = spec.dtype == DType::kFloat32 ? bits : bits >> 16;
    std::memcpy(bytes.data() + at, &stored, element_bytes);
  }
  return bytes;
}

std::vector<std::byte> random_activations(std::mt19937_64& random, std::int64_t rows, std::int64_t hidden) {
  return random_blocks(random, DType::kBfloat16, rows, hidden);
}

}  // namespace ferry::test
