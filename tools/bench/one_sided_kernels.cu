#include "bench/one_sided_kernels.hpp"

#include <algorithm>

#include "device/cuda_status.hpp"
#include "device/launch.hpp"
#include "ferry/device/one_sided.cuh"

namespace ferry::tools {
namespace {

using device::Code;
using device::GpuMemory;
using device::Scope;

constexpr unsigned kThreads = 512;
/// Same limit as the library's own copies (cuda/one_sided/backend.cpp).
constexpr int kMaxBlocks = 32;
/// Limit of a plain wait, which has no deadline; a poll takes about a microsecond.
constexpr unsigned kMaxPolls = 1U << 24;

/// True if the call succeeded. Calls after a failed one are skipped: each would wait until its own deadline.
__device__ bool note(const OneSidedKernelParams& params, Code code) {
  if (code == Code::kOk) return true;
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(params.failed), 1ULL);
  return false;
}

/// Copies like a program that knows that its addresses are aligned.
template <bool kFromPeer>
__device__ void copy_plainly(std::byte* to, const std::byte* from, std::uint64_t num_bytes) {
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  const std::uint64_t num_units = num_bytes / sizeof(uint4);
#pragma unroll 4
  for (std::uint64_t i = threadIdx.x; i < num_units; i += kThreads) {
    target[i] = kFromPeer ? GpuMemory::load_fresh(source + i) : source[i];
  }
  if (num_bytes % sizeof(uint4) != 0 && threadIdx.x == 0) {
    *reinterpret_cast<std::uint64_t*>(to) = *reinterpret_cast<const volatile std::uint64_t*>(from);
  }
  __syncthreads();
}

/// Sends a turn. The result is the same for all threads of the block, like that of `receive`.
template <bool kRaw>
__device__ bool send(const OneSidedKernelParams& params, std::uint64_t turn) {
  if constexpr (!kRaw) {
    if (params.op == BenchOp::kSignal) {
      return note(params, device::signal<Scope::kBlock>(params.world, params.other, params.word, turn, SignalOp::kSet));
    }
    return note(params, device::put_signal<Scope::kBlock>(params.world, params.other, params.block, params.local,
                                                          params.num_bytes, params.word, turn, SignalOp::kSet));
  }
  copy_plainly<false>(params.raw_block, params.local, params.op == BenchOp::kPut ? params.num_bytes : 0);
  if (threadIdx.x == 0) GpuMemory::store_release_system(params.raw_word, turn);
  return true;
}

template <bool kRaw>
__device__ bool receive(const OneSidedKernelParams& params, std::uint64_t turn) {
  if constexpr (!kRaw) {
    return note(params, device::wait_until<Scope::kBlock>(params.world, params.word, Comparison::kGreaterEqual, turn));
  }
  unsigned polls = 0;
  if (threadIdx.x == 0) {
    while (GpuMemory::load_acquire_system(params.word) < turn && ++polls < kMaxPolls) {
    }
  }
  return note(params, __syncthreads_or(polls == kMaxPolls ? 1 : 0) == 0 ? Code::kOk : Code::kTimeout);
}

/// Separate kernels for plain and library calls, so that the plain code does not contain the library's. One block per
/// multiprocessor, so that neither saves registers at the cost of memory accesses.
template <bool kRaw>
__global__ void __launch_bounds__(kThreads, 1) exchange_kernel(const __grid_constant__ OneSidedKernelParams params) {
  for (int call = 0; call < params.num_calls; ++call) {
    const std::uint64_t turn = params.turn + static_cast<std::uint64_t>(call) + 1;
    if (params.op == BenchOp::kGet) {
      if constexpr (kRaw) {
        copy_plainly<true>(params.local, params.raw_block, params.num_bytes);
      } else {
        const Code code =
            device::get<Scope::kBlock>(params.world, params.other, params.local, params.block, params.num_bytes);
        if (!note(params, code)) return;
      }
    } else if (params.op == BenchOp::kFetchAdd) {
      if (threadIdx.x != 0) continue;
      if constexpr (kRaw) {
        GpuMemory::add_system(params.raw_word, 1);
      } else {
        if (!note(params, device::fetch_add(params.world, params.other, params.word, 1).code)) return;
      }
    } else {
      if (params.is_first && !send<kRaw>(params, turn)) return;
      if (!receive<kRaw>(params, turn)) return;
      if (!params.is_first && !send<kRaw>(params, turn)) return;
    }
  }
}

template <bool kRaw>
__device__ void window_of_copies(const OneSidedKernelParams& params) {
  for (int call = static_cast<int>(blockIdx.x); call < params.num_calls; call += static_cast<int>(gridDim.x)) {
    const std::uint64_t at = static_cast<std::uint64_t>(call % 2) * params.num_bytes;
    if (params.op == BenchOp::kPut) {
      if constexpr (kRaw) {
        copy_plainly<false>(params.raw_block + at, params.local + at, params.num_bytes);
      } else {
        note(params, device::put_nbi<Scope::kBlock>(params.world, params.other, params.block + at, params.local + at,
                                                    params.num_bytes));
      }
    } else if constexpr (kRaw) {
      copy_plainly<true>(params.local + at, params.raw_block + at, params.num_bytes);
    } else {
      note(params, device::get_nbi<Scope::kBlock>(params.world, params.other, params.local + at, params.block + at,
                                                  params.num_bytes));
    }
  }
}

template <bool kRaw>
__device__ void window_of_words(const OneSidedKernelParams& params) {
  const auto num_threads = static_cast<int>(gridDim.x * blockDim.x);
  for (int call = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); call < params.num_calls;
       call += num_threads) {
    if constexpr (kRaw) {
      if (params.op == BenchOp::kFetchAdd) {
        GpuMemory::add_system(params.raw_word, 1);
      } else {
        GpuMemory::add_release_system(params.raw_word, 1);
      }
    } else if (params.op == BenchOp::kFetchAdd) {
      note(params, device::fetch_add(params.world, params.other, params.word, 1).code);
    } else {
      note(params, device::signal(params.world, params.other, params.word, 1, SignalOp::kAdd));
    }
  }
}

template <bool kRaw>
__global__ void __launch_bounds__(kThreads, 1) window_kernel(const __grid_constant__ OneSidedKernelParams params) {
  if (params.op == BenchOp::kPut || params.op == BenchOp::kGet) {
    window_of_copies<kRaw>(params);
  } else {
    window_of_words<kRaw>(params);
  }
  if constexpr (kRaw) {
    GpuMemory::fence_system();
  } else {
    note(params, device::quiet<Scope::kBlock>(params.world));
  }
}

}  // namespace

Status launch_exchanges(const OneSidedKernelParams& params, Stream stream) {
  const auto kernel = params.raw ? exchange_kernel<true> : exchange_kernel<false>;
  return cuda_status("launching one-sided calls", launch(kernel, {1, kThreads}, params, stream));
}

Status launch_window(const OneSidedKernelParams& params, Stream stream) {
  const bool copies = params.op == BenchOp::kPut || params.op == BenchOp::kGet;
  const int per_block = copies ? 1 : static_cast<int>(kThreads);
  const int num_blocks = std::clamp((params.num_calls + per_block - 1) / per_block, 1, kMaxBlocks);
  const auto kernel = params.raw ? window_kernel<true> : window_kernel<false>;
  return cuda_status("launching one-sided calls",
                     launch(kernel, {static_cast<unsigned>(num_blocks), kThreads}, params, stream));
}

}  // namespace ferry::tools
