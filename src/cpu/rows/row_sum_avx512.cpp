#include "cpu/rows/row_sum_kernel.hpp"

namespace ferry::cpu {

extern const RowSumFunction row_sum_avx512_bf16;
extern const RowSumFunction row_sum_avx512_f32;
const RowSumFunction row_sum_avx512_bf16 = sum_rows<Bf16>;
const RowSumFunction row_sum_avx512_f32 = sum_rows<Float32>;

}  // namespace ferry::cpu
