#include "ferry/fp8.hpp"

#include "numeric/block_codec.hpp"

namespace ferry {

std::uint8_t fp8_e4m3_from_float(float value) { return numeric::quantize_e4m3(numeric::bits_of(value), 1.0F); }

float float_from_fp8_e4m3(std::uint8_t bits) { return numeric::decode_e4m3(bits); }

}  // namespace ferry
