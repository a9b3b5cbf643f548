#ifndef FERRY_CUDA_LOCAL_LOCAL_OPS_HPP
#define FERRY_CUDA_LOCAL_LOCAL_OPS_HPP

/// The CUDA backend's part of the calls that need no group: each checks that its pointers are memory of the call's GPU
/// and launches.

#include "local/local_ops.hpp"

namespace ferry::cuda {

Status count_layout(const LocalCall& call, const plan::TokenLayoutParams& params);
Status write_arrivals(const LocalCall& call, const plan::ArrivalParams& params);
Status expand_rows(const LocalCall& call, const plan::ExpandParams& params);
Status reduce_rows(const LocalCall& call, const plan::ReduceParams& params);
Status quantize(const LocalCall& call, const numeric::QuantizeParams& params);
Status dequantize(const LocalCall& call, const numeric::QuantizeParams& params);
Status select_experts(const LocalCall& call, const numeric::GatingParams& params);

/// The table of these.
const LocalOps& local_ops();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_LOCAL_OPS_HPP
