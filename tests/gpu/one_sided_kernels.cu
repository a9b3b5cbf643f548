#include "gpu/one_sided_kernels.hpp"

#include "cuda/driver/launch.hpp"
#include "ferry/device/one_sided.cuh"

namespace ferry::test {
namespace {

using device::Code;
using device::Scope;
using device::World;

constexpr unsigned kBlockThreads = 256;

__device__ std::byte pattern(int rank, int round, std::uint64_t i) {
  return static_cast<std::byte>((static_cast<unsigned>(rank) * 31U + static_cast<unsigned>(round) * 7U + i) % 251U);
}

unsigned threads_of(CallScope scope) {
  return scope == CallScope::kThread ? 1 : scope == CallScope::kWarp ? device::kLanes : kBlockThreads;
}

template <Scope kScope>
__device__ void hand_on(const HandOnParams& params) {
  const World& world = params.world;
  const int next = (world.rank + 1) % world.num_ranks;
  const int before = (world.rank + world.num_ranks - 1) % world.num_ranks;
  const unsigned member = device::Members<kScope>::idx();
  const unsigned num_members = device::Members<kScope>::count();
  int num_errors = 0;
  for (int round = 0; round < params.num_rounds; ++round) {
    const std::uint64_t count = static_cast<std::uint64_t>(round) + 1;
    std::byte* const row = params.row + static_cast<std::uint64_t>(round % 2) * params.num_bytes;
    std::byte* const mine = params.mine + static_cast<std::uint64_t>(round % 2) * params.num_bytes;
    // Waits until the row to be overwritten has been used, and its source has been sent.
    if (round >= 2) {
      num_errors +=
          device::wait_until<kScope>(world, params.used, Comparison::kGreaterEqual, count - 2) != Code::kOk ? 1 : 0;
    }
    for (std::uint64_t i = member; i < params.num_bytes; i += num_members) mine[i] = pattern(world.rank, round, i);
    device::Members<kScope>::meet();
    const Code sent =
        params.nbi
            ? device::put_signal_nbi<kScope>(world, next, row, mine, params.num_bytes, params.came, 1, SignalOp::kAdd)
            : device::put_signal<kScope>(world, next, row, mine, params.num_bytes, params.came, 1, SignalOp::kAdd);
    num_errors += sent != Code::kOk ? 1 : 0;
    const Code came = device::wait_until<kScope>(world, params.came, Comparison::kGreaterEqual, count);
    num_errors += came != Code::kOk ? 1 : 0;
    if (came != Code::kOk) break;
    for (std::uint64_t i = member; i < params.num_bytes; i += num_members) {
      num_errors += static_cast<volatile std::byte*>(row)[i] != pattern(before, round, i) ? 1 : 0;
    }
    device::Members<kScope>::meet();
    const Code told = device::signal<kScope>(world, before, params.used, 1, SignalOp::kAdd);
    num_errors += told != Code::kOk ? 1 : 0;
  }
  if (num_errors != 0) atomicAdd(params.num_errors, num_errors);
}

__global__ void hand_on_kernel(const __grid_constant__ HandOnParams params) {
  switch (params.scope) {
    case CallScope::kThread:
      hand_on<Scope::kThread>(params);
      break;
    case CallScope::kWarp:
      hand_on<Scope::kWarp>(params);
      break;
    case CallScope::kBlock:
      hand_on<Scope::kBlock>(params);
      break;
  }
}

template <Scope kScope>
__device__ bool any_member(bool value) {
  if constexpr (kScope == Scope::kBlock) return __syncthreads_or(value ? 1 : 0) != 0;
  if constexpr (kScope == Scope::kWarp) return __any_sync(device::kEveryLane, value ? 1 : 0) != 0;
  return value;
}

template <Scope kScope>
__device__ void buffer(const BufferParams& params) {
  const World& world = params.world;
  const int home = world.num_ranks - 1;
  int num_errors = 0;
  for (int round = 0; round < params.num_rounds; ++round) {
    num_errors += device::barrier<kScope>(world, params.team) != Code::kOk ? 1 : 0;
    if (world.rank >= 2) continue;
    std::uint64_t* const mine = params.cells + 2 * round + world.rank;
    std::uint64_t* const theirs = params.cells + 2 * round + 1 - world.rank;
    if (device::is_leader<kScope>()) num_errors += device::put_value(world, home, mine, 1) != Code::kOk ? 1 : 0;
    num_errors += device::quiet<kScope>(world) != Code::kOk ? 1 : 0;
    num_errors += device::get<kScope>(world, home, params.got, theirs, sizeof(*theirs)) != Code::kOk ? 1 : 0;
    if (device::is_leader<kScope>()) {
      const std::uint64_t seen = *const_cast<volatile std::uint64_t*>(params.got) + 1;
      std::uint64_t* const to = params.seen + 2 * round + world.rank;
      num_errors += device::put_value(world, 0, to, seen) != Code::kOk ? 1 : 0;
    }
  }
  const unsigned num_members = device::Members<kScope>::count();
  const device::Fetched reserved = device::fetch_add<kScope>(world, 0, params.room, num_members);
  num_errors += reserved.code != Code::kOk || reserved.value % num_members != 0 ? 1 : 0;
  for (int rank = 0; rank < world.num_ranks; ++rank) {  // all members got the same value
    const bool is_this = reserved.value == std::uint64_t{num_members} * static_cast<unsigned>(rank);
    num_errors += any_member<kScope>(is_this) & any_member<kScope>(!is_this) ? 1 : 0;
  }
  num_errors += device::barrier<kScope>(world, params.team) != Code::kOk ? 1 : 0;
  const device::Got<std::uint64_t> room = device::get_value(world, 0, params.room);
  const std::uint64_t expected = std::uint64_t{num_members} * static_cast<unsigned>(world.num_ranks);
  num_errors += room.code != Code::kOk || room.value != expected || reserved.value >= expected ? 1 : 0;
  if (num_errors != 0) atomicAdd(params.num_errors, num_errors);
}

__global__ void buffer_kernel(const __grid_constant__ BufferParams params) {
  switch (params.scope) {
    case CallScope::kThread:
      buffer<Scope::kThread>(params);
      break;
    case CallScope::kWarp:
      buffer<Scope::kWarp>(params);
      break;
    case CallScope::kBlock:
      buffer<Scope::kBlock>(params);
      break;
  }
}

__global__ void count_kernel(const __grid_constant__ CountParams params) {
  const World& world = params.world;
  int num_errors = 0;
  for (int round = 0; round < params.num_rounds; ++round) {
    num_errors += device::fetch_add(world, 0, params.word, 1).code != Code::kOk ? 1 : 0;
    num_errors += device::signal(world, world.num_ranks - 1, params.signal, 1, SignalOp::kAdd) != Code::kOk ? 1 : 0;
  }
  const device::Fetched swapped = device::compare_swap(world, 0, params.lock, 0, 7);
  num_errors += swapped.code != Code::kOk || (swapped.value != 0 && swapped.value != 7) ? 1 : 0;
  num_errors += device::quiet(world) != Code::kOk ? 1 : 0;
  if (num_errors != 0) atomicAdd(params.num_errors, num_errors);
}

/// Words: a count, bits that are set, sums of what was swapped in, bits that are cleared, a word that is swapped, sums
/// of what came back, toggled bits, and one that is the block's.
template <typename Word>
__device__ int change(const World& world, Word* words, int num_rounds) {
  const auto mine = static_cast<Word>(Word{1} << threadIdx.x);
  const auto note = [&world](int& num_errors, const device::Fetched& fetched) {
    num_errors += fetched.code != Code::kOk ? 1 : 0;
    return static_cast<Word>(fetched.value);
  };
  int num_errors = 0;
  for (int round = 0; round < num_rounds; ++round) {
    const auto value = static_cast<Word>((round * world.num_ranks + world.rank) * static_cast<int>(kChangeThreads) +
                                         static_cast<int>(threadIdx.x) + 1);
    note(num_errors, device::fetch_add(world, 0, words, 1));
    note(num_errors, device::fetch_or(world, 0, words + 1, mine));
    note(num_errors, device::fetch_and(world, 0, words + 3, static_cast<Word>(~mine)));
    const Word held = note(num_errors, device::swap(world, 0, words + 4, value));
    note(num_errors, device::fetch_add(world, 0, words + 2, value));
    num_errors += device::signal(world, 0, words + 5, held, SignalOp::kAdd) != Code::kOk ? 1 : 0;
    if (world.rank == 0) {
      const Word before = note(num_errors, device::fetch_xor(world, 0, words + 6, mine));
      num_errors += (before & mine) != (round % 2 == 0 ? 0 : mine) ? 1 : 0;
    }
  }
  const int next = (world.rank + 1) % world.num_ranks;
  constexpr Word kFirst = static_cast<Word>(0xF0F1'F2F3'F4F5'F6F7);
  Word* const own = words + 7;
  num_errors += note(num_errors, device::swap<Scope::kBlock>(world, next, own, kFirst)) != 0 ? 1 : 0;
  num_errors += note(num_errors, device::compare_swap<Scope::kBlock>(world, next, own, 1, 2)) != kFirst ? 1 : 0;
  num_errors +=
      note(num_errors, device::fetch_add<Scope::kWarp>(world, next, own, static_cast<Word>(~kFirst))) != kFirst;
  num_errors +=
      note(num_errors, device::fetch_and<Scope::kWarp>(world, next, own, kFirst)) != static_cast<Word>(~Word{0});
  num_errors += note(num_errors, device::fetch_xor<Scope::kBlock>(world, next, own, 0xFF)) != kFirst ? 1 : 0;
  num_errors += device::signal<Scope::kBlock>(world, next, own, 0, SignalOp::kSet) != Code::kOk ? 1 : 0;
  num_errors += device::quiet<Scope::kBlock>(world, next) != Code::kOk ? 1 : 0;
  num_errors += note(num_errors, device::fetch_or<Scope::kWarp>(world, next, own, 9)) != 0 ? 1 : 0;
  num_errors += device::quiet<Scope::kBlock>(world, 0) != Code::kOk ? 1 : 0;
  return num_errors;
}

__global__ void change_kernel(const __grid_constant__ ChangeParams params) {
  int num_errors = change(params.world, params.wide, params.num_rounds);
  num_errors += change(params.world, params.narrow, params.num_rounds);
  if (num_errors != 0) atomicAdd(params.num_errors, num_errors);
}

__global__ void gather_kernel(const __grid_constant__ GatherParams params) {
  const World& world = params.world;
  const int next = (world.rank + 1) % world.num_ranks;
  const auto num_ranks = static_cast<std::uint64_t>(world.num_ranks);
  const std::uint64_t value = *static_cast<const volatile std::uint64_t*>(params.value);
  int num_errors = 0;
  for (int round = 0; round < params.num_rounds; ++round) {
    const std::uint64_t base = value + static_cast<std::uint64_t>(round);
    for (std::uint64_t i = threadIdx.x; i < params.num_words; i += blockDim.x) {
      params.row[i] = (base * num_ranks + static_cast<std::uint64_t>(world.rank)) * params.num_words + i;
    }
    num_errors += device::barrier<Scope::kBlock>(world, params.team) != Code::kOk ? 1 : 0;
    num_errors += device::get<Scope::kBlock>(world, next, params.into, params.row,
                                             params.num_words * sizeof(std::uint64_t)) != Code::kOk
                      ? 1
                      : 0;
    for (std::uint64_t i = threadIdx.x; i < params.num_words; i += blockDim.x) {
      const std::uint64_t expected = (base * num_ranks + static_cast<std::uint64_t>(next)) * params.num_words + i;
      num_errors += params.into[i] != expected ? 1 : 0;
    }
    num_errors += device::barrier<Scope::kBlock>(world, params.team) != Code::kOk ? 1 : 0;
  }
  if (num_errors != 0) atomicAdd(params.num_errors, num_errors);
}

struct BadPutParams {
  World world;
  int* num_errors;
};

__global__ void bad_put_kernel(const __grid_constant__ BadPutParams params) {
  const World& world = params.world;
  const std::uint64_t value = 1;
  const Code code = device::put(world, 0, world.heap + world.heap_bytes - 4, &value, sizeof(value));
  if (code != Code::kInvalidArgument) atomicAdd(params.num_errors, 1);
}

/// Errors of launches show up where the kernels' results are read.
template <typename Params>
void launch(void (*kernel)(Params), const cuda::LaunchShape& shape, const Params& params, Stream stream) {
  static_cast<void>(cuda::launch_kernel(kernel, shape, params, static_cast<cudaStream_t>(stream.handle)));
}

}  // namespace

void launch_hand_on(const HandOnParams& params, Stream stream) {
  launch(hand_on_kernel, {1, threads_of(params.scope)}, params, stream);
}

void launch_buffer(const BufferParams& params, Stream stream) {
  launch(buffer_kernel, {1, threads_of(params.scope)}, params, stream);
}

void launch_count(const CountParams& params, Stream stream) {
  launch(count_kernel, {params.num_blocks, params.num_threads}, params, stream);
}

void launch_change(const ChangeParams& params, Stream stream) {
  launch(change_kernel, {1, kChangeThreads}, params, stream);
}

void launch_gather(const GatherParams& params, Stream stream) {
  launch(gather_kernel, {1, kBlockThreads}, params, stream);
}

void launch_bad_put(const device::World& world, int* num_errors, Stream stream) {
  launch(bad_put_kernel, {1, 1}, BadPutParams{world, num_errors}, stream);
}

}  // namespace ferry::test
