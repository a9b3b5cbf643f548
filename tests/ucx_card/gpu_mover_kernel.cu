/// The kernel that copies for a card. One warp of the first block, the leader, reads commands of large copies from the
/// host's memory and passes them on through the GPU's; in each block 16 warps copy their share, and one tells the host
/// once it is there. The last block, the express block, reads commands of its own: small copies, and words, each behind
/// all copies before it and at its time.

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
constexpr unsigned kTimeWord = 5;           // of a copy
constexpr std::uint64_t kTag = 0xffffffff;  // the part of a number that words have
constexpr unsigned kLoads = 4;              // in flight for each thread
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

/// The next four commands of a ring in a warp, eight lanes each.
struct Look {
  std::uint64_t word;
  unsigned num_here;

  /// One read, since each takes more than a microsecond.
  __device__ Look(const MoverCommands& ring, std::uint64_t number) {
    const unsigned lane = threadIdx.x % kWarp;
    const std::uint64_t mine = number + lane / kWords;
    word = load_acquire_sys(&ring.commands[mine % kMoverCommands].words[lane % kWords]);
    const unsigned missing = ~__ballot_sync(kAllLanes, word >> 32 == (mine & kTag));
    num_here = (missing == 0 ? kWarp : static_cast<unsigned>(__ffs(static_cast<int>(missing))) - 1) / kWords;
  }
};

/// Whether the time of a copy has come, by half the GPU's time. 0: it has none.
__device__ bool is_due(std::uint32_t at) {
  return at == 0 || static_cast<std::int32_t>(static_cast<std::uint32_t>(clock_ns()) - at) >= 0;
}

/// Passes commands on until there have been none for a while, of the express block neither. All its waits end by that.
__device__ void lead(const MoverLaunch& launch) {
  const unsigned lane = threadIdx.x % kWarp;
  MoverState& state = *launch.state;
  std::uint64_t number = launch.first;
  const std::uint64_t born_ns = __shfl_sync(kAllLanes, clock_ns(), 0);
  std::uint64_t last_ns = born_ns;
  bool is_closing = false;
  for (bool is_over = false; !is_over;) {
    Look look(launch.ring->large, number);
    const bool any_here = look.num_here > 0;
    const bool is_early = lane % kWords == kTimeWord && !is_due(static_cast<std::uint32_t>(look.word));
    const unsigned early = __ballot_sync(kAllLanes, is_early);
    if (early != 0)
      look.num_here = min(look.num_here, static_cast<unsigned>(__ffs(static_cast<int>(early)) - 1) / kWords);
    if (lane / kWords < look.num_here) {
      store_release_gpu(&state.passed.commands[(number + lane / kWords) % kMoverCommands].words[lane % kWords],
                        look.word);
    }
    number += look.num_here;
    // The express block may wait for a copy that comes now, so it ends first.
    is_over = is_closing && __shfl_sync(kAllLanes, load_acquire_gpu(&state.closed), 0) == launch.number;
    const std::uint64_t now_ns = __shfl_sync(kAllLanes, clock_ns(), 0);
    const std::uint64_t express_ns = __shfl_sync(kAllLanes, load_acquire_gpu(&state.active_ns), 0);
    if (any_here) last_ns = now_ns;
    const bool is_idle = now_ns > last_ns + kIdleNs && now_ns > express_ns + kIdleNs;
    if (is_closing || (!is_idle && now_ns - born_ns <= kLifeNs)) continue;
    is_closing = true;
    if (lane == 0) store_release_gpu(&state.closing, launch.number);
  }
  if (lane != 0) return;
  // In place of the next command, which the next launch passes: its last word is zero, this one has the launch.
  store_release_gpu(&state.passed.commands[number % kMoverCommands].words[kWords - 1], tagged(number, launch.number));
  store_relaxed_sys(&launch.ring->next, number);
  store_release_sys(&launch.ring->ended, launch.number);
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
    if (lane == 4) command->num_bytes = static_cast<std::uint32_t>(both);
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

/// Where the share of a block begins.
__device__ std::uint64_t share_begin(const Command& command, unsigned block) {
  if (block == 0) return 0;
  if (block == kMoverBlocks) return command.num_bytes;
  const std::uint64_t at = command.to + command.num_bytes / kMoverBlocks * block;
  return at / kLine * kLine - command.to;
}

__device__ void copy(std::uint64_t to, std::uint64_t from, std::uint64_t num_bytes) {
  const std::uint64_t apart = to - from;
  if (apart % sizeof(uint4) == 0) {
    copy_units<uint4>(to, from, num_bytes);
  } else if (apart % sizeof(unsigned long long) == 0) {
    copy_units<unsigned long long>(to, from, num_bytes);
  } else if (apart % sizeof(unsigned) == 0) {
    copy_units<unsigned>(to, from, num_bytes);
  } else {
    copy_units<unsigned char>(to, from, num_bytes);
  }
}

/// The express block: all commands that a look of its first warp has found, in order.
__device__ void run_express(const MoverLaunch& launch) {
  __shared__ std::uint64_t contents[kWarp / 2];  // four of each command
  __shared__ unsigned num_here;
  MoverState& state = *launch.state;
  const unsigned warp = threadIdx.x / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  std::uint64_t number = launch.express_first;
  for (bool is_over = false; !is_over;) {
    if (warp == 0) {
      is_over = __shfl_sync(kAllLanes, load_acquire_gpu(&state.closing), 0) == launch.number;
      const Look look(launch.ring->express, number);
      const std::uint64_t other = __shfl_down_sync(kAllLanes, look.word, 1);
      if (lane % 2 == 0) contents[lane / 2] = other << 32 | static_cast<std::uint32_t>(look.word);
      if (lane == 0) {
        num_here = is_over ? 0 : look.num_here;
        store_relaxed_sys(&launch.ring->gpu_ns, clock_ns());
      }
    }
    is_over = __syncthreads_or(static_cast<int>(is_over)) != 0;
    const unsigned num_commands = num_here;
    bool copied = false;  // since the last fence
    for (unsigned i = 0; i < num_commands; ++i) {
      const std::uint64_t* const command = contents + i * kWords / 2;
      if (command[3] == kMoverCopy) {
        while (!is_due(static_cast<std::uint32_t>(command[2] >> 32))) {
        }
        if (warp < kCopyThreads / kWarp) copy(command[0], command[1], static_cast<std::uint32_t>(command[2]));
        copied = true;
        continue;
      }
      if (copied) __syncthreads();
      copied = false;
      if (warp != 0) continue;
      while (lane < kMoverBlocks && load_acquire_gpu(&state.done[lane]) < command[3]) {
      }
      __syncwarp();
      if (lane != 0) continue;
      __threadfence_system();
      while (clock_ns() < command[2]) {
      }
      store_relaxed_sys(reinterpret_cast<std::uint64_t*>(command[0]), command[1]);
    }
    __syncthreads();
    number += num_commands;
    if (threadIdx.x == 0 && num_commands > 0) {
      __threadfence_system();
      store_relaxed_sys(&launch.ring->express_done, number - 1);
      store_release_gpu(&state.active_ns, clock_ns());
    }
  }
  if (threadIdx.x != 0) return;
  store_release_sys(&launch.ring->express_next, number);
  store_release_gpu(&state.closed, launch.number);
}

__global__ void __launch_bounds__(kMoverThreads) move(const MoverLaunch launch) {
  if (blockIdx.x == kMoverBlocks) {
    run_express(launch);
    return;
  }
  // Two, so that the next command is fetched and copied while the finisher waits for the bytes of this one.
  __shared__ Command commands[2];
  const unsigned warp = threadIdx.x / kWarp;
  if (warp == kLeader) {
    if (blockIdx.x == 0) lead(launch);
    return;
  }
  for (std::uint64_t number = launch.first;; ++number) {
    Command* const command = &commands[number % 2];
    if (warp == 0) fetch(launch.state->passed.commands, number, launch.number, command);
    if (warp != kFinisher) {
      barrier(1, kCopyThreads);
      const std::uint64_t begin = share_begin(*command, blockIdx.x);
      const std::uint64_t end = share_begin(*command, blockIdx.x + 1);
      if (!command->is_end) copy(command->to + begin, command->from + begin, end - begin);
    }
    barrier(2, kCopyThreads + kWarp);
    if (command->is_end) return;
    if (warp == kFinisher && threadIdx.x % kWarp == 0) {
      __threadfence_system();
      store_release_gpu(&launch.state->done[blockIdx.x], number);
      store_relaxed_sys(&launch.ring->is_done[blockIdx.x], number);
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
