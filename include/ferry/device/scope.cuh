#ifndef FERRY_DEVICE_SCOPE_CUH
#define FERRY_DEVICE_SCOPE_CUH

/// Threads that make a call together. All of them call with equal arguments, and all get the same result.

#include "ferry/device/world.hpp"

namespace ferry::device {

enum class Scope { kThread, kWarp, kBlock };

inline constexpr unsigned kLanes = 32;
inline constexpr unsigned kEveryLane = 0xFFFFFFFFU;

__device__ inline unsigned thread_of_block() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

template <Scope kScope>
struct Members;

template <>
struct Members<Scope::kThread> {
  static __device__ unsigned idx() { return 0; }
  static __device__ unsigned count() { return 1; }
  /// Orders everything that each member did before against everything that all do after.
  static __device__ void meet() {}
  /// Worst code of all members. Synchronises them, like meet().
  static __device__ Code agree(Code code) { return code; }
};

/// All 32 lanes of a warp.
template <>
struct Members<Scope::kWarp> {
  static __device__ unsigned idx() { return thread_of_block() % kLanes; }
  static __device__ unsigned count() { return kLanes; }
  static __device__ void meet() { __syncwarp(); }
  static __device__ Code agree(Code code) {
    __syncwarp();
    return static_cast<Code>(__reduce_max_sync(kEveryLane, static_cast<unsigned>(code)));
  }
};

/// All threads of a block.
template <>
struct Members<Scope::kBlock> {
  static __device__ unsigned idx() { return thread_of_block(); }
  static __device__ unsigned count() { return blockDim.x * blockDim.y * blockDim.z; }
  static __device__ void meet() { __syncthreads(); }
  static __device__ Code agree(Code code) {
    if (__syncthreads_or(code != Code::kOk ? 1 : 0) == 0) return Code::kOk;
    if (__syncthreads_or(code == Code::kPeerLost ? 1 : 0) != 0) return Code::kPeerLost;
    if (__syncthreads_or(code == Code::kTimeout ? 1 : 0) != 0) return Code::kTimeout;
    return Code::kInvalidArgument;
  }
};

template <Scope kScope>
__device__ inline bool is_leader() {
  return Members<kScope>::idx() == 0;
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_SCOPE_CUH
