#ifndef FERRY_CUDA_COPY_BULK_COPY_CUH
#define FERRY_CUDA_COPY_BULK_COPY_CUH

/// The bulk copy engine (PTX ISA, cp.async.bulk; sm_90 and later): one thread starts a copy of any multiple of 16 bytes
/// between global and shared memory. Loads report to an mbarrier, stores to the issuing thread's bulk groups.

#include <cstdint>

namespace ferry::cuda::device {

/// Alignment that a load's target in shared memory should have. 16 is enough, but loads from a peer to addresses that
/// were off by 64 bytes took a fifth longer (combine on 4 H200).
inline constexpr int kLandingBytes = 128;

using SharedAddress = std::uint32_t;
__device__ inline SharedAddress shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// `num_arrivals` arrivals complete a phase of the barrier. Call `publish_barriers` before another thread uses it.
__device__ inline void init_barrier(std::uint64_t* barrier, int num_arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
}

/// Makes initialised barriers visible to the copy engine.
__device__ inline void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Sets the barrier's current phase to complete when loads of `bytes` in total have landed.
__device__ inline void expect_loads(std::uint64_t* barrier, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

/// Starts to load `bytes` from global to shared memory; the load reports to `barrier`, which expects it.
__device__ inline void start_load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

/// Waits until the phase of parity `parity` is complete. The wait is bounded: the load has been started, so it ends.
__device__ inline void wait_barrier(std::uint64_t* barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        "  .reg .pred complete;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, complete;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
#endif
}

/// Loads 16 bytes that have landed. Takes a shared-memory address because the compiler easily loses track of the memory
/// that a pointer refers to, and loads from generic addresses take longer.
__device__ inline uint4 load_landed(SharedAddress address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

/// As load_landed, 8 bytes.
__device__ inline uint2 load_landed_pair(SharedAddress address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}

/// As load_landed, an f32.
__device__ inline float load_landed_float(SharedAddress address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

/// Starts to store `bytes` from shared to global memory, of this GPU or a peer, as part of the thread's open bulk
/// group.
__device__ inline void start_store(void* global, const void* shared, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
#endif
}

__device__ inline void close_store_group() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/// Waits until at most `kOpen` of the thread's latest groups still read shared memory; all earlier stages are free.
template <int kOpen>
__device__ inline void wait_store_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kOpen) : "memory");
#endif
}

/// Waits until at most `kOpen` of the thread's latest groups are incomplete; the writes of all earlier groups are
/// complete.
template <int kOpen>
__device__ inline void wait_store_groups() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kOpen) : "memory");
#endif
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_BULK_COPY_CUH
