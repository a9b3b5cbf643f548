// Atomics of every kind, on words of 4 and 8 bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "one_sided/world.hpp"

namespace ferry::test {
namespace {

class OneSidedAtomics : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedAtomics, ::testing::ValuesIn(all_worlds()),
                         [](const auto& instance) { return instance.param.name; });

constexpr std::uint64_t kPattern = 0xF0F1'F2F3'F4F5'F6F7;
constexpr std::uint64_t kMask = 0x8F00'FF00'8FF0'0F0F;

/// Calls each atomic on a word of the next rank, which no other rank uses, and compares what each returns with a model.
template <typename Word>
void check_each_call(RankContext& context, OneSided& shm) {
  const std::span<Word> words = block<Word>(context, shm, 3);
  const int next = (shm.rank() + 1) % shm.num_ranks();
  Word* const word = &words[1];  // of 4 bytes: in the upper half of an aligned 8
  constexpr auto kFirst = static_cast<Word>(kPattern);
  constexpr auto kBits = static_cast<Word>(kMask);
  Word model = 0;
  const auto expect = [&](const Result<Word>& before, Word after, std::string_view call) {
    context.expect(context.expect_ok(before.status(), call) && *before == model, call);
    model = after;
  };
  const auto expect_written = [&](const Status& status, const Word& before, Word after, std::string_view call) {
    context.expect(context.expect_ok(status, call) && before == model, call);
    model = after;
  };
  expect(shm.swap(next, word, kFirst), kFirst, "swap");
  expect(shm.fetch_add(next, word, static_cast<Word>(~kFirst) + 3), Word{2}, "fetch_add, past the largest value");
  expect(shm.fetch_or(next, word, kFirst), kFirst | Word{2}, "fetch_or");
  expect(shm.fetch_and(next, word, kBits), model & kBits, "fetch_and");
  expect(shm.fetch_xor(next, word, kFirst), model ^ kFirst, "fetch_xor");
  expect(shm.compare_swap(next, word, model + 1, 5), model, "compare_swap of another value");
  expect(shm.compare_swap(next, word, model, kFirst), kFirst, "compare_swap");

  Word before = 0;
  expect_written(shm.fetch_and(next, word, kBits, &before), before, model & kBits, "fetch_and");
  expect_written(shm.fetch_xor(next, word, kFirst, &before), before, model ^ kFirst, "fetch_xor");
  expect_written(shm.fetch_or(next, word, kBits, &before), before, model | kBits, "fetch_or");
  expect_written(shm.fetch_add(next, word, 7, &before), before, model + 7, "fetch_add");
  expect_written(shm.compare_swap(next, word, model, 9, &before), before, 9, "compare_swap");
  expect_written(shm.swap(next, word, kFirst, &before), before, kFirst, "swap");
  context.expect_ok(shm.signal(next, word, 0, SignalOp::kSet), "signal");
  context.expect_ok(shm.quiet(), "quiet");
  context.expect_ok(shm.signal(next, word, kBits, SignalOp::kAdd), "signal");
  context.expect_ok(shm.quiet(), "quiet");
  context.expect_ok(shm.signal(next, word, kBits, SignalOp::kAdd), "signal");
  context.expect_ok(shm.barrier(), "barrier");
  context.expect(words[1] == static_cast<Word>(2 * kBits), "the word, modulo its size");
  context.expect(words[0] == 0 && words[2] == 0, "words beside it");
  context.expect_ok(shm.barrier(), "barrier");
}

TEST_P(OneSidedAtomics, EachReturnsWhatWasThere) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    check_each_call<std::uint64_t>(context, shm);
    check_each_call<std::uint32_t>(context, shm);
  });
}

/// All ranks change the same words, which lie side by side, at rank 0. No change may be lost.
template <typename Word>
void check_together(RankContext& context, OneSided& shm) {
  constexpr Word kRounds = 40;
  enum : std::size_t { kCount, kToggled, kMarked, kCleared, kHeld, kNumWords };
  const std::span<Word> words = block<Word>(context, shm, kNumWords);
  const std::span<Word> seen = block<Word>(context, shm, 2);
  const auto num_ranks = static_cast<Word>(shm.num_ranks());
  const auto rank = static_cast<Word>(shm.rank());
  const auto mine = static_cast<Word>(Word{1} << rank);
  const auto all = static_cast<Word>((Word{1} << num_ranks) - 1);
  if (rank == 0) words[kCleared] = all;
  context.expect_ok(shm.barrier(), "barrier");
  Word given = 0;  // sums of what this rank swapped in, and of what it got back
  Word taken = 0;
  for (Word round = 0; round < kRounds; ++round) {
    const Result<Word> count = shm.fetch_add(0, &words[kCount], 1);
    if (!context.expect_ok(count.status(), "fetch_add")) return;
    context.expect(*count < kRounds * num_ranks, "a number in range");
    const Word before = round % 2 == 0 ? 0 : mine;
    const Result<Word> toggled = shm.fetch_xor(0, &words[kToggled], mine);
    context.expect(toggled.ok() && (*toggled & mine) == before, "fetch_xor finds the bit as this rank left it");
    const Result<Word> marked = shm.fetch_or(0, &words[kMarked], mine);
    context.expect(marked.ok() && (*marked & mine) == (round == 0 ? 0 : mine), "fetch_or finds the bit of this rank");
    const Result<Word> cleared = shm.fetch_and(0, &words[kCleared], all ^ mine);
    context.expect(cleared.ok() && (*cleared & mine) == (round == 0 ? mine : 0), "fetch_and finds it too");
    const Word value = 1 + round * num_ranks + rank;
    const Result<Word> held = shm.swap(0, &words[kHeld], value);
    if (!context.expect_ok(held.status(), "swap")) return;
    given += value;
    taken += *held;
  }
  context.expect_ok(shm.fetch_add(0, &seen[0], given).status(), "fetch_add");
  context.expect_ok(shm.fetch_add(0, &seen[1], taken).status(), "fetch_add");
  context.expect_ok(shm.barrier(), "barrier");
  if (rank == 0) {
    context.expect(words[kCount] == kRounds * num_ranks, "the sum");
    context.expect(words[kToggled] == 0, "each bit was toggled an even number of times");
    context.expect(words[kMarked] == all && words[kCleared] == 0, "all bits");
    context.expect(seen[0] == static_cast<Word>(seen[1] + words[kHeld]), "each swapped value came back once");
  }
  context.expect_ok(shm.barrier(), "barrier");
}

TEST_P(OneSidedAtomics, OfManyRanksLoseNoChange) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    check_together<std::uint64_t>(context, shm);
    check_together<std::uint32_t>(context, shm);
  });
}

TEST_P(OneSidedAtomics, AWaitSeesAnyPartOfItsWordChange) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const std::span<std::uint64_t> word = block<std::uint64_t>(context, shm, 1);
    auto* const halves = reinterpret_cast<std::uint32_t*>(word.data());
    const int next = (shm.rank() + 1) % shm.num_ranks();
    context.expect_ok(shm.signal(next, halves + 1, 5, SignalOp::kAdd), "signal");
    context.expect_ok(shm.signal(next, halves, 3, SignalOp::kSet), "signal");
    context.expect_ok(shm.wait_until(word.data(), Comparison::kEqual, (std::uint64_t{5} << 32) + 3), "wait_until");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedAtomics, BadArgumentsAreRefusedAndChangeNothing) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr auto kBad = ErrorCode::kInvalidArgument;
    const std::span<std::uint32_t> words = block<std::uint32_t>(context, shm, 3);
    const int next = (shm.rank() + 1) % shm.num_ranks();
    std::array<std::uint32_t, 4> local{};
    const auto at_byte = [&](std::size_t offset) { return reinterpret_cast<std::byte*>(words.data()) + offset; };
    auto* const misaligned = reinterpret_cast<std::uint32_t*>(at_byte(2));
    auto* const wide_misaligned = reinterpret_cast<std::uint64_t*>(at_byte(4));
    auto* const wide_beyond = reinterpret_cast<std::uint64_t*>(at_byte(8));  // its second half is outside of the block
    context.expect_code(shm.fetch_add(next, misaligned, 1).status(), kBad, "fetch_add, misaligned");
    context.expect_code(shm.swap(next, wide_misaligned, 1).status(), kBad, "swap, misaligned");
    context.expect_code(shm.fetch_or(next, wide_beyond, 1).status(), kBad, "fetch_or, past the end of the block");
    context.expect_code(shm.fetch_or(next, words.data() + 3, 1).status(), kBad, "fetch_or, behind the block");
    context.expect_code(shm.fetch_xor(next, &local[0], 1).status(), kBad, "fetch_xor, not symmetric");
    context.expect_code(shm.fetch_and(shm.num_ranks(), words.data(), 0).status(), kBad, "fetch_and, no such rank");
    context.expect_code(shm.compare_swap(-1, words.data(), 0, 1).status(), kBad, "compare_swap, no such rank");
    context.expect_code(shm.signal(next, misaligned, 1, SignalOp::kSet), kBad, "signal, misaligned");
    context.expect_code(shm.signal(next, words.data(), 1, static_cast<SignalOp>(2)), kBad, "no such operation");
    context.expect_code(shm.swap(next, words.data(), 1, nullptr), kBad, "no address for the result");
    auto* const odd = reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(local.data()) + 1);
    context.expect_code(shm.fetch_or(next, words.data(), 1, odd), kBad, "a misaligned address for the result");
    const Status named = shm.fetch_xor(next, misaligned, 1, &local[0]);
    context.expect(named.message().find("fetch_xor") != std::string_view::npos &&
                       named.message().find("multiple of 4") != std::string_view::npos,
                   "the message names the call and the alignment");
    context.expect_ok(shm.barrier(), "barrier");
    context.expect(std::ranges::all_of(words, [](std::uint32_t word) { return word == 0; }), "nothing was changed");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

}  // namespace
}  // namespace ferry::test
