/// Quantisation on the host gives the same bits with all instruction sets of the processor.

#include "numeric/quantize.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace ferry::numeric {
namespace {

struct Outputs {
  std::vector<std::uint8_t> q;
  std::vector<std::uint8_t> scales;
  friend bool operator==(const Outputs&, const Outputs&) = default;
};

TEST(QuantizeVariants, AllGiveTheSameBits) {
  constexpr std::int64_t kNumRows = 40;
  std::mt19937_64 random(1);
  for (const std::int64_t hidden : {1, 16, 127, 128, 200, 1024}) {
    // Random bits: one row in three has any exponent, the others have values of similar magnitude.
    std::vector<std::uint16_t> x(static_cast<std::size_t>(kNumRows * hidden));
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<std::uint16_t>(random());
      if (i / static_cast<std::size_t>(hidden) % 3 != 0) {
        x[i] = static_cast<std::uint16_t>((x[i] & 0x83FF) | 0x3C00);
      }
    }
    for (Quantization mode : {Quantization::kFp8, Quantization::kFp8PowerOfTwo, Quantization::kInt8}) {
      const auto run = [&](const QuantizeVariant& variant) {
        Outputs out{std::vector<std::uint8_t>(x.size(), 0xAA),
                    std::vector<std::uint8_t>(static_cast<std::size_t>(kNumRows * num_blocks(hidden)) * sizeof(float))};
        const QuantizeParams params{
            .mode = mode,
            .num_rows = kNumRows,
            .hidden = hidden,
            .x = x.data(),
            .x_stride = hidden,
            .q = out.q.data(),
            .q_stride = hidden,
            .scales = {.data = reinterpret_cast<std::byte*>(out.scales.data()), .row_stride = num_blocks(hidden)}};
        (mode == Quantization::kInt8 ? variant.to_int8 : variant.to_fp8)(params);
        return out;
      };
      const Outputs expected = run(quantize_variants().back());
      for (const QuantizeVariant& variant : quantize_variants()) {
        if (!variant.available) continue;
        EXPECT_EQ(run(variant), expected) << variant.name << " mode " << static_cast<int>(mode) << " H " << hidden;
      }
    }
  }
}

}  // namespace
}  // namespace ferry::numeric
