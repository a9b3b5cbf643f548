#ifndef FERRY_CUDA_ONE_SIDED_KERNELS_HPP
#define FERRY_CUDA_ONE_SIDED_KERNELS_HPP

/// Host calls as kernels: each kernel does the same as a program's kernel with ferry/device/one_sided.cuh. Calls
/// consist of kernels only, so all of them can be captured.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "ferry/device/world.hpp"
#include "ferry/one_sided.hpp"

namespace ferry::cuda {

/// Parameters of put, put_signal and get. `symmetric` is this rank's address, as are all addresses that name memory of
/// other ranks.
struct CopyParams {
  ::ferry::device::World world;
  int rank = 0;
  std::byte* symmetric = nullptr;
  std::byte* own = nullptr;  ///< source of a put, destination of a get
  std::uint64_t num_bytes = 0;
  std::uint64_t slice_bytes = 0;  ///< bytes of a block's slice
  bool later = false;             ///< put_nbi, get_nbi
  std::uint64_t* word = nullptr;  ///< for put_signal, which takes one block; else null
  std::uint64_t value = 0;
  SignalOp op = SignalOp::kSet;
};

enum class WordCall : std::int32_t {
  kSignal,
  kFetchAdd,
  kCompareSwap,
  kSwap,
  kFetchAnd,
  kFetchOr,
  kFetchXor,
  kWaitUntil,
  kFence,
  kQuiet,
};

/// Parameters of calls that one thread makes.
struct WordParams {
  ::ferry::device::World world;
  WordCall call = WordCall::kQuiet;
  int rank = 0;            ///< kFence, kQuiet: -1 for all
  bool is_narrow = false;  ///< the word of a signal or a fetch, and `fetched`, have 4 bytes; otherwise 8
  void* word = nullptr;
  std::uint64_t value = 0;
  std::uint64_t expected = 0;
  SignalOp op = SignalOp::kSet;
  Comparison comparison = Comparison::kEqual;
  std::uint64_t timeout_ns = 0;
  void* fetched = nullptr;
};

struct BarrierParams {
  ::ferry::device::World world;
  ::ferry::device::TeamView team;
};

cudaError_t launch_put(const CopyParams& params, cudaStream_t stream);
cudaError_t launch_get(const CopyParams& params, cudaStream_t stream);
cudaError_t launch_word_call(const WordParams& params, cudaStream_t stream);
cudaError_t launch_barrier(const BarrierParams& params, cudaStream_t stream);

/// Number of blocks that share a copy, at most `max_blocks`; sets slice_bytes.
unsigned share_copy(CopyParams& params, unsigned max_blocks);

/// Loads the kernels on the current GPU. A later load would wait for kernels that wait for this rank.
cudaError_t load_one_sided_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_KERNELS_HPP
