#ifndef FERRY_CUDA_LATENCY_KERNELS_HPP
#define FERRY_CUDA_LATENCY_KERNELS_HPP

/// The kernels of latency mode, and how hosts load and launch them.
///
///   file         part of a call         kernel                   one for each                blocks
///   dispatch.cu  whole                  dispatch_kernel          codec, homes                as the call says
///                whole, if is_small()   dispatch_small_kernel    codec                       as the call says
///                either half            dispatch_half_kernel     codec, homes; codec, masks  as the call says
///                the same, if small     dispatch_small_half_kernel  codec                    as the call says
///   combine.cu   whole                  combine_kernel           kind of rows, words         as the call says
///                whole, if is_small()   combine_small_kernel     kind of rows                as the call says
///                either half            combine_half_kernel      kind of rows, words; masks  as the call says
///                the same, if small     combine_small_half_kernel  kind of rows              as the call says
///                weights of its own     weights_send_kernel      masks                       as the call says
///   tiles.cu     before a small combine with TileSignals  tiles_gate_kernel                  1
///   refusal.cu   whole                  refusal_kernel                                       1
///                send half              refusal_send_kernel      masks                       1
///                receive half           refusal_receive_kernel   masks                       1
///   masks.cu     before a send half     grants_gate_kernel       masks                       1
///                before a receive half  arrivals_gate_kernel     masks                       R
///                after weights          weights_gate_kernel      masks                       R
///                update, query          mask_update_kernel,      masks                       1
///                                       mask_query_kernel
///   far.cu       before a refusal       far_refusal_kernel,                                  1
///                                       far_headers_kernel                                   1
///   nodes_dispatch.cu  either half      dispatch_nodes_kernel    codec, homes                as the call says
///                the same, if small     dispatch_nodes_small_kernel  codec                   as the call says
///   nodes_combine.cu   either half      combine_nodes_kernel     kind of rows                as the call says
///                the same, if small     combine_nodes_small_kernel  kind of rows             as the call says
///
/// Programs written for deep_ep find kernels in a profile by name: those of a dispatch by "::dispatch", of a combine by
/// "::combine", one kernel of a call or its two halves under the same name, arguments of templates included. So both
/// halves are one kernel, and no other kernel has either word in its name.
///
/// Each .cu file ends with its rows of this table, as KernelRow, from which its kernels are loaded and launched.

#include <cuda_runtime_api.h>

#include "cuda/latency/mask.hpp"
#include "cuda/latency/params.hpp"

namespace ferry::cuda {

// In groups that mask ranks (`mask` is present) a whole call is made as two halves, and each half comes after its gate.

/// `num_receive_blocks`: blocks of the receive half if it is a kernel of its own.
cudaError_t launch_latency_dispatch(const LatencyDispatchParams& params, int num_receive_blocks, const MaskParams& mask,
                                    cudaStream_t stream);
cudaError_t launch_dispatch_send(const LatencyDispatchParams& params, const MaskParams& mask, cudaStream_t stream);
cudaError_t launch_dispatch_receive(const DispatchReceiveParams& params, const MaskParams& mask, cudaStream_t stream);

cudaError_t launch_latency_combine(const LatencyCombineParams& params, const MaskParams& mask, cudaStream_t stream);
cudaError_t launch_combine_send(const CombineSendParams& params, const MaskParams& mask, cudaStream_t stream);
cudaError_t launch_combine_receive(const CombineReceiveParams& params, const MaskParams& mask, cudaStream_t stream);

/// Comes before a combine for few tokens that has signals.
cudaError_t launch_tiles_gate(const TilesGateParams& params, cudaStream_t stream);

cudaError_t launch_latency_refusal(const LatencyRefusalParams& params, const MaskParams& mask, cudaStream_t stream);

cudaError_t launch_mask_update(const MaskUpdateParams& params, cudaStream_t stream);
cudaError_t launch_mask_query(const MaskQueryParams& params, cudaStream_t stream);

/// Loads all kernels that a group launches; those for masks only if it `masks` ranks.
cudaError_t load_latency_kernels(bool masks);

// In groups of several nodes a whole call is made as two halves; `homes`: as for DispatchReceiveRows.
cudaError_t launch_nodes_dispatch_send(const FarDispatchParams& params, bool homes, cudaStream_t stream);
cudaError_t launch_nodes_dispatch_receive(const FarDispatchReceiveParams& params, cudaStream_t stream);
cudaError_t launch_nodes_combine_send(const FarCombineParams& params, cudaStream_t stream);
cudaError_t launch_nodes_combine_receive(const CombineReceiveParams& params, cudaStream_t stream);
/// Comes before a refusal there.
cudaError_t launch_far_refusal(const FarRefusalParams& params, cudaStream_t stream);
cudaError_t load_far_kernels();

// Parts of the functions above.
cudaError_t launch_grants_gate(const MaskGateParams& params, cudaStream_t stream);
cudaError_t launch_arrivals_gate(const MaskGateParams& params, cudaStream_t stream);
cudaError_t launch_weights_gate(const MaskGateParams& params, cudaStream_t stream);
cudaError_t load_latency_dispatch(bool masks);
cudaError_t load_latency_combine(bool masks);
cudaError_t load_latency_refusal(bool masks);
cudaError_t load_tiles_gate();
cudaError_t load_masks();
cudaError_t load_nodes_combine();
cudaError_t load_nodes_dispatch();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_KERNELS_HPP
