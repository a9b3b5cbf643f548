#ifndef FERRY_CUDA_MEMORY_MEMORY_CHECKS_HPP
#define FERRY_CUDA_MEMORY_MEMORY_CHECKS_HPP

/// Checks that a caller's tensors are in memory of this rank's GPU, and that its stream belongs to it. Memory of the
/// group's arena needs no look-up. Every other pointer is looked up through the driver in every call, because a freed
/// address may have been reused since the previous one.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "core/backend.hpp"
#include "cuda/memory/device_arena.hpp"
#include "numeric/gating.hpp"
#include "numeric/quantize.hpp"
#include "plan/arrival_tables.hpp"
#include "plan/expansion.hpp"
#include "plan/token_layout.hpp"

namespace ferry::cuda {

Status check_route_memory(const RouteCall& call, const DeviceArena& arena);
Status check_dispatch_memory(const DispatchCall& call, const DeviceArena& arena);
Status check_combine_memory(const CombineCall& call, const DeviceArena& arena);
Status check_channel_tables_memory(const ChannelTablesCall& call, std::int64_t num_tokens, const DeviceArena& arena);
/// `times_ns`: wait times of a call of latency mode; null: none.
Status check_wait_times_memory(std::string_view operation, const std::int64_t* times_ns, const DeviceArena& arena);
Status check_signals_memory(const TileSignals& signals, const DeviceArena& arena);
/// `out`: result of latency_query_mask.
Status check_mask_memory(const ConstTensorView& out, const DeviceArena& arena);
Status check_layout_memory(const plan::TokenLayoutParams& params, int device);
Status check_arrivals_memory(const plan::ArrivalParams& params, int device);
Status check_expand_memory(const plan::ExpandParams& params, int device);
Status check_reduce_memory(const plan::ReduceParams& params, int device);
Status check_quantize_memory(std::string_view operation, const numeric::QuantizeParams& params, int device);
Status check_gating_memory(std::string_view operation, const numeric::GatingParams& params, int device);
Status check_stream_device(std::string_view operation, cudaStream_t stream, int device);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_MEMORY_CHECKS_HPP
