#ifndef FERRY_DEVICE_MEMORY_ORDER_CUH
#define FERRY_DEVICE_MEMORY_ORDER_CUH

/// Loads, stores and fences of Ferry's kernels, each one PTX instruction, or a few (PTX ISA, "Memory Consistency
/// Model"; sm_70 and later). System scope reaches other GPUs over NVLink and the host, device scope the threads of one
/// GPU, block scope those of a block.

#include <cstddef>
#include <cstdint>

namespace ferry::device {

struct GpuMemory {
  static __device__ std::uint64_t load_acquire_system(const std::uint64_t* address) {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
  }
  /// For a word that publishes no other data: other loads need not wait for it.
  static __device__ std::uint64_t load_relaxed_system(const std::uint64_t* address) {
    std::uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
  }
  static __device__ std::uint32_t load_acquire_device(const std::uint32_t* address) {
    std::uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
  }
  static __device__ std::uint64_t load_acquire_device(const std::uint64_t* address) {
    std::uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
  }
  static __device__ std::uint32_t load_relaxed_device(const std::uint32_t* address) {
    std::uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
  }
  static __device__ std::uint64_t load_relaxed_device(const std::uint64_t* address) {
    std::uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
  }
  /// For a word in shared memory or in memory of this GPU.
  static __device__ std::uint32_t load_acquire_block(const std::uint32_t* address) {
    std::uint32_t value;
    asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
  }
  /// For a warp that polls and fences once it has found the awaited value: each acquire would empty the first-level
  /// cache.
  static __device__ std::uint32_t load_relaxed_block(const std::uint32_t* address) {
    std::uint32_t value;
    asm volatile("ld.relaxed.cta.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
  }
  /// Two words at a multiple of 16 bytes, each ordered as by its own load, in one trip over the link.
  static __device__ void load_pair_acquire_system(const std::uint64_t* address, std::uint64_t& first,
                                                  std::uint64_t& second) {
    asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(address) : "memory");
  }
  static __device__ void store_relaxed_system(std::uint64_t* address, std::uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
  /// Like load_pair_acquire_system.
  static __device__ void store_pair_relaxed_system(std::uint64_t* address, std::uint64_t first, std::uint64_t second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(first), "l"(second) : "memory");
  }
  static __device__ void store_release_system(std::uint64_t* address, std::uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
  static __device__ void store_release_system(std::uint32_t* address, std::uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
  }
  static __device__ void store_release_device(std::uint32_t* address, std::uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
  }
  static __device__ void store_release_device(std::uint64_t* address, std::uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
  static __device__ void store_relaxed_device(std::uint64_t* address, std::uint64_t value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
  static __device__ void store_release_block(std::uint32_t* address, std::uint32_t value) {
    asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
  }
  /// The following return the previous value. They are PTX because the compiler would sum the lanes' operands first.
  static __device__ std::uint64_t add_device(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
  }
  /// Everything that this thread has seen is visible to a thread that sees the sum.
  static __device__ std::uint32_t add_acq_rel_device(std::uint32_t* address, std::uint32_t value) {
    std::uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
  }
  static __device__ std::uint64_t max_device(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.max.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
  }
  static __device__ std::uint64_t or_acquire_device(std::uint64_t* address, std::uint64_t bits) {
    std::uint64_t before;
    asm volatile("atom.or.acquire.gpu.global.b64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(bits) : "memory");
    return before;
  }
  static __device__ std::uint64_t swap_acquire_device(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.exch.acquire.gpu.global.b64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
  }
  static __device__ std::uint64_t compare_swap_device(std::uint64_t* address, std::uint64_t expected,
                                                      std::uint64_t desired) {
    std::uint64_t before;
    asm volatile("atom.cas.acq_rel.gpu.global.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(address), "l"(expected), "l"(desired)
                 : "memory");
    return before;
  }
  static __device__ std::uint64_t add_system(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.add.acq_rel.sys.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
  }
  static __device__ std::uint64_t compare_swap_system(std::uint64_t* address, std::uint64_t expected,
                                                      std::uint64_t desired) {
    std::uint64_t before;
    asm volatile("atom.cas.acq_rel.sys.global.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(address), "l"(expected), "l"(desired)
                 : "memory");
    return before;
  }
  static __device__ std::uint32_t add_system(std::uint32_t* address, std::uint32_t value) {
    std::uint32_t before;
    asm volatile("atom.add.acq_rel.sys.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
  }
  static __device__ std::uint64_t swap_system(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.exch.acq_rel.sys.global.b64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
  }
  static __device__ std::uint32_t swap_system(std::uint32_t* address, std::uint32_t value) {
    std::uint32_t before;
    asm volatile("atom.exch.acq_rel.sys.global.b32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
  }
  static __device__ std::uint64_t and_system(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.and.acq_rel.sys.global.b64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
  }
  static __device__ std::uint32_t and_system(std::uint32_t* address, std::uint32_t value) {
    std::uint32_t before;
    asm volatile("atom.and.acq_rel.sys.global.b32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
  }
  static __device__ std::uint64_t or_system(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.or.acq_rel.sys.global.b64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
  }
  static __device__ std::uint32_t or_system(std::uint32_t* address, std::uint32_t value) {
    std::uint32_t before;
    asm volatile("atom.or.acq_rel.sys.global.b32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
  }
  static __device__ std::uint64_t xor_system(std::uint64_t* address, std::uint64_t value) {
    std::uint64_t before;
    asm volatile("atom.xor.acq_rel.sys.global.b64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
  }
  static __device__ std::uint32_t xor_system(std::uint32_t* address, std::uint32_t value) {
    std::uint32_t before;
    asm volatile("atom.xor.acq_rel.sys.global.b32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
  }
  static __device__ std::uint32_t compare_swap_system(std::uint32_t* address, std::uint32_t expected,
                                                      std::uint32_t desired) {
    std::uint32_t before;
    asm volatile("atom.cas.acq_rel.sys.global.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(address), "r"(expected), "r"(desired)
                 : "memory");
    return before;
  }
  /// The following four return no value, so that no answer travels over the link.
  static __device__ void add_release_device(std::uint32_t* address, std::uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
  }
  static __device__ void add_release_system(std::uint64_t* address, std::uint64_t value) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
  static __device__ void add_release_system(std::uint32_t* address, std::uint32_t value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
  }
  static __device__ void max_release_device(std::uint64_t* address, std::uint64_t value) {
    asm volatile("red.release.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
  static __device__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
  static __device__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
  /// Also orders stores before it and loads after it: all such fences have one total order.
  static __device__ void fence_total_system() { asm volatile("fence.sc.sys;" ::: "memory"); }
  /// Orders ordinary accesses to global memory and those of the bulk copy engine, in both directions: the engine is
  /// another proxy (PTX ISA, "membar / fence", fence.proxy.async; none before sm_90, which has no such engine).
  static __device__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
  }
  /// Loads 16 bytes that other processors may have changed since this multiprocessor last read them.
  static __device__ uint4 load_fresh(const uint4* address) {
    uint4 value;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
  }
  template <typename Unit>
  static __device__ Unit load_fresh(const Unit* address) {
    return *static_cast<const volatile Unit*>(address);
  }
  /// Copies 16 bytes, 8 or none. `kFresh`: from global memory, like load_fresh; otherwise to global memory. Without
  /// branches, which the threads of a warp would take in turn: about 100 cycles where a single thread copies. The
  /// registers are zeroed for the compiler, which would otherwise keep values of one call for the next.
  template <bool kFresh>
  static __device__ void copy_unit(std::byte* to, const std::byte* from, unsigned num_bytes) {
    if constexpr (kFresh) {
      asm volatile(
          "{\n"
          ".reg .pred wide, narrow;\n.reg .u32 a, b, c, d;\n.reg .u64 e;\n"
          "setp.eq.u32 wide, %2, 16;\nsetp.eq.u32 narrow, %2, 8;\n"
          "mov.u32 a, 0;\nmov.u32 b, 0;\nmov.u32 c, 0;\nmov.u32 d, 0;\nmov.u64 e, 0;\n"
          "@wide ld.relaxed.sys.global.v4.u32 {a, b, c, d}, [%1];\n"
          "@narrow ld.relaxed.sys.global.u64 e, [%1];\n"
          "@wide st.v4.u32 [%0], {a, b, c, d};\n"
          "@narrow st.u64 [%0], e;\n"
          "}" ::"l"(to),
          "l"(from), "r"(num_bytes)
          : "memory");
    } else {
      asm volatile(
          "{\n"
          ".reg .pred wide, narrow;\n.reg .u32 a, b, c, d;\n.reg .u64 e;\n"
          "setp.eq.u32 wide, %2, 16;\nsetp.eq.u32 narrow, %2, 8;\n"
          "mov.u32 a, 0;\nmov.u32 b, 0;\nmov.u32 c, 0;\nmov.u32 d, 0;\nmov.u64 e, 0;\n"
          "@wide ld.v4.u32 {a, b, c, d}, [%1];\n"
          "@narrow ld.u64 e, [%1];\n"
          "@wide st.global.v4.u32 [%0], {a, b, c, d};\n"
          "@narrow st.global.u64 [%0], e;\n"
          "}" ::"l"(to),
          "l"(from), "r"(num_bytes)
          : "memory");
    }
  }
  /// Nanoseconds of a clock that all multiprocessors share (PTX ISA, %globaltimer): coarse, good for deadlines only.
  static __device__ std::uint64_t now_ns() {
    std::uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
    return value;
  }
};

}  // namespace ferry::device

#endif  // FERRY_DEVICE_MEMORY_ORDER_CUH
