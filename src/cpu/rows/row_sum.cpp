#include "cpu/rows/row_sum.hpp"

namespace ferry::cpu {

extern const RowSumFunction row_sum_generic_bf16;
extern const RowSumFunction row_sum_generic_f32;
#if defined(__x86_64__)
extern const RowSumFunction row_sum_avx2_bf16;
extern const RowSumFunction row_sum_avx2_f32;
extern const RowSumFunction row_sum_avx512_bf16;
extern const RowSumFunction row_sum_avx512_f32;
#endif

#if defined(__x86_64__)
namespace {

// Parts of the x86-64-v3 and -v4 levels that every compiler's builtin can name; no processor has these without the rest
// of the level.
bool has_avx2_level() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
         __builtin_cpu_supports("bmi") != 0 && __builtin_cpu_supports("bmi2") != 0;
}

bool has_avx512_level() {
  return has_avx2_level() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512cd") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0;
}

}  // namespace
#endif

const RowSumVariant* row_sum_variants(std::size_t* count) {
#if defined(__x86_64__)
  static const RowSumVariant variants[] = {
      {"avx512", has_avx512_level(), row_sum_avx512_bf16, row_sum_avx512_f32},
      {"avx2", has_avx2_level(), row_sum_avx2_bf16, row_sum_avx2_f32},
      {"generic", true, row_sum_generic_bf16, row_sum_generic_f32},
  };
#else
  static const RowSumVariant variants[] = {{"generic", true, row_sum_generic_bf16, row_sum_generic_f32}};
#endif
  *count = sizeof(variants) / sizeof(variants[0]);
  return variants;
}

RowSumFunction choose_row_sum(DType dtype) {
  std::size_t count = 0;
  const RowSumVariant* variants = row_sum_variants(&count);
  std::size_t best = 0;
  while (!variants[best].available) ++best;
  return dtype == DType::kBfloat16 ? variants[best].bf16 : variants[best].f32;
}

}  // namespace ferry::cpu
