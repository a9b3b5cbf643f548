// Puts, gets, and their ordering.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "one_sided/world.hpp"

namespace ferry::test {
namespace {

class OneSidedCopies : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedCopies, ::testing::ValuesIn(all_worlds()),
                         [](const auto& instance) { return instance.param.name; });

std::vector<std::uint8_t> pattern(std::size_t num_bytes, int seed) {
  std::array<std::uint8_t, 256> period{};
  for (std::size_t i = 0; i < period.size(); ++i) {
    period[i] = static_cast<std::uint8_t>(i * 7 + static_cast<unsigned>(seed) * 31);
  }
  std::vector<std::uint8_t> bytes(num_bytes);
  for (std::size_t i = 0; i < num_bytes; i += period.size()) {
    std::memcpy(&bytes[i], period.data(), std::min(period.size(), num_bytes - i));
  }
  return bytes;
}

int next_of(const OneSided& shm) { return (shm.rank() + 1) % shm.num_ranks(); }
int previous_of(const OneSided& shm) { return (shm.rank() + shm.num_ranks() - 1) % shm.num_ranks(); }

/// Sizes below and above the limits for copied puts and for single messages; aligned and unaligned.
constexpr std::array<std::size_t, 7> kSizes{1, 4, 8, 13, 4096, 70'001, 1'500'000};
constexpr std::size_t kBlockBytes = 1'600'000;

TEST_P(OneSidedCopies, APutArrivesWhereItBelongsAndNowhereElse) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const std::span<std::uint8_t> in = block<std::uint8_t>(context, shm, kBlockBytes);
    for (const std::size_t num_bytes : kSizes) {
      for (const std::size_t begin : {std::size_t{0}, std::size_t{9}}) {
        for (const bool blocking : {true, false}) {
          const std::vector<std::uint8_t> sent = pattern(num_bytes, shm.rank());
          std::memset(in.data(), 0, in.size());
          if (!context.expect_ok(shm.barrier(), "barrier")) return;
          const Status put =
              blocking ? shm.put(next_of(shm), &in[begin], sent) : shm.put_nbi(next_of(shm), &in[begin], sent);
          if (!context.expect_ok(put, "put") || !context.expect_ok(shm.barrier(), "barrier")) return;
          std::vector<std::uint8_t> expected(in.size(), 0);
          std::ranges::copy(pattern(num_bytes, previous_of(shm)),
                            expected.begin() + static_cast<std::ptrdiff_t>(begin));
          if (!context.expect(std::memcmp(in.data(), expected.data(), in.size()) == 0,
                              "the block: " + std::to_string(num_bytes)))
            return;
          if (!context.expect_ok(shm.barrier(), "barrier")) return;
        }
      }
    }
    context.expect_ok(shm.put(next_of(shm), in.data(), nullptr, 0), "an empty put");
  });
}

TEST_P(OneSidedCopies, AGetReadsAnyRank) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const std::span<std::uint8_t> out = block<std::uint8_t>(context, shm, kBlockBytes);
    std::ranges::copy(pattern(kBlockBytes, shm.rank()), out.begin());
    if (!context.expect_ok(shm.barrier(), "barrier")) return;
    std::vector<std::vector<std::uint8_t>> got;
    for (int rank = 0; rank < shm.num_ranks(); ++rank) {
      const std::vector<std::uint8_t> theirs = pattern(kBlockBytes, rank);
      for (const std::size_t num_bytes : kSizes) {
        std::vector<std::uint8_t> bytes(num_bytes);
        if (!context.expect_ok(shm.get<std::uint8_t>(rank, bytes, &out[9]), "get")) return;
        context.expect(std::equal(bytes.begin(), bytes.end(), theirs.begin() + 9), "the bytes of a get");
      }
      got.emplace_back(kBlockBytes);
      if (!context.expect_ok(shm.get_nbi<std::uint8_t>(rank, got.back(), out.data()), "get_nbi")) return;
    }
    if (!context.expect_ok(shm.quiet(), "quiet")) return;
    for (int rank = 0; rank < shm.num_ranks(); ++rank) {
      context.expect(got[static_cast<std::size_t>(rank)] == pattern(kBlockBytes, rank),
                     "the bytes of get_nbi after quiet");
    }
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedCopies, PeerPointersLoadAndStoreInsideANode) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const std::span<std::uint64_t> cells =
        block<std::uint64_t>(context, shm, static_cast<std::size_t>(shm.num_ranks()));
    for (int rank = 0; rank < shm.num_ranks(); ++rank) {
      std::uint64_t* theirs = shm.peer_pointer(rank, &cells[static_cast<std::size_t>(shm.rank())]);
      const bool near = shm.topology().node_of(rank) == shm.topology().node_of(shm.rank());
      context.expect((theirs != nullptr) == near, "pointers to the ranks of the node and no others");
      if (theirs != nullptr) *theirs = static_cast<std::uint64_t>(shm.rank()) + 1;
    }
    context.expect_ok(shm.barrier(), "barrier");
    for (int rank = 0; rank < shm.num_ranks(); ++rank) {
      const bool near = shm.topology().node_of(rank) == shm.topology().node_of(shm.rank());
      context.expect(cells[static_cast<std::size_t>(rank)] == (near ? static_cast<std::uint64_t>(rank) + 1 : 0),
                     "stores");
    }
    context.expect(shm.peer_pointer(shm.num_ranks(), cells.data()) == nullptr, "no such rank");
    std::uint64_t other = 0;
    context.expect(shm.peer_pointer(shm.rank(), &other) == nullptr, "not symmetric");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

/// Message passing: data, an ordering call, a flag.
struct MessageCase {
  bool fence = false;  ///< plain puts, a fence, a signal; otherwise put_signal
  SignalOp op = SignalOp::kAdd;
};

void pass_messages(RankContext& context, OneSided& shm, const MessageCase& message) {
  constexpr std::uint64_t kRounds = 60;
  constexpr std::size_t kWords = 3000;
  const std::span<std::uint64_t> in = block<std::uint64_t>(context, shm, kWords);
  const std::span<std::uint64_t> flags = block<std::uint64_t>(context, shm, 2);
  std::vector<std::uint64_t> out(kWords);
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    std::ranges::fill(out, round * 1000 + static_cast<std::uint64_t>(shm.rank()));
    const std::uint64_t value = message.op == SignalOp::kAdd ? 1 : round;
    Status sent;
    if (message.fence) {
      const std::span<const std::uint64_t> source(out);
      sent = shm.put(next_of(shm), in.data(), source.first(kWords / 2));
      if (sent.ok()) sent = shm.put_nbi(next_of(shm), &in[kWords / 2], source.subspan(kWords / 2));
      if (sent.ok()) sent = round % 2 == 0 ? shm.fence() : shm.fence(next_of(shm));
      if (sent.ok()) sent = shm.signal(next_of(shm), &flags[0], value, message.op);
    } else {
      sent = shm.put_signal<std::uint64_t>(next_of(shm), in.data(), out, &flags[0], value, message.op);
    }
    if (!context.expect_ok(sent, "message")) return;
    if (!context.expect_ok(shm.wait_until(&flags[0], Comparison::kGreaterEqual, round), "wait_until")) return;
    const std::uint64_t expected = round * 1000 + static_cast<std::uint64_t>(previous_of(shm));
    if (!context.expect(std::ranges::count(in, expected) == kWords, "the message is whole")) return;
    // Lets the sender send again.
    if (!context.expect_ok(shm.signal(previous_of(shm), &flags[1], 1, SignalOp::kAdd), "answer")) return;
    if (!context.expect_ok(shm.wait_until(&flags[1], Comparison::kGreaterEqual, round), "wait for the answer")) return;
    if (message.fence && !context.expect_ok(shm.quiet(), "quiet")) return;  // the source of put_nbi is reused
  }
  context.expect_ok(shm.barrier(), "barrier");
}

TEST_P(OneSidedCopies, AFenceOrdersPutsBeforeASignalWithoutQuiet) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) { pass_messages(context, shm, {.fence = true}); });
}

TEST_P(OneSidedCopies, APutSignalPublishesItsBytesByAdding) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) { pass_messages(context, shm, {}); });
}

TEST_P(OneSidedCopies, APutSignalPublishesItsBytesBySetting) {
  run_world(GetParam(),
            [](RankContext& context, OneSided& shm) { pass_messages(context, shm, {.op = SignalOp::kSet}); });
}

TEST_P(OneSidedCopies, APutSignalOfAnySizeIsWholeWhenItIsSeen) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const std::span<std::uint8_t> in = block<std::uint8_t>(context, shm, kBlockBytes);
    const std::span<std::uint64_t> flag = block<std::uint64_t>(context, shm, 1);
    std::uint64_t turn = 0;
    for (const std::size_t num_bytes : kSizes) {
      for (const SignalOp op : {SignalOp::kAdd, SignalOp::kSet}) {
        ++turn;
        const int seed = shm.rank() + static_cast<int>(turn);
        const std::uint64_t value = op == SignalOp::kAdd ? 1 : turn;
        const std::vector<std::uint8_t> sent = pattern(num_bytes, seed);
        const Status put = shm.put_signal<std::uint8_t>(next_of(shm), &in[9], sent, flag.data(), value, op);
        if (!context.expect_ok(put, "put_signal")) return;
        if (!context.expect_ok(shm.wait_until(flag.data(), Comparison::kEqual, turn), "wait_until")) return;
        const std::vector<std::uint8_t> expected = pattern(num_bytes, previous_of(shm) + static_cast<int>(turn));
        context.expect(std::equal(expected.begin(), expected.end(), in.begin() + 9), "the bytes are there");
        if (!context.expect_ok(shm.barrier(), "barrier")) return;
      }
    }
  });
}

TEST_P(OneSidedCopies, AFenceOrdersPutsToOneWord) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::uint64_t kRounds = 40;
    const std::span<std::uint64_t> word = block<std::uint64_t>(context, shm, 1);
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      context.expect_ok(shm.put<std::uint64_t>(next_of(shm), word.data(), std::array{round}), "put");
      context.expect_ok(shm.fence(next_of(shm)), "fence");
    }
    context.expect_ok(shm.barrier(), "barrier");
    context.expect(word[0] == kRounds, "the last put is the last to arrive");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedCopies, QuietForbidsStoreBuffering) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr int kRounds = 60;
    const int home = shm.num_ranks() - 1;
    const std::span<std::uint64_t> cells = block<std::uint64_t>(context, shm, 2 * kRounds);
    const std::span<std::uint64_t> seen = block<std::uint64_t>(context, shm, 2 * kRounds);
    Result<Team> writers = shm.split(shm.world(), shm.rank() < 2 ? 0 : 1);
    if (!context.expect_ok(writers.status(), "split")) return;
    // Ranks 0 and 1 each write their own cell of the last rank and then read the other's, at the same time.
    if (shm.rank() < 2) {
      for (int round = 0; round < kRounds; ++round) {
        context.expect_ok(shm.barrier(*writers), "barrier of the two");
        const auto mine = static_cast<std::size_t>(2 * round + shm.rank());
        const std::size_t theirs = mine ^ 1;
        context.expect_ok(shm.put<std::uint64_t>(home, &cells[mine], std::array<std::uint64_t, 1>{1}), "put");
        context.expect_ok(shm.quiet(), "quiet");
        std::array<std::uint64_t, 1> read{};
        context.expect_ok(shm.get<std::uint64_t>(home, read, &cells[theirs]), "get");
        const std::array<std::uint64_t, 1> shown{read[0] + 1};
        context.expect_ok(shm.put<std::uint64_t>(0, &seen[mine], shown), "put of the values read");
      }
    }
    context.expect_ok(shm.barrier(), "barrier");
    if (shm.rank() == 0 && shm.num_ranks() > 1) {
      for (std::size_t round = 0; round < kRounds; ++round) {
        context.expect(seen[2 * round] + seen[2 * round + 1] >= 3, "one of the two sees the other's write");
      }
    }
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedCopies, MorePutsThanFitAtOnce) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::size_t kCount = 20'000;  // the driver flushes every 4096
    const std::span<std::uint64_t> in = block<std::uint64_t>(context, shm, kCount);
    for (std::uint64_t i = 0; i < kCount; ++i) {
      if (!context.expect_ok(shm.put<std::uint64_t>(next_of(shm), &in[i], std::array{i + 1}), "put")) return;
    }
    context.expect_ok(shm.barrier(), "barrier");
    bool right = true;
    for (std::uint64_t i = 0; i < kCount; ++i) right = right && in[i] == i + 1;
    context.expect(right, "all puts have arrived");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedCopies, ThreadsOfARankShareIt) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::uint64_t kRounds = 200;
    const std::span<std::uint64_t> in = block<std::uint64_t>(context, shm, 2 * kRounds);
    const std::span<std::uint64_t> sum = block<std::uint64_t>(context, shm, 1);
    std::array<Status, 2> results;
    const auto work = [&](std::uint64_t thread) {
      Status& status = results[thread];
      for (std::uint64_t i = 0; i < kRounds && status.ok(); ++i) {
        const std::array value{thread + 1};
        status = shm.put_signal<std::uint64_t>(next_of(shm), &in[2 * i + thread], value, sum.data(), 1, SignalOp::kAdd);
        if (status.ok() && i % 16 == 0) status = shm.quiet();
      }
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    for (const Status& status : results) context.expect_ok(status, "a thread");
    context.expect_ok(shm.wait_until(sum.data(), Comparison::kEqual, 2 * kRounds), "wait_until");
    bool right = true;
    for (std::uint64_t i = 0; i < 2 * kRounds; ++i) right = right && in[i] == i % 2 + 1;
    context.expect(right, "the words that both threads put");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

}  // namespace
}  // namespace ferry::test
