// Each promise of order and completion in docs/one-sided.md that no other test covers by name.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "one_sided/world.hpp"

namespace ferry::test {
namespace {

class OneSidedOrder : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedOrder, ::testing::ValuesIn(all_worlds()),
                         [](const auto& instance) { return instance.param.name; });

int next_of(const OneSided& shm) { return (shm.rank() + 1) % shm.num_ranks(); }

std::atomic_ref<std::uint64_t> atomic_of(std::uint64_t& word) { return std::atomic_ref(word); }

/// Changes the word of `rank` from `value` - 1 to `value`.
struct Change {
  std::string_view name;
  std::function<Status(OneSided&, int rank, std::uint64_t* word, std::uint64_t value)> make;
};

/// `bytes`: destination of put_signal's bytes.
std::vector<Change> all_changes(std::uint64_t* bytes) {
  return {
      {"put", [](OneSided& shm, int rank, std::uint64_t* word,
                 std::uint64_t value) { return shm.put<std::uint64_t>(rank, word, std::array{value}); }},
      {"signal that sets", [](OneSided& shm, int rank, std::uint64_t* word,
                              std::uint64_t value) { return shm.signal(rank, word, value, SignalOp::kSet); }},
      {"signal that adds", [](OneSided& shm, int rank, std::uint64_t* word,
                              std::uint64_t /*value*/) { return shm.signal(rank, word, 1, SignalOp::kAdd); }},
      {"put_signal",
       [bytes](OneSided& shm, int rank, std::uint64_t* word, std::uint64_t value) {
         return shm.put_signal<std::uint64_t>(rank, bytes, std::array{value}, word, value, SignalOp::kSet);
       }},
      {"fetch_add", [](OneSided& shm, int rank, std::uint64_t* word,
                       std::uint64_t /*value*/) { return shm.fetch_add(rank, word, 1).status(); }},
      {"compare_swap", [](OneSided& shm, int rank, std::uint64_t* word,
                          std::uint64_t value) { return shm.compare_swap(rank, word, value - 1, value).status(); }},
      {"store through peer_pointer",
       [](OneSided& shm, int rank, std::uint64_t* word, std::uint64_t value) {
         std::uint64_t* const theirs = shm.peer_pointer(rank, word);
         if (theirs == nullptr) return shm.put<std::uint64_t>(rank, word, std::array{value});
         atomic_of(*theirs).store(value, std::memory_order_relaxed);
         return Status();
       }},
  };
}

/// Waits for `value` by one of three ways to look; each sees B only together with A.
Status see(OneSided& shm, std::uint64_t* word, std::uint64_t value, std::uint64_t round) {
  if (round % 3 == 0) return shm.wait_until(word, Comparison::kGreaterEqual, value);
  while (true) {
    if (round % 3 == 1) {
      const Result<bool> holds = shm.test(word, Comparison::kGreaterEqual, value);
      if (!holds.ok() || *holds) return holds.status();
    } else {
      const Result<std::uint64_t> seen = shm.fetch_add(shm.rank(), word, 0);
      if (!seen.ok() || *seen >= value) return seen.status();
      // The owner's driver applies changes sent by other ranks.
      (void)shm.test(word, Comparison::kGreaterEqual, value);
    }
  }
}

TEST_P(OneSidedOrder, AFenceOrdersEachKindOfOperationBeforeEachKind) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::uint64_t kRounds = 6;
    const std::span<std::uint64_t> cells = block<std::uint64_t>(context, shm, 3 * 512);
    if (cells.empty()) return;
    const std::vector<Change> changes = all_changes(&cells[2]);
    std::uint64_t* const first = cells.data();
    std::uint64_t* const second = &cells[512];
    std::uint64_t* const answer = &cells[1024];
    std::uint64_t value = 0;
    const int previous = (shm.rank() + shm.num_ranks() - 1) % shm.num_ranks();
    for (const Change& a : changes) {
      for (const Change& b : changes) {
        for (std::uint64_t round = 0; round < kRounds; ++round) {
          ++value;
          const std::string what = fmt::format("{}, fence, {}", a.name, b.name);
          if (!context.expect_ok(a.make(shm, next_of(shm), first, value), what)) return;
          if (!context.expect_ok(round % 2 == 0 ? shm.fence(next_of(shm)) : shm.fence(), what)) return;
          if (!context.expect_ok(b.make(shm, next_of(shm), second, value), what)) return;
          if (!context.expect_ok(see(shm, second, value, round), what)) return;
          const std::uint64_t seen = atomic_of(*first).load(std::memory_order_relaxed);
          if (!context.expect(seen == value, fmt::format("{}: {} instead of {}", what, seen, value))) return;
          // Changes of the next round follow all changes of this round at every rank.
          context.expect_ok(shm.signal(previous, answer, value, SignalOp::kSet), "answer");
          if (!context.expect_ok(shm.wait_until(answer, Comparison::kGreaterEqual, value), "wait_until")) return;
          if (!context.expect_ok(shm.quiet(), "quiet")) return;
        }
      }
    }
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedOrder, AllRanksSeeWhatQuietHasCompleted) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::uint64_t kRounds = 20;
    constexpr std::size_t kWords = 600;
    const int home = shm.num_ranks() - 1;
    const std::span<std::uint64_t> cells = block<std::uint64_t>(context, shm, kWords);
    const std::span<std::uint64_t> told = block<std::uint64_t>(context, shm, 1);
    if (told.empty()) return;
    std::vector<std::uint64_t> source(kWords);
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      std::vector<std::uint64_t> got(kWords);
      if (shm.rank() == 0) {
        std::ranges::fill(source, round);
        context.expect_ok(shm.put_nbi<std::uint64_t>(home, cells.data(), source), "put_nbi");
        context.expect_ok(round % 2 == 0 ? shm.quiet() : shm.quiet(home), "quiet");
        std::ranges::fill(source, 0);  // the source may be reused
        context.expect_ok(shm.get<std::uint64_t>(home, got, cells.data()), "get");
        context.expect(std::ranges::count(got, round) == kWords, "a put, quiet, a get");
        // No fence is needed: the put is already complete for every rank that gets the signal.
        for (int rank = 1; rank < shm.num_ranks(); ++rank) {
          context.expect_ok(shm.signal(rank, told.data(), round, SignalOp::kSet), "signal");
        }
      } else {
        if (!context.expect_ok(shm.wait_until(told.data(), Comparison::kEqual, round), "wait_until")) return;
        context.expect_ok(shm.get<std::uint64_t>(home, got, cells.data()), "get");
        context.expect(std::ranges::count(got, round) == kWords, "another rank gets the words that quiet completed");
      }
      if (!context.expect_ok(shm.barrier(), "barrier")) return;
    }
  });
}

/// Puts and gets of 4 or 8 aligned bytes are atomic: no rank sees halves of two values.
TEST_P(OneSidedOrder, AlignedWordsComeInOnePiece) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::uint64_t kRounds = 400;
    const std::span<std::uint64_t> cells = block<std::uint64_t>(context, shm, 3);
    if (cells.empty()) return;
    const auto is_whole = [](std::uint64_t word) { return (word >> 32) == (word & 0xFFFF'FFFF); };
    bool torn = false;
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      // All ranks put to rank 0 and read from it at the same time.
      const std::uint64_t mine = round * 16 + static_cast<std::uint64_t>(shm.rank());
      const std::uint64_t whole = mine << 32 | mine;
      const auto half = static_cast<std::uint32_t>((mine & 0xFFFF) << 16 | (mine & 0xFFFF));
      context.expect_ok(shm.put(0, &cells[0], &whole, sizeof(whole)), "put of 8 bytes");
      context.expect_ok(shm.put(0, &cells[1], &half, sizeof(half)), "put of 4 bytes");
      std::uint64_t seen = 0;
      std::uint32_t seen_half = 0;
      context.expect_ok(shm.get(0, &seen, &cells[0], sizeof(seen)), "get of 8 bytes");
      context.expect_ok(shm.get(0, &seen_half, &cells[1], sizeof(seen_half)), "get of 4 bytes");
      torn = torn || !is_whole(seen) || (seen_half >> 16) != (seen_half & 0xFFFF);
      if (shm.rank() == 0) torn = torn || !is_whole(atomic_of(cells[0]).load(std::memory_order_relaxed));
    }
    context.expect(!torn, "each value comes from one put");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

}  // namespace
}  // namespace ferry::test
