/// The headers for device code compile as CUDA, at every scope; tests/emulator runs the same code as C++.

#include "ferry/device/one_sided.cuh"

namespace {

using ferry::Comparison;
using ferry::SignalOp;
using ferry::device::Scope;

template <Scope kScope>
__device__ int use_all(const ferry::device::World& world, const ferry::device::TeamView& team, std::uint64_t* word) {
  using namespace ferry::device;
  int num_errors = 0;
  const auto count = [&num_errors](Code code) { num_errors += code != Code::kOk ? 1 : 0; };
  count(put<kScope>(world, 1, word, word + 64, 256));
  count(put_nbi<kScope>(world, 1, word, word + 64, 256));
  count(get<kScope>(world, 1, word, word + 64, 256));
  count(get_nbi<kScope>(world, 1, word, word + 64, 256));
  count(put_signal<kScope>(world, 1, word, word + 64, 256, word + 128, 1, SignalOp::kSet));
  count(put_signal_nbi<kScope>(world, 1, word, word + 64, 256, word + 128, 1, SignalOp::kAdd));
  count(signal<kScope>(world, 1, word, 1, SignalOp::kAdd));
  count(wait_until<kScope>(world, word, Comparison::kGreaterEqual, 1));
  count(fence<kScope>(world, 1));
  count(fence<kScope>(world));
  auto* const narrow = reinterpret_cast<std::uint32_t*>(word);
  count(signal<kScope>(world, 1, narrow, 1, SignalOp::kSet));
  count(fetch_add<kScope>(world, 1, narrow, 1).code);
  count(compare_swap<kScope>(world, 1, narrow, 1, 2).code);
  count(swap<kScope>(world, 1, narrow, 1).code);
  count(swap<kScope>(world, 1, word, 1).code);
  count(fetch_and<kScope>(world, 1, narrow, 1).code);
  count(fetch_and<kScope>(world, 1, word, 1).code);
  count(fetch_or<kScope>(world, 1, narrow, 1).code);
  count(fetch_or<kScope>(world, 1, word, 1).code);
  count(fetch_xor<kScope>(world, 1, narrow, 1).code);
  count(fetch_xor<kScope>(world, 1, word, 1).code);
  count(quiet<kScope>(world, 1));
  count(quiet<kScope>(world));
  count(barrier<kScope>(world, team));
  return num_errors;
}

}  // namespace

extern "C" __global__ void one_sided_calls(const __grid_constant__ ferry::device::World world,
                                           const __grid_constant__ ferry::device::TeamView team, std::uint64_t* word,
                                           int* num_errors) {
  using namespace ferry::device;
  num_errors[0] = use_all<Scope::kThread>(world, team, word);
  num_errors[1] = use_all<Scope::kWarp>(world, team, word);
  num_errors[2] = use_all<Scope::kBlock>(world, team, word);
  const Fetched added = fetch_add(world, 1, word, 1);
  const Fetched of_warp = fetch_add<Scope::kWarp>(world, 1, word, 1);
  const Got<std::uint64_t> got = get_value(world, 1, word);
  if (put_value(world, 1, reinterpret_cast<float*>(word), 1.5F) != Code::kOk) num_errors[4] = 1;
  if (got.value == of_warp.value) num_errors[5] = static_cast<int>(got.code);
  const Fetched swapped = compare_swap(world, 1, word, added.value, 1);
  if (test(word, Comparison::kLess, swapped.value)) num_errors[3] = static_cast<int>(swapped.code);
  if (std::uint64_t* const there = peer_pointer(world, 1, word); there != nullptr) *there = 1;
}
