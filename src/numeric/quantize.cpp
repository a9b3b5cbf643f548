#include "numeric/quantize.hpp"

#include <algorithm>
#include <array>

#include "numeric/block_codec.hpp"

namespace ferry::numeric {
namespace {

constexpr auto kBlock = static_cast<std::size_t>(kQuantBlockSize);
using BlockBits = std::array<std::uint32_t, kBlock>;

constexpr std::array<float, 256> make_decode_table(bool is_int8) {
  std::array<float, 256> table{};
  for (std::uint32_t code = 0; code < table.size(); ++code) {
    table[code] = is_int8 ? static_cast<float>(static_cast<std::int8_t>(code)) : decode_e4m3(code);
  }
  return table;
}
constexpr std::array<float, 256> kFp8Table = make_decode_table(false);
constexpr std::array<float, 256> kInt8Table = make_decode_table(true);

// The work on a row is inlined into one function per instruction set, which determines the width of its loops.

/// Loads a block of x as the bits of f32.
[[gnu::always_inline]] inline void load_block(const QuantizeParams& params, std::int64_t row, std::int64_t first,
                                              std::size_t count, BlockBits& block) {
  const std::int64_t offset = row * params.x_stride + first;
  if (params.x_dtype == DType::kFloat32) {
    const float* from = static_cast<const float*>(params.x) + offset;
    for (std::size_t i = 0; i < count; ++i) block[i] = bits_of(from[i]);
    return;
  }
  const std::uint16_t* from = static_cast<const std::uint16_t*>(params.x) + offset;
  for (std::size_t i = 0; i < count; ++i) block[i] = static_cast<std::uint32_t>(from[i]) << 16;
}

/// Bits of the largest |value|, not below the floor. Positive floats order like their bits, and integers vectorise.
template <bool kIsInt8>
[[gnu::always_inline]] inline std::uint32_t block_amax(const BlockBits& block, std::size_t count) {
  auto amax = static_cast<std::int32_t>(bits_of(kQuantAmaxFloor));
  for (std::size_t i = 0; i < count; ++i) {
    amax = std::max(amax, static_cast<std::int32_t>(amax_candidate(block[i] & kFloatMagnitude, kIsInt8)));
  }
  return static_cast<std::uint32_t>(amax);
}

template <bool kIsInt8>
[[gnu::always_inline]] inline void encode_block(const BlockBits& block, std::size_t count, const BlockScale& scale,
                                                std::uint8_t* q) {
  if (scale.blank) {
    std::fill_n(q, count, std::uint8_t{0});
    return;
  }
  const float multiplier = scale.multiplier;
  for (std::size_t i = 0; i < count; ++i) {
    q[i] = kIsInt8 ? quantize_int8(block[i], multiplier) : quantize_e4m3(block[i], multiplier);
  }
}

/// Byte of exponent `block` of a row. (Little-endian: the first of four is the low byte.)
std::byte* exponent_at(const BlockScales& scales, std::int64_t row, std::int64_t block) {
  if (scales.dtype == DType::kUint8) return scales.data + row * scales.row_stride + block * scales.column_stride;
  const std::int64_t word = row * scales.row_stride + block / kPackedScales * scales.column_stride;
  return scales.data + word * kPackedScales + block % kPackedScales;
}

float* float_at(const BlockScales& scales, std::int64_t row, std::int64_t block) {
  return reinterpret_cast<float*>(scales.data) + row * scales.row_stride + block * scales.column_stride;
}

void store_scale(const BlockScales& scales, std::int64_t row, std::int64_t block, const BlockScale& scale) {
  if (scales.dtype == DType::kFloat32) {
    *float_at(scales, row, block) = scale.stored;
  } else {
    *exponent_at(scales, row, block) = std::byte{scale.exponent};
  }
}

float load_scale(const BlockScales& scales, std::int64_t row, std::int64_t block) {
  if (scales.dtype == DType::kFloat32) return *float_at(scales, row, block);
  return float_from_ue8m0(std::to_integer<std::uint32_t>(*exponent_at(scales, row, block)));
}

/// Clears the exponents of a row's last word that belong to no block.
void clear_spare_exponents(const QuantizeParams& params, std::int64_t row) {
  if (params.scales.dtype != DType::kInt32) return;
  const std::int64_t end = num_scale_columns(params.hidden, DType::kInt32) * kPackedScales;
  for (std::int64_t block = num_blocks(params.hidden); block < end; ++block) {
    *exponent_at(params.scales, row, block) = std::byte{0};
  }
}

template <bool kIsInt8>
[[gnu::always_inline]] inline void quantize_rows_as(const QuantizeParams& params) {
  BlockBits block;
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    std::uint8_t* const q_row = params.q + row * params.q_stride;
    for (std::int64_t first = 0; first < params.hidden; first += kQuantBlockSize) {
      const auto count = static_cast<std::size_t>(std::min(kQuantBlockSize, params.hidden - first));
      load_block(params, row, first, count, block);
      const BlockScale scale = make_scale(block_amax<kIsInt8>(block, count), params.mode);
      encode_block<kIsInt8>(block, count, scale, q_row + first);
      store_scale(params.scales, row, first / kQuantBlockSize, scale);
    }
    clear_spare_exponents(params, row);
  }
}

template <bool kIsInt8>
void quantize_rows_generic(const QuantizeParams& params) {
  quantize_rows_as<kIsInt8>(params);
}

#if defined(__x86_64__)
template <bool kIsInt8>
[[gnu::target("avx2")]] void quantize_rows_avx2(const QuantizeParams& params) {
  quantize_rows_as<kIsInt8>(params);
}

template <bool kIsInt8>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void quantize_rows_avx512(const QuantizeParams& params) {
  quantize_rows_as<kIsInt8>(params);
}
#endif

/// First of quantize_variants that this processor supports.
const QuantizeVariant& best_variant() {
  const std::span<const QuantizeVariant> variants = quantize_variants();
  return *std::find_if(variants.begin(), variants.end(), [](const QuantizeVariant& one) { return one.available; });
}

void store_value(const QuantizeParams& params, std::int64_t offset, float value) {
  if (params.x_dtype == DType::kFloat32) {
    static_cast<std::uint32_t*>(params.x)[offset] = canonical_float(value);
  } else {
    static_cast<std::uint16_t*>(params.x)[offset] = bfloat16_from_float(value);
  }
}

}  // namespace

std::span<const QuantizeVariant> quantize_variants() {
  static const QuantizeVariant variants[] = {
#if defined(__x86_64__)
    {"avx512",
     __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0,
     quantize_rows_avx512<false>, quantize_rows_avx512<true>},
    {"avx2", __builtin_cpu_supports("avx2") != 0, quantize_rows_avx2<false>, quantize_rows_avx2<true>},
#endif
    {"generic", true, quantize_rows_generic<false>, quantize_rows_generic<true>},
  };
  return variants;
}

void quantize_rows(const QuantizeParams& params) {
  static const QuantizeVariant& variant = best_variant();
  (params.mode == Quantization::kInt8 ? variant.to_int8 : variant.to_fp8)(params);
}

void dequantize_rows(const QuantizeParams& params) {
  const std::array<float, 256>& values = params.mode == Quantization::kInt8 ? kInt8Table : kFp8Table;
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    const std::uint8_t* const q_row = params.q + row * params.q_stride;
    for (std::int64_t first = 0; first < params.hidden; first += kQuantBlockSize) {
      const std::int64_t last = std::min(first + kQuantBlockSize, params.hidden);
      const float scale = load_scale(params.scales, row, first / kQuantBlockSize);
      for (std::int64_t col = first; col < last; ++col) {
        store_value(params, row * params.x_stride + col, values[q_row[col]] * scale);
      }
    }
  }
}

}  // namespace ferry::numeric
