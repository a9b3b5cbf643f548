#include "cuda/local/local_ops.hpp"

namespace ferry::cuda {

const LocalOps& local_ops() {
  static constexpr LocalOps kOps{.count_layout = count_layout,
                                 .write_arrivals = write_arrivals,
                                 .expand_rows = expand_rows,
                                 .reduce_rows = reduce_rows,
                                 .quantize = quantize,
                                 .dequantize = dequantize,
                                 .select_experts = select_experts};
  return kOps;
}

}  // namespace ferry::cuda
