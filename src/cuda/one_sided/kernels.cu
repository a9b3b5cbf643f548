#include "cuda/one_sided/kernels.hpp"

#include "cuda/driver/launch.hpp"
#include "ferry/device/one_sided.cuh"

namespace ferry::cuda {
namespace {

using ::ferry::device::Scope;

/// Enough threads that 16 bytes of each fill a link with few blocks.
constexpr unsigned kCopyThreads = 512;
/// A smaller slice costs a block more than it gains.
constexpr std::uint64_t kMinSliceBytes = std::uint64_t{64} << 10;
constexpr std::uint64_t kUnitBytes = 16;

/// A block's part of a copy.
struct Slice {
  std::uint64_t first = 0;
  std::uint64_t num_bytes = 0;
};

__device__ Slice slice_of(const CopyParams& params) {
  const std::uint64_t first = blockIdx.x * params.slice_bytes;
  if (first >= params.num_bytes) return {};
  const std::uint64_t rest = params.num_bytes - first;
  return {first, rest < params.slice_bytes ? rest : params.slice_bytes};
}

__global__ void __launch_bounds__(kCopyThreads) put_kernel(const __grid_constant__ CopyParams params) {
  const Slice slice = slice_of(params);
  std::byte* const dest = params.symmetric + slice.first;
  const std::byte* const source = params.own + slice.first;
  if (params.word == nullptr) {
    ::ferry::device::detail::put<Scope::kBlock>(params.world, params.rank, dest, source, slice.num_bytes, params.later);
  } else {
    ::ferry::device::detail::put_signal<Scope::kBlock>(params.world, params.rank, dest, source, slice.num_bytes,
                                                       params.word, params.value, params.op, params.later);
  }
}

__global__ void __launch_bounds__(kCopyThreads) get_kernel(const __grid_constant__ CopyParams params) {
  const Slice slice = slice_of(params);
  ::ferry::device::detail::get<Scope::kBlock>(params.world, params.rank, params.own + slice.first,
                                              params.symmetric + slice.first, slice.num_bytes, !params.later);
}

/// Stores a fetched value; after an error there is none.
template <typename Word>
__device__ void hand_over(const ::ferry::device::Fetched& fetched, const WordParams& params) {
  if (fetched.code == ::ferry::device::Code::kOk)
    *static_cast<Word*>(params.fetched) = static_cast<Word>(fetched.value);
}

/// A signal or a fetch.
template <typename Word>
__device__ void change_word(const WordParams& params) {
  const ::ferry::device::World& world = params.world;
  auto* const word = static_cast<Word*>(params.word);
  const auto value = static_cast<Word>(params.value);
  switch (params.call) {
    case WordCall::kFetchAdd:
      hand_over<Word>(::ferry::device::fetch_add(world, params.rank, word, value), params);
      break;
    case WordCall::kCompareSwap:
      hand_over<Word>(
          ::ferry::device::compare_swap(world, params.rank, word, static_cast<Word>(params.expected), value), params);
      break;
    case WordCall::kSwap:
      hand_over<Word>(::ferry::device::swap(world, params.rank, word, value), params);
      break;
    case WordCall::kFetchAnd:
      hand_over<Word>(::ferry::device::fetch_and(world, params.rank, word, value), params);
      break;
    case WordCall::kFetchOr:
      hand_over<Word>(::ferry::device::fetch_or(world, params.rank, word, value), params);
      break;
    case WordCall::kFetchXor:
      hand_over<Word>(::ferry::device::fetch_xor(world, params.rank, word, value), params);
      break;
    default:
      ::ferry::device::signal(world, params.rank, word, value, params.op);
      break;
  }
}

__global__ void word_kernel(const __grid_constant__ WordParams params) {
  const ::ferry::device::World& world = params.world;
  switch (params.call) {
    case WordCall::kWaitUntil:
      ::ferry::device::wait_until(world, static_cast<const std::uint64_t*>(params.word), params.comparison,
                                  params.value, params.timeout_ns);
      break;
    case WordCall::kFence:
      if (params.rank < 0) {
        ::ferry::device::fence(world);
      } else {
        ::ferry::device::fence(world, params.rank);
      }
      break;
    case WordCall::kQuiet:
      if (params.rank < 0) {
        ::ferry::device::quiet(world);
      } else {
        ::ferry::device::quiet(world, params.rank);
      }
      break;
    default:
      if (params.is_narrow) {
        change_word<std::uint32_t>(params);
      } else {
        change_word<std::uint64_t>(params);
      }
      break;
  }
}

__global__ void barrier_kernel(const __grid_constant__ BarrierParams params) {
  ::ferry::device::barrier<Scope::kWarp>(params.world, params.team);
}

unsigned blocks_of(const CopyParams& params) {
  if (params.num_bytes <= params.slice_bytes || params.slice_bytes == 0) return 1;
  return static_cast<unsigned>((params.num_bytes + params.slice_bytes - 1) / params.slice_bytes);
}

/// Whether one request to the proxy covers the whole copy, so that more blocks would only send more requests.
bool is_one_request(const CopyParams& params) {
  const ::ferry::device::World& world = params.world;
  const bool is_near = params.rank >= world.first_in_node && params.rank < world.first_in_node + world.ranks_per_node;
  // Compared as numbers, because the address may be anything.
  const std::uint64_t offset =
      reinterpret_cast<std::uintptr_t>(params.own) - reinterpret_cast<std::uintptr_t>(world.heap);
  const bool is_symmetric = offset <= world.heap_bytes && params.num_bytes <= world.heap_bytes - offset;
  return params.later && !is_near && is_symmetric;
}

}  // namespace

unsigned share_copy(CopyParams& params, unsigned max_blocks) {
  if (is_one_request(params)) max_blocks = 1;
  const std::uint64_t least = (params.num_bytes + max_blocks - 1) / max_blocks;
  const std::uint64_t slice = least < kMinSliceBytes ? kMinSliceBytes : least;
  params.slice_bytes = (slice + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  return blocks_of(params);
}

cudaError_t launch_put(const CopyParams& params, cudaStream_t stream) {
  return launch_kernel(put_kernel, {blocks_of(params), kCopyThreads}, params, stream);
}

cudaError_t launch_get(const CopyParams& params, cudaStream_t stream) {
  return launch_kernel(get_kernel, {blocks_of(params), kCopyThreads}, params, stream);
}

cudaError_t launch_word_call(const WordParams& params, cudaStream_t stream) {
  return launch_kernel(word_kernel, {1, 1}, params, stream);
}

cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream) {
  return launch_kernel(barrier_kernel, {1, ::ferry::device::kLanes}, params, stream);
}

cudaError_t load_one_sided_kernels() {
  cudaFuncAttributes attributes{};
  for (const void* kernel :
       {reinterpret_cast<const void*>(put_kernel), reinterpret_cast<const void*>(get_kernel),
        reinterpret_cast<const void*>(word_kernel), reinterpret_cast<const void*>(barrier_kernel)}) {
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
