/// The kernel that copies for a card. One warp of the first block, the leader, reads commands from the host's memory
/// and passes them on through the GPU's; in each block 16 warps copy their share, and one tells the host once it is
/// there.

#include <cuda_runtime.h>

#include "ucx_card/gpu_mover_ring.hpp"

namespace ferry::ucx_card {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;
constexpr unsigned kCopyThreads = 16 * kWarp;
constexpr unsigned kFinisher = 16;  // warps
constexpr unsigned kLeader = 17;
constexpr unsigned kWords = 8;
constexpr std::uint64_t kTag = 0xffffffff;  // the part of a number that words have
constexpr unsigned kLoads = 4;              // in flight for each thread
constexpr std::uint64_t kSmall = 16384;     // bytes that one block copies alone
constexpr std::uint64_t kLine = 128;        // shares of blocks end at lines
constexpr std::uint64_t kIdleNs = 1'000'000;
constexpr std::uint64_t kLifeNs = 50'000'000;  // so that what waits for it does not wait for all traffic to end
static_assert(kMoverThreads == (kLeader + 1) * kWarp);

struct Command {
  std::uint64_t to;
  std::uint64_t from;
  std::uint64_t num_bytes;
  bool is_end;
};

__device__ std::uint64_t load_acquire_sys(const std::uint64_t* word) {
  std::uint64_t value = 0;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ std::uint64_t load_acquire_gpu(const std::uint64_t* word) {
  std::uint64_t value = 0;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ void store_release_gpu(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

__device__ void store_relaxed_sys(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

__device__ void store_release_sys(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

__device__ std::uint64_t clock_ns() {
  std::uint64_t value = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

/// For whole warps.
__device__ void barrier(unsigned id, unsigned num_threads) {
  __syncwarp();
  asm volatile("barrier.sync %0, %1;" : : "r"(id), "r"(num_threads) : "memory");
}

__device__ std::uint64_t tagged(std::uint64_t number, std::uint32_t content) { return number << 32 | content; }

/// Passes commands on until there have been none for a while. All its waits end by that.
__device__ void lead(MoverRing* ring, MoverCommand* passed, std::uint64_t number, std::uint32_t launch) {
  const unsigned lane = threadIdx.x % kWarp;
  const std::uint64_t born_ns = __shfl_sync(kAllLanes, clock_ns(), 0);
  std::uint64_t last_ns = born_ns;
  for (bool is_over = false; !is_over;) {
    // One read of the next four commands, since each takes more than a microsecond.
    const std::uint64_t mine = number + lane / kWords;
    const std::uint64_t word = load_acquire_sys(&ring->commands[mine % kMoverCommands].words[lane % kWords]);
    const unsigned missing = ~__ballot_sync(kAllLanes, word >> 32 == (mine & kTag));
    const unsigned num_here =
        (missing == 0 ? kWarp : static_cast<unsigned>(__ffs(static_cast<int>(missing))) - 1) / kWords;
    if (lane / kWords < num_here) store_release_gpu(&passed[mine % kMoverCommands].words[lane % kWords], word);
    const std::uint64_t now_ns = __shfl_sync(kAllLanes, clock_ns(), 0);
    if (num_here > 0) last_ns = now_ns;
    number += num_here;
    is_over = now_ns - last_ns > kIdleNs || now_ns - born_ns > kLifeNs;
  }
  if (lane != 0) return;
  // In place of the next command, which the next launch passes: its last word is zero, this one has the launch.
  store_release_gpu(&passed[number % kMoverCommands].words[kWords - 1], tagged(number, launch));
  store_relaxed_sys(&ring->next, number);
  store_release_sys(&ring->ended, launch);
}

/// Waits for a command, or for the leader's end. By one warp.
__device__ void fetch(const MoverCommand* passed, std::uint64_t number, std::uint32_t launch, Command* command) {
  const unsigned lane = threadIdx.x % kWarp;
  for (;;) {
    const std::uint64_t word =
        lane < kWords ? load_acquire_gpu(&passed[number % kMoverCommands].words[lane]) : tagged(number, 0);
    const bool is_here = __all_sync(kAllLanes, word >> 32 == (number & kTag));
    const std::uint64_t last = __shfl_sync(kAllLanes, word, kWords - 1);
    const bool is_end = last == tagged(number, launch);
    if (!is_end && (!is_here || static_cast<std::uint32_t>(last) != 0)) continue;
    const std::uint64_t other = __shfl_down_sync(kAllLanes, word, 1);
    const std::uint64_t both = other << 32 | static_cast<std::uint32_t>(word);
    if (lane == 0) {
      command->to = both;
      command->is_end = is_end;
    }
    if (lane == 2) command->from = both;
    if (lane == 4) command->num_bytes = both;
    return;
  }
}

/// A few bytes, whose aligned words stay whole.
__device__ void copy_words(std::uint64_t to, std::uint64_t from, std::uint64_t num_bytes) {
  const std::uint64_t end = to + num_bytes;
  while (to < end) {
    std::uint64_t step = 1;
    if ((to | from) % 8 == 0 && end - to >= 8) {
      step = 8;
      *reinterpret_cast<unsigned long long*>(to) = __ldcg(reinterpret_cast<const unsigned long long*>(from));
    } else if ((to | from) % 4 == 0 && end - to >= 4) {
      step = 4;
      *reinterpret_cast<unsigned*>(to) = __ldcg(reinterpret_cast<const unsigned*>(from));
    } else {
      *reinterpret_cast<unsigned char*>(to) = __ldcg(reinterpret_cast<const unsigned char*>(from));
    }
    to += step;
    from += step;
  }
}

/// Reads pass the L1 cache, which may have what was there for earlier commands.
template <typename Unit>
__device__ void copy_units(std::uint64_t to, std::uint64_t from, std::uint64_t num_bytes) {
  const std::uint64_t behind = to % sizeof(Unit);
  const std::uint64_t head = behind == 0 ? 0 : min(num_bytes, sizeof(Unit) - behind);
  const std::uint64_t num_units = (num_bytes - head) / sizeof(Unit);
  const std::uint64_t tail_at = head + num_units * sizeof(Unit);
  auto* const into = reinterpret_cast<Unit*>(to + head);
  const auto* const source = reinterpret_cast<const Unit*>(from + head);
  for (std::uint64_t first = threadIdx.x; first < num_units; first += kLoads * kCopyThreads) {
    Unit units[kLoads];
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
      if (first + i * kCopyThreads < num_units) units[i] = __ldcg(source + first + i * kCopyThreads);
    }
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
      if (first + i * kCopyThreads < num_units) into[first + i * kCopyThreads] = units[i];
    }
  }
  if (threadIdx.x == kCopyThreads - 1) copy_words(to, from, head);
  if (threadIdx.x == kCopyThreads - 1 - kWarp) copy_words(to + tail_at, from + tail_at, num_bytes - tail_at);
}

__device__ bool takes_part(const Command& command, std::uint64_t number) {
  return command.num_bytes > kSmall || number % kMoverBlocks == blockIdx.x;
}

/// Where the share of a block begins.
__device__ std::uint64_t share_begin(const Command& command, unsigned block) {
  if (block == 0) return 0;
  if (block == kMoverBlocks) return command.num_bytes;
  const std::uint64_t at = command.to + command.num_bytes / kMoverBlocks * block;
  return at / kLine * kLine - command.to;
}

__device__ void copy(const Command& command) {
  const bool is_alone = command.num_bytes <= kSmall;
  const std::uint64_t begin = is_alone ? 0 : share_begin(command, blockIdx.x);
  const std::uint64_t end = is_alone ? command.num_bytes : share_begin(command, blockIdx.x + 1);
  const std::uint64_t to = command.to + begin;
  const std::uint64_t from = command.from + begin;
  const std::uint64_t apart = to - from;
  if (apart % sizeof(uint4) == 0) {
    copy_units<uint4>(to, from, end - begin);
  } else if (apart % sizeof(unsigned long long) == 0) {
    copy_units<unsigned long long>(to, from, end - begin);
  } else if (apart % sizeof(unsigned) == 0) {
    copy_units<unsigned>(to, from, end - begin);
  } else {
    copy_units<unsigned char>(to, from, end - begin);
  }
}

__global__ void __launch_bounds__(kMoverThreads)
    move(MoverRing* ring, MoverCommand* passed, std::uint64_t first, std::uint32_t launch) {
  // Two, so that the next command is fetched and copied while the finisher waits for the bytes of this one.
  __shared__ Command commands[2];
  const unsigned warp = threadIdx.x / kWarp;
  if (warp == kLeader) {
    if (blockIdx.x == 0) lead(ring, passed, first, launch);
    return;
  }
  for (std::uint64_t number = first;; ++number) {
    Command* const command = &commands[number % 2];
    if (warp == 0) fetch(passed, number, launch, command);
    if (warp != kFinisher) {
      barrier(1, kCopyThreads);
      if (!command->is_end && takes_part(*command, number)) copy(*command);
    }
    barrier(2, kCopyThreads + kWarp);
    if (command->is_end) return;
    if (warp == kFinisher && threadIdx.x % kWarp == 0) {
      if (takes_part(*command, number)) __threadfence_system();
      store_relaxed_sys(&ring->is_done[blockIdx.x], number);
    }
  }
}

}  // namespace

bool load_mover(CUfunction* kernel) {
  cudaFuncAttributes attributes{};
  cudaFunction_t found = nullptr;
  const auto* const symbol = reinterpret_cast<const void*>(&move);
  if (cudaFuncGetAttributes(&attributes, symbol) != cudaSuccess || cudaGetFuncBySymbol(&found, symbol) != cudaSuccess) {
    return false;
  }
  *kernel = found;
  return true;
}

}  // namespace ferry::ucx_card
