/// Tests that the quantising kernel gives the same bits as the host.

#include "cuda/numeric/quantize.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "emulator/emulator.hpp"

namespace ferry::emulator {
namespace {

struct Outputs {
  std::vector<std::uint8_t> q;
  std::vector<std::uint8_t> scales;
  friend bool operator==(const Outputs&, const Outputs&) = default;
};

TEST(EmulatedQuantize, GivesTheBitsOfTheHost) {
  constexpr std::int64_t kNumRows = 5;
  constexpr int kNumSms = 3;
  std::mt19937_64 random(1);
  for (const std::int64_t hidden : {8, 128, 200, 1024 + 16}) {
    std::vector<std::uint16_t> x(static_cast<std::size_t>(kNumRows * hidden));
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<std::uint16_t>(random());
      if (i % 3 != 0) x[i] = static_cast<std::uint16_t>((x[i] & 0x83FF) | 0x3C00);
    }
    for (Quantization mode : {Quantization::kFp8, Quantization::kFp8PowerOfTwo, Quantization::kInt8}) {
      const auto num_scales = static_cast<std::size_t>(kNumRows * numeric::num_blocks(hidden));
      const auto run = [&](const auto& quantize) {
        Outputs out{std::vector<std::uint8_t>(x.size(), 0xAA), std::vector<std::uint8_t>(num_scales * sizeof(float))};
        quantize(numeric::QuantizeParams{.mode = mode,
                                         .num_rows = kNumRows,
                                         .hidden = hidden,
                                         .x = x.data(),
                                         .x_stride = hidden,
                                         .q = out.q.data(),
                                         .q_stride = hidden,
                                         .scales = {.data = reinterpret_cast<std::byte*>(out.scales.data()),
                                                    .row_stride = numeric::num_blocks(hidden)}});
        return out;
      };
      const Outputs expected = run([](const numeric::QuantizeParams& params) {
        const numeric::QuantizeVariant& variant = numeric::quantize_variants().back();
        (params.mode == Quantization::kInt8 ? variant.to_int8 : variant.to_fp8)(params);
      });
      const Outputs emulated = run([](const numeric::QuantizeParams& params) {
        Machine machine(1);
        ASSERT_EQ(cuda::launch_quantize(params, kNumSms, machine.add_stream()), cudaSuccess);
        EXPECT_EQ(machine.run(), "");
      });
      EXPECT_EQ(emulated, expected) << "mode " << static_cast<int>(mode) << " H " << hidden;
    }
  }
}

}  // namespace
}  // namespace ferry::emulator
