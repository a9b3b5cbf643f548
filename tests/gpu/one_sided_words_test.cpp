/// Atomics of each kind on GPUs, on words of 4 and 8 bytes, and quiet of one rank.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <vector>

#include "ferry/one_sided.hpp"
#include "gpu/one_sided_case.hpp"
#include "gpu/one_sided_kernels.hpp"

namespace ferry::test {
namespace {

/// Checks the words that change_kernel has left on this rank.
template <typename Word>
void check_changed(RankContext& context, const OneSided& shm, const Word* words, int num_rounds) {
  std::vector<Word> seen(8);
  copy_from_device(seen.data(), words, seen.size() * sizeof(Word));
  const auto name = fmt::format("words of {} bytes: ", sizeof(Word));
  constexpr auto kBits = static_cast<Word>((std::uint64_t{1} << kChangeThreads) - 1);
  context.expect(seen[7] == 9, name + "that of the previous rank's block");
  if (shm.rank() != 0) return;
  const auto num_changes = static_cast<Word>(shm.num_ranks() * static_cast<int>(kChangeThreads) * num_rounds);
  context.expect(seen[0] == num_changes, name + "the count");
  context.expect(seen[1] == kBits, name + "bits that were set");
  context.expect(seen[3] == static_cast<Word>(~kBits), name + "bits that were cleared");
  context.expect(seen[2] == static_cast<Word>(seen[4] + seen[5]), name + "each swapped value came back once");
  context.expect(seen[6] == kBits, name + "bits that were toggled");
}

class GpuOneSidedWords : public OneSidedOnGpus {};

TEST_P(GpuOneSidedWords, AtomicsOfEachKindLoseNoChange) {
  run([](RankContext& context, OneSided& shm) {
    const OwnedStream owned;
    const Stream stream = owned.get();
    warm_up(context, shm, stream);
    auto world = shm.device_world();
    auto wide = shm.allocate<std::uint64_t>(8);
    auto narrow = shm.allocate<std::uint32_t>(8);
    if (!context.expect_ok(world.status(), "device_world") || !context.expect_ok(wide.status(), "allocate") ||
        !context.expect_ok(narrow.status(), "allocate")) {
      return;
    }
    constexpr int kNumRounds = 5;
    // The host's calls: bits before the kernel, and values after it.
    const int me = shm.rank();
    const OnDevice<std::uint32_t> fetched(std::vector<std::uint32_t>(2, 77));
    auto* const landing = static_cast<std::uint32_t*>(fetched.data());
    context.expect_ok(shm.signal(me, wide->data() + 3, ~std::uint64_t{0}, SignalOp::kSet, stream), "signal");
    context.expect_ok(shm.fetch_or(me, narrow->data() + 3, ~std::uint32_t{0}, landing, stream), "fetch_or");
    context.expect_ok(shm.quiet(me, stream), "quiet of a rank");
    context.expect_ok(shm.barrier(stream), "barrier");
    const ErrorCount num_errors;
    launch_change({.world = *world,
                   .wide = wide->data(),
                   .narrow = narrow->data(),
                   .num_rounds = kNumRounds,
                   .num_errors = num_errors.data()},
                  stream);
    context.expect_ok(shm.barrier(stream), "barrier");
    context.expect_ok(finish(shm, stream), "changing words");
    context.expect(num_errors.read() == 0, "no call failed, and each returned what was there");
    check_changed(context, shm, wide->data(), kNumRounds);
    check_changed(context, shm, narrow->data(), kNumRounds);
    std::vector<std::uint32_t> got(2);
    fetched.read(got);
    context.expect(got[0] == 0 && got[1] == 77, "a result on the stream, of 4 bytes");
    meet(context);
    const int next = (me + 1) % shm.num_ranks();
    const Result<std::uint32_t> swapped = shm.swap(next, narrow->data() + 7, 0x8000'0001);
    context.expect(context.expect_ok(swapped.status(), "swap") && *swapped == 9, "swap on the host");
    const Result<std::uint32_t> both = shm.fetch_and(next, narrow->data() + 7, 0xF000'0000);
    context.expect(context.expect_ok(both.status(), "fetch_and") && *both == 0x8000'0001, "fetch_and on the host");
    const Result<std::uint64_t> toggled = shm.fetch_xor(next, wide->data() + 7, 1);
    context.expect(context.expect_ok(toggled.status(), "fetch_xor") && *toggled == 9, "fetch_xor on the host");
    meet(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, GpuOneSidedWords,
                         testing::Values(OneSidedShape{2, 2}, OneSidedShape{4, 4}, OneSidedShape{2, 1},
                                         OneSidedShape{4, 2}),
                         [](const testing::TestParamInfo<OneSidedShape>& shape) { return describe(shape.param); });
INSTANTIATE_TEST_SUITE_P(Processes, GpuOneSidedWords,
                         testing::Values(OneSidedShape{2, 2, RankKind::kProcesses, "ucx"},
                                         OneSidedShape{2, 1, RankKind::kProcesses, "ucx"}),
                         [](const testing::TestParamInfo<OneSidedShape>& shape) { return describe(shape.param); });

}  // namespace
}  // namespace ferry::test
