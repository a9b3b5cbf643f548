#ifndef FERRY_CUDA_INTRANODE_VERIFY_PARAMS_HPP
#define FERRY_CUDA_INTRANODE_VERIFY_PARAMS_HPP

/// Checksums of rows (GroupOptions::verify) on one node, by kernels of their own beside those of dispatch and combine:
///
///   dispatch   seal: the source computes the checksum of each of its destinations' rows, with scales, ids and weights
///              dispatch
///              verify: an exchange of all ranks; each checks its outputs with the checksums in the sources' memory
///   combine    (rows that peers cannot reach: a copy)
///              seal: each rank computes the checksums of the rows that it returns, with their weights
///              verify: an exchange of all ranks; each reads its tokens' rows in the holders' memory and checks them
///              combine, which reads the same rows again; it moves nothing if the exchange was refused

#include <cuda_runtime_api.h>

#include "cuda/call/verify_tables.hpp"
#include "cuda/intranode/combine_params.hpp"
#include "cuda/intranode/dispatch_params.hpp"
#include "cuda/sync/corrupt_report.hpp"

namespace ferry::cuda {

/// Warps of a block of these kernels: enough to keep a multiprocessor's loads in flight with few blocks.
inline constexpr int kVerifyWarps = 8;

/// Both kernels of a dispatch.
struct DispatchVerifyParams {
  DispatchParams call;  ///< its entry is not used
  EntryMessage entry;   ///< tables_offset: of the entries. num_blocks: of the launch
  VerifyTables tables;
  CorruptReport* report = nullptr;
  const std::int32_t* source = nullptr;  ///< [num_rows, 2]
  std::int64_t num_rows = 0;
};
cudaError_t launch_seal_dispatch(const DispatchVerifyParams& params, cudaStream_t stream);
/// After launch_dispatch, which writes the outcome of the call: this kernel does nothing in a call that was refused.
cudaError_t launch_verify_dispatch(const DispatchVerifyParams& params, cudaStream_t stream);

/// Both kernels of a combine.
struct CombineVerifyParams {
  CombineParams call;  ///< its entry is not used; `x`: the rows that peers reach
  /// rows_offset, rows_stride: of those rows. tables_offset: of their checksums. weights_offset: of their weights.
  /// num_blocks: of the launch. agreement 0: this rank refuses the call
  EntryMessage entry;
  VerifyTables tables;
  CorruptReport* report = nullptr;
  const std::byte* sealed_x = nullptr;  ///< the caller's rows, from which checksums are computed
  std::int64_t sealed_stride = 0;
  const float* weights = nullptr;  ///< that return with the rows; null: none
  std::int64_t num_rows = 0;
};
cudaError_t launch_seal_combine(const CombineVerifyParams& params, cudaStream_t stream);
/// Before launch_combine, whose `summary` must be the gate in `tables`.
cudaError_t launch_verify_combine(const CombineVerifyParams& params, cudaStream_t stream);

cudaError_t load_verify_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_VERIFY_PARAMS_HPP
