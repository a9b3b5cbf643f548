#include "bench/raw_exchange.hpp"

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/cuda_status.hpp"
#include "device/launch.hpp"

namespace ferry::tools {

namespace {

constexpr int kWarpLanes = 32;
constexpr std::int64_t kGranuleBytes = 16;

/// Push: enough stages that a warp's next loads run during its last stores. Bulk copies of 512 bytes to 14 KB reached
/// the same rate on H200, so pieces may be as small as shared memory requires.
constexpr int kPushWarps = 8;
constexpr int kPushStages = 3;
constexpr int kMaxPieceBytes = 8192;
constexpr int kPieceAlignment = 128;
/// Shared memory for the barriers, in front of the pieces.
constexpr int kBarrierBytes = 1024;
static_assert(kPushWarps * kPushStages * sizeof(std::uint64_t) <= kBarrierBytes);

/// Pull: 512 threads with 8 loads of 16 bytes each keep 64 KB in flight per multiprocessor.
constexpr int kPullThreads = 512;
constexpr int kPullRows = 8;
/// Unit of work of a warp: this many granules of each of its rows.
constexpr std::int64_t kPullGranules = 128;

struct PushParams {
  RawExchangeParams exchange;
  int piece_bytes;
};

__device__ std::byte* target_row(const RawExchangeParams& params, std::int64_t row) {
  const auto row_idx = static_cast<std::uint32_t>(row);
  const auto num_targets = static_cast<std::uint32_t>(params.num_targets);
  return params.sections[row_idx % num_targets] + static_cast<std::int64_t>(row_idx / num_targets) * params.row_stride;
}

/// Rows of one warp: a contiguous run, so that consecutive rows go to different targets.
struct WarpRows {
  __device__ WarpRows(const RawExchangeParams& params, std::int64_t warp_idx, std::int64_t num_warps)
      : first(params.num_rows * warp_idx / num_warps), count(params.num_rows * (warp_idx + 1) / num_warps - first) {}
  std::int64_t first;
  std::int64_t count;
};

#if __CUDA_ARCH__ >= 900

__device__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Completes the barrier's phase when `num_bytes` have arrived. PTX ISA, mbarrier.
__device__ void expect_bytes(std::uint64_t* barrier, std::uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}

__device__ void wait_for_phase(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred complete;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        " selp.u32 %0, 1, 0, complete;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

/// Copies from global to shared memory and signals the completion to a barrier. PTX ISA, cp.async.bulk.
__device__ void bulk_load(std::byte* shared, const std::byte* global, std::uint32_t num_bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(num_bytes), "r"(shared_address(barrier))
               : "memory");
}

/// Copies from shared to global memory, possibly a peer's, in a bulk group of its own.
__device__ void bulk_store(std::byte* global, const std::byte* shared, std::uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(num_bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// One lane moves all rows of its warp, piece by piece, through kPushStages places in shared memory.
__device__ void push_rows(const PushParams& params, const WarpRows& rows, std::byte* pieces, std::uint64_t* barriers) {
  const RawExchangeParams& exchange = params.exchange;
  const std::int64_t pieces_per_row = (exchange.row_bytes + params.piece_bytes - 1) / params.piece_bytes;
  const std::int64_t num_steps = rows.count * pieces_per_row;
  const auto offset_of = [&](std::int64_t step) { return step % pieces_per_row * params.piece_bytes; };
  const auto bytes_of = [&](std::int64_t step) {
    const std::int64_t left = exchange.row_bytes - offset_of(step);
    return static_cast<std::uint32_t>(left < params.piece_bytes ? left : params.piece_bytes);
  };
  const auto load = [&](std::int64_t step) {
    const auto stage = static_cast<int>(step % kPushStages);
    const std::int64_t row = rows.first + step / pieces_per_row;
    expect_bytes(&barriers[stage], bytes_of(step));
    bulk_load(pieces + stage * params.piece_bytes, exchange.local + row * exchange.row_stride + offset_of(step),
              bytes_of(step), &barriers[stage]);
  };
  for (std::int64_t step = 0; step < num_steps && step < kPushStages - 1; ++step) load(step);
  for (std::int64_t step = 0; step < num_steps; ++step) {
    const auto stage = static_cast<int>(step % kPushStages);
    wait_for_phase(&barriers[stage], static_cast<std::uint32_t>(step / kPushStages % 2));
    bulk_store(target_row(exchange, rows.first + step / pieces_per_row) + offset_of(step),
               pieces + stage * params.piece_bytes, bytes_of(step));
    // The next load overwrites the place from which the previous store read.
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    if (step + kPushStages - 1 < num_steps) load(step + kPushStages - 1);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif

__global__ void __launch_bounds__(kPushWarps* kWarpLanes) push_kernel(const __grid_constant__ PushParams params) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const WarpRows rows(params.exchange, std::int64_t{blockIdx.x} * kPushWarps + warp,
                      std::int64_t{gridDim.x} * kPushWarps);
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) std::byte shared[];
  if (lane != 0) return;
  auto* const barriers = reinterpret_cast<std::uint64_t*>(shared) + warp * kPushStages;
  for (int stage = 0; stage < kPushStages; ++stage) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[stage])) : "memory");
  }
  // The copy engine must see the barriers before it gets work that uses them.
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  push_rows(params, rows, shared + kBarrierBytes + warp * kPushStages * params.piece_bytes, barriers);
#else
  const std::int64_t num_granules = params.exchange.row_bytes / kGranuleBytes;
  for (std::int64_t row = rows.first; row < rows.first + rows.count; ++row) {
    const auto* from = reinterpret_cast<const uint4*>(params.exchange.local + row * params.exchange.row_stride);
    auto* to = reinterpret_cast<uint4*>(target_row(params.exchange, row));
#pragma unroll 4
    for (std::int64_t i = lane; i < num_granules; i += kWarpLanes) to[i] = from[i];
  }
#endif
}

/// Peers' rows need not stay in the first-level cache, because they are read only once. PTX ISA, ld.
__device__ uint4 load_once(const std::byte* pointer) {
#if defined(__CUDA_ARCH__)
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(pointer)));
  return value;
#else
  return *reinterpret_cast<const uint4*>(pointer);
#endif
}

__global__ void __launch_bounds__(kPullThreads, 1) pull_kernel(const __grid_constant__ RawExchangeParams params) {
  const std::int64_t num_granules = params.row_bytes / kGranuleBytes;
  const std::int64_t num_slices = (num_granules + kPullGranules - 1) / kPullGranules;
  const std::int64_t num_units = (params.num_rows + kPullRows - 1) / kPullRows * num_slices;
  constexpr int kWarps = kPullThreads / kWarpLanes;
  const auto lane = static_cast<std::int64_t>(threadIdx.x % kWarpLanes);
  const std::int64_t first_unit = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpLanes;
  for (std::int64_t unit = first_unit; unit < num_units; unit += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t group = unit / num_slices;
    const std::int64_t first_granule = unit % num_slices * kPullGranules;
    const std::int64_t end_granule =
        first_granule + kPullGranules < num_granules ? first_granule + kPullGranules : num_granules;
    const std::byte* rows[kPullRows];
#pragma unroll
    for (int i = 0; i < kPullRows; ++i) {
      const std::int64_t row = group * kPullRows + i;
      rows[i] = row < params.num_rows ? target_row(params, row) : nullptr;
    }
    std::byte* const to = params.local + group * params.row_stride;
    for (std::int64_t granule = first_granule + lane; granule < end_granule; granule += kWarpLanes) {
      uint4 values[kPullRows];
#pragma unroll
      for (int i = 0; i < kPullRows; ++i) {
        values[i] = rows[i] != nullptr ? load_once(rows[i] + granule * kGranuleBytes) : uint4{};
      }
      uint4 sum{};
#pragma unroll
      for (int i = 0; i < kPullRows; ++i) {
        sum.x ^= values[i].x;
        sum.y ^= values[i].y;
        sum.z ^= values[i].z;
        sum.w ^= values[i].w;
      }
      *reinterpret_cast<uint4*>(to + granule * kGranuleBytes) = sum;
    }
  }
}

}  // namespace

Status raw_push(const RawExchangeParams& params, int num_sms, Stream stream) {
  int device = 0;
  int compute_major = 0;
  int max_shared_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&compute_major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  PushParams push{params, 0};
  int shared_bytes = 0;
  constexpr int kFirstWithBulkCopies = 9;
  if (error == cudaSuccess && compute_major >= kFirstWithBulkCopies) {
    constexpr int kNumPieces = kPushWarps * kPushStages;
    const int room = (max_shared_bytes - kBarrierBytes) / kNumPieces / kPieceAlignment * kPieceAlignment;
    push.piece_bytes = room < kMaxPieceBytes ? room : kMaxPieceBytes;
    shared_bytes = kBarrierBytes + kNumPieces * push.piece_bytes;
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(push_kernel),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error != cudaSuccess) return cuda_status("raw push", error);
  const LaunchShape shape{static_cast<unsigned>(num_sms), kPushWarps * kWarpLanes,
                          static_cast<std::size_t>(shared_bytes)};
  return cuda_status("raw push", launch(push_kernel, shape, push, stream));
}

Status raw_pull(const RawExchangeParams& params, int num_sms, Stream stream) {
  return cuda_status("raw pull", launch(pull_kernel, {static_cast<unsigned>(num_sms), kPullThreads}, params, stream));
}

}  // namespace ferry::tools
