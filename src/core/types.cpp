#include "ferry/types.hpp"

namespace ferry {

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
      return "u8";
    case DType::kInt32:
      return "i32";
    case DType::kInt64:
      return "i64";
    case DType::kFloat32:
      return "f32";
    case DType::kFloat16:
      return "f16";
    case DType::kBfloat16:
      return "bf16";
    case DType::kFloat8E4M3:
      return "fp8_e4m3";
    case DType::kInt8:
      return "i8";
  }
  return "unknown";
}

}  // namespace ferry
