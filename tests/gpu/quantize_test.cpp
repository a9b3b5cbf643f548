/// Tests of the quantising and dequantising kernels, bit by bit against the same calls on the host.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "ferry/fp8.hpp"
#include "ferry/int8.hpp"
#include "gpu/on_device.hpp"
#include "support/gpu_ranks.hpp"

namespace ferry::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::array<Quantization, 4> kModes = {Quantization::kFp8, Quantization::kFp8PowerOfTwo,
                                                Quantization::kFp8Ue8m0, Quantization::kInt8};
ExecutionOptions on_gpu() { return {.backend = "cuda"}; }

/// One matrix with its codes and scales; all memory is filled with a pattern first.
struct Matrix {
  Quantization mode = Quantization::kFp8;
  DType x_dtype = DType::kBfloat16;
  DType scale_dtype = DType::kFloat32;
  std::int64_t num_tokens = 1;
  std::int64_t hidden = 128;
  std::int64_t x_stride = 128;
  std::int64_t q_stride = 128;
  bool column_major = false;
  std::int64_t skipped = 0;  ///< elements before the first one, which may misalign it

  bool is_int8() const { return mode == Quantization::kInt8; }
  std::int64_t num_scales() const {
    const std::int64_t channels = scale_dtype == DType::kInt32 ? 512 : 128;
    return (hidden + channels - 1) / channels;
  }
  std::size_t x_bytes() const {
    return static_cast<std::size_t>(skipped + num_tokens * x_stride) * size_bytes(x_dtype);
  }
  std::size_t q_bytes() const { return static_cast<std::size_t>(skipped + num_tokens * q_stride); }
  std::size_t scale_bytes() const {
    return static_cast<std::size_t>(num_tokens * num_scales()) * size_bytes(scale_dtype);
  }
  TensorView x(void* data) const {
    return {static_cast<std::byte*>(data) + static_cast<std::size_t>(skipped) * size_bytes(x_dtype),
            x_dtype,
            {num_tokens, hidden},
            {x_stride, 1}};
  }
  TensorView q(void* data) const {
    return {static_cast<std::byte*>(data) + skipped,
            is_int8() ? DType::kInt8 : DType::kFloat8E4M3,
            {num_tokens, hidden},
            {q_stride, 1}};
  }
  TensorView scales(void* data) const {
    if (column_major) return {data, scale_dtype, {num_tokens, num_scales()}, {1, num_tokens}};
    return {data, scale_dtype, {num_tokens, num_scales()}};
  }
  Status quantize(const TensorView& from, const TensorView& to, const TensorView& to_scales,
                  const ExecutionOptions& where, Stream stream) const {
    if (is_int8()) return quantize_int8(from, to, to_scales, where, stream);
    const auto format = static_cast<Fp8ScaleFormat>(static_cast<int>(mode) - static_cast<int>(Quantization::kFp8));
    return quantize_fp8(from, to, to_scales, format, where, stream);
  }
  Status dequantize(const TensorView& from, const TensorView& from_scales, const TensorView& to,
                    const ExecutionOptions& where, Stream stream) const {
    return is_int8() ? dequantize_int8(from, from_scales, to, where, stream)
                     : dequantize_fp8(from, from_scales, to, where, stream);
  }
  std::string name() const {
    return fmt::format("mode {}, x {}, scales {}, [{}, {}], strides {} and {}, {} skipped", static_cast<int>(mode),
                       to_string(x_dtype), to_string(scale_dtype), num_tokens, hidden, x_stride, q_stride, skipped);
  }
};

Bytes pattern(std::size_t size) { return Bytes(size, std::byte{0xA5}); }

/// Quantises and dequantises on the GPU and the host; memory between rows must be unchanged.
void compare(RankContext& context, const Matrix& matrix, Bytes x) {
  Bytes q = pattern(matrix.q_bytes());
  Bytes scales = pattern(matrix.scale_bytes());
  const OnDevice<std::byte> x_on_gpu(x);
  const OnDevice<std::byte> q_on_gpu(q);
  const OnDevice<std::byte> scales_on_gpu(scales);
  context.expect_ok(matrix.quantize(matrix.x(x_on_gpu.data()), matrix.q(q_on_gpu.data()),
                                    matrix.scales(scales_on_gpu.data()), on_gpu(), thread_stream()),
                    matrix.name());
  Bytes q_from_gpu = q;
  Bytes scales_from_gpu = scales;
  q_on_gpu.read(q_from_gpu);
  scales_on_gpu.read(scales_from_gpu);
  context.expect_ok(matrix.quantize(matrix.x(x.data()), matrix.q(q.data()), matrix.scales(scales.data()), {}, {}),
                    matrix.name());
  context.expect(q_from_gpu == q, matrix.name() + ": codes differ");
  context.expect(scales_from_gpu == scales, matrix.name() + ": scales differ");

  Bytes back = pattern(matrix.x_bytes());
  const OnDevice<std::byte> back_on_gpu(back);
  context.expect_ok(matrix.dequantize(matrix.q(q_on_gpu.data()), matrix.scales(scales_on_gpu.data()),
                                      matrix.x(back_on_gpu.data()), on_gpu(), thread_stream()),
                    matrix.name());
  Bytes back_from_gpu = back;
  back_on_gpu.read(back_from_gpu);
  context.expect_ok(matrix.dequantize(matrix.q(q.data()), matrix.scales(scales.data()), matrix.x(back.data()), {}, {}),
                    matrix.name());
  context.expect(back_from_gpu == back, matrix.name() + ": values differ");
}

/// Draws blocks of many magnitudes, with zeros and random bit patterns.
Bytes draw_values(std::mt19937_64& random, const Matrix& matrix) {
  std::normal_distribution<float> normal;
  Bytes bytes(matrix.x_bytes());
  const std::size_t element_bytes = size_bytes(matrix.x_dtype);
  int exponent = 0;
  bool any_bits = false;
  for (std::size_t i = 0; i < bytes.size() / element_bytes; ++i) {
    if (i % 64 == 0) {
      exponent = static_cast<int>(random() % 80) - 40;
      any_bits = random() % 8 == 0;
    }
    auto bits = std::bit_cast<std::uint32_t>(std::ldexp(normal(random), exponent));
    if (any_bits || random() % 512 == 0) bits = static_cast<std::uint32_t>(random());
    if (random() % 64 == 0) bits &= 0x80000000U;
    if (element_bytes == 2) bits >>= 16;
    std::memcpy(bytes.data() + i * element_bytes, &bits, element_bytes);
  }
  return bytes;
}

Matrix draw_matrix(std::mt19937_64& random) {
  Matrix matrix;
  matrix.mode = kModes[random() % kModes.size()];
  matrix.x_dtype = random() % 3 == 0 ? DType::kFloat32 : DType::kBfloat16;
  if (matrix.mode == Quantization::kFp8Ue8m0) matrix.scale_dtype = random() % 2 == 0 ? DType::kUint8 : DType::kInt32;
  matrix.num_tokens = static_cast<std::int64_t>(random() % 20);
  matrix.hidden = static_cast<std::int64_t>(1 + random() % 3000);
  if (random() % 2 == 0) matrix.hidden = (matrix.hidden + 15) / 16 * 16;
  matrix.x_stride = matrix.hidden + static_cast<std::int64_t>(random() % 3 * 8);
  matrix.q_stride = matrix.hidden + static_cast<std::int64_t>(random() % 3 * 8);
  matrix.column_major = random() % 2 == 0;
  if (random() % 4 == 0) matrix.skipped = static_cast<std::int64_t>(random() % 8);
  return matrix;
}

TEST(QuantizeOnGpu, RandomMatricesOfAnyShapeAndAlignment) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    std::mt19937_64 random(11);
    for (int i = 0; i < 400; ++i) {
      const Matrix matrix = draw_matrix(random);
      compare(context, matrix, draw_values(random, matrix));
    }
  });
}

TEST(QuantizeOnGpu, AsManyRowsAsAModelSends) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    std::mt19937_64 random(12);
    for (Quantization mode : kModes) {
      Matrix matrix{.mode = mode, .num_tokens = 600, .hidden = 7168, .x_stride = 7168, .q_stride = 7168};
      if (mode == Quantization::kFp8Ue8m0) matrix.scale_dtype = DType::kInt32;
      compare(context, matrix, draw_values(random, matrix));
    }
  });
}

TEST(QuantizeOnGpu, EveryBfloat16UnderMultipliersOfAllSizes) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    for (Quantization mode : kModes) {
      // A block has 127 values and one that determines its maximum.
      constexpr std::int64_t kNumMaxima = 24;
      Matrix matrix{.mode = mode, .num_tokens = kNumMaxima, .hidden = 517 * 128};
      if (mode == Quantization::kFp8Ue8m0) matrix.scale_dtype = DType::kUint8;
      matrix.x_stride = matrix.q_stride = matrix.hidden;
      std::vector<std::uint16_t> x;
      for (std::int64_t row = 0; row < kNumMaxima; ++row) {
        const auto largest = static_cast<std::uint16_t>(0x3800 + row * 0x133);
        for (std::int64_t col = 0; col < matrix.hidden; ++col) {
          const auto bits = static_cast<std::uint16_t>(col / 128 * 127 + col % 128);
          // Values above the maximum would replace it; they occur in rows with larger maxima, or alone in a block.
          const bool above = (bits & 0x7FFF) > largest && row + 1 < kNumMaxima;
          x.push_back(col % 128 == 127 ? largest : above ? static_cast<std::uint16_t>(bits & 0xBFFF) : bits);
        }
      }
      Bytes bytes(x.size() * sizeof(x[0]));
      std::memcpy(bytes.data(), x.data(), bytes.size());
      compare(context, matrix, std::move(bytes));
    }
  });
}

TEST(QuantizeOnGpu, EveryCodeUnderEveryExponent) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    for (DType dtype : {DType::kBfloat16, DType::kFloat32}) {
      const Matrix matrix{.mode = Quantization::kFp8Ue8m0,
                          .x_dtype = dtype,
                          .scale_dtype = DType::kUint8,
                          .num_tokens = 256,
                          .hidden = 256,
                          .x_stride = 256,
                          .q_stride = 256};
      Bytes q;
      Bytes scales;
      for (int exponent = 0; exponent < 256; ++exponent) {
        for (int code = 0; code < 256; ++code) q.push_back(static_cast<std::byte>(code));
        scales.insert(scales.end(), 2, static_cast<std::byte>(exponent));
      }
      Bytes back = pattern(matrix.x_bytes());
      const OnDevice<std::byte> q_on_gpu(q);
      const OnDevice<std::byte> scales_on_gpu(scales);
      const OnDevice<std::byte> back_on_gpu(back);
      context.expect_ok(matrix.dequantize(matrix.q(q_on_gpu.data()), matrix.scales(scales_on_gpu.data()),
                                          matrix.x(back_on_gpu.data()), on_gpu(), thread_stream()),
                        "dequantize");
      Bytes from_gpu = back;
      back_on_gpu.read(from_gpu);
      throw_if_error(
          matrix.dequantize(matrix.q(q.data()), matrix.scales(scales.data()), matrix.x(back.data()), {}, {}));
      context.expect(from_gpu == back, fmt::format("values in {} differ", to_string(dtype)));
    }
  });
}

TEST(QuantizeOnGpu, RefusesHostMemory) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    const Matrix matrix;
    Bytes x = pattern(matrix.x_bytes());
    const OnDevice<std::byte> q(pattern(matrix.q_bytes()));
    const OnDevice<std::byte> scales(pattern(matrix.scale_bytes()));
    const Status status = matrix.quantize(matrix.x(x.data()), matrix.q(q.data()), matrix.scales(scales.data()),
                                          on_gpu(), thread_stream());
    context.expect_code(status, ErrorCode::kInvalidArgument, "x in host memory");
    context.expect(status.message().find("quantize_fp8: x is at") != std::string_view::npos,
                   std::string(status.message()));
    Bytes untouched = Bytes(matrix.q_bytes());
    q.read(untouched);
    context.expect(untouched == pattern(matrix.q_bytes()), "q was written");
  });
}

}  // namespace
}  // namespace ferry::test
