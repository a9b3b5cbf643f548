/// Requests of a ring on their way through the driver and a network that reorders all it may.

#include "one_sided/ring_source.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "one_sided/fabric.hpp"
#include "one_sided/lone_source.hpp"
#include "support/host_ring.hpp"
#include "support/loopback_faults.hpp"
#include "support/rank_runner.hpp"

namespace ferry::one_sided {
namespace {

using device::RequestOp;

constexpr int kNumRanks = 4;
constexpr int kRanksPerNode = 2;
constexpr std::int64_t kTimeoutNs = 60 * kNsPerSecond;
constexpr std::size_t kHeapBytes = std::size_t{64} << 10;
constexpr std::uint64_t kRowBytes = 64;
constexpr std::uint64_t kNumRows = 200;  // rows of each writer
constexpr std::uint64_t kNumWriters = 2;
// Contents of each heap, by source rank and writer: rows and a word that counts them; and one word to which all add.
constexpr std::uint64_t kCounts = kNumRanks * kNumWriters * kNumRows * kRowBytes;
constexpr std::uint64_t kTotal = kCounts + kNumRanks * kNumWriters * 8;
static_assert(kTotal + 8 <= 2 * kHeapBytes);

std::uint64_t row_offset(int from, std::uint64_t writer, std::uint64_t row) {
  return ((static_cast<std::uint64_t>(from) * kNumWriters + writer) * kNumRows + row) * kRowBytes;
}
std::uint64_t count_offset(int from, std::uint64_t writer) {
  return kCounts + (static_cast<std::uint64_t>(from) * kNumWriters + writer) * 8;
}
std::byte pattern(int from, std::uint64_t writer, std::uint64_t row) {
  return static_cast<std::byte>((static_cast<std::uint64_t>(from) * 101 + writer * 53 + row) % 255 + 1);
}

/// First word of a row.
std::uint64_t word_of(int from, std::uint64_t writer, std::uint64_t row) {
  std::uint64_t word = 0;
  std::memset(&word, static_cast<int>(pattern(from, writer, row)), sizeof(word));
  return word;
}

struct End {
  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<test::HostRing> ring;
  std::unique_ptr<RingSource> source;

  static End create(test::RankContext& context) {
    BackendContext base;
    base.bootstrap = context.bootstrap().get();
    base.topology = {context.rank(), context.num_ranks(), kRanksPerNode};
    base.options.transport = "loopback";
    base.options.timeout_ns = kTimeoutNs;
    End end;
    Result<std::unique_ptr<Fabric>> fabric = Fabric::create(base, 2 * kHeapBytes);
    if (!context.expect_ok(fabric.status(), "Fabric::create")) return end;
    end.fabric = std::move(*fabric);
    end.ring = std::make_unique<test::HostRing>(16, kRowBytes, 2 * kHeapBytes);
    RingSource::Options options;
    options.ring = end.ring->memory();
    options.limits = {.num_peers = kNumRanks,
                      .local_bytes = 2 * kHeapBytes + end.ring->staging_bytes(),
                      .remote_bytes = 2 * kHeapBytes,
                      .timeout_ns = kTimeoutNs};
    options.heap = end.fabric->heap();
    options.staging = end.ring->staging();
    for (int rank = 0; rank < kNumRanks; ++rank) options.peer_heaps.push_back(end.fabric->peer_heap(rank));
    options.heap_offset = end.fabric->engine_offset(0);
    options.num_parts = &Driver::num_parts;
    end.source = std::make_unique<RingSource>(std::move(options));
    end.source->keep_polling(true);
    end.fabric->driver()->attach(end.source.get());
    return end;
  }
};

/// Writes rows to every rank, each followed by a count, and adds to a word shared by all.
void write_rows(const test::HostRing& ring, int rank, std::uint64_t writer, std::atomic<int>& num_errors) {
  for (std::uint64_t row = 0; row < kNumRows; ++row) {
    for (int to = 0; to < kNumRanks; ++to) {
      const auto peer = static_cast<std::uint32_t>(to);
      const std::uint64_t ticket = ring.take_slot();
      std::memset(ring.writer().staging(ticket), static_cast<int>(pattern(rank, writer, row)), kRowBytes);
      // Even rows use one request; odd rows put the first word together with the count after the other bytes.
      const bool one_request = row % 2 == 0;
      const std::uint64_t done = one_request ? 0 : sizeof(std::uint64_t);
      ring.writer().write({.op = one_request ? RequestOp::kPutSignalAdd : RequestOp::kPut,
                           .peer = peer,
                           .local_offset = ring.writer().staging_offset(ticket) + done,
                           .remote_offset = row_offset(rank, writer, row) + done,
                           .num_bytes = kRowBytes - done,
                           .value = 1,
                           .signal_offset = count_offset(rank, writer)},
                          ticket);
      if (!one_request) {
        ring.post({.op = RequestOp::kPutValueSignalAdd,
                   .peer = peer,
                   .remote_offset = row_offset(rank, writer, row),
                   .value = 1,
                   .operand = word_of(rank, writer, row),
                   .signal_offset = count_offset(rank, writer)});
      }
    }
    std::uint64_t before = 0;
    const auto peer = static_cast<std::uint32_t>(row % kNumRanks);
    if (!ring.fetch({.op = RequestOp::kFetchAdd, .peer = peer, .remote_offset = kTotal, .value = 1}, before)) {
      ++num_errors;
    }
  }
  for (std::uint32_t peer = 0; peer < kNumRanks; ++peer) {
    std::uint64_t value = 0;
    if (!ring.fetch({.op = RequestOp::kQuietPeer, .peer = peer}, value)) ++num_errors;
  }
  if (!ring.quiet()) ++num_errors;
}

/// Checks that every counted row has arrived, for any count.
void check_rows(std::byte* heap, std::atomic<int>& num_errors) {
  for (int from = 0; from < kNumRanks; ++from) {
    for (std::uint64_t writer = 0; writer < kNumWriters; ++writer) {
      std::uint64_t& word = *reinterpret_cast<std::uint64_t*>(heap + count_offset(from, writer));
      const std::uint64_t count = std::atomic_ref(word).load(std::memory_order_acquire);
      for (std::uint64_t row = 0; row < count; ++row) {
        // Writers count in the order of their rows.
        const std::byte* const data = heap + row_offset(from, writer, row);
        if (std::any_of(data, data + kRowBytes, [&](std::byte b) { return b != pattern(from, writer, row); })) {
          ++num_errors;
        }
      }
    }
  }
}

TEST(RingSource, RequestsOfTwoWritersArriveAsTheirOrderPromises) {
  net::LoopbackFaults faults;
  faults.scramble(11);
  test::run_ranks({.num_ranks = kNumRanks}, [](test::RankContext& context) {
    End end = End::create(context);
    if (end.fabric == nullptr) return;
    std::atomic<int> num_errors{0};
    std::vector<std::thread> writers;
    for (std::uint64_t writer = 0; writer < kNumWriters; ++writer) {
      writers.emplace_back([&, writer] { write_rows(*end.ring, context.rank(), writer, num_errors); });
    }
    for (std::thread& writer : writers) writer.join();
    context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "all are quiet");
    // Quiet of all ranks completes all requests.
    check_rows(end.fabric->heap(), num_errors);
    context.expect(num_errors == 0, "no request failed and no row is wrong");
    for (int from = 0; from < kNumRanks; ++from) {
      for (std::uint64_t writer = 0; writer < kNumWriters; ++writer) {
        std::uint64_t count = 0;
        std::memcpy(&count, end.fabric->heap() + count_offset(from, writer), sizeof(count));
        context.expect(count == kNumRows, "every row was counted once");
      }
    }
    std::uint64_t total = 0;
    std::memcpy(&total, end.fabric->heap() + kTotal, sizeof(total));
    context.expect(total == kNumWriters * kNumRows, "every fetch_add has taken effect once");
    context.expect_ok(end.source->status(), "the ring has no error");
    context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "all have looked");
    end.fabric->driver()->detach(end.source.get());
    end.fabric.reset();  // completions end before the source is destroyed
  });
}

/// Fetches the word shared by all, as `reply`. Returns true if the answer arrives in time.
bool is_answered(const test::HostRing& ring, int rank, std::uint32_t reply, std::uint64_t& value) {
  ring.post({.op = RequestOp::kFetchAdd,
             .peer = static_cast<std::uint32_t>(rank),
             .wants_reply = true,
             .reply = reply,
             .remote_offset = kTotal,
             .value = 1});
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kTimeoutNs);
  while (!ring.writer().has_reply(reply, value)) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(RingSource, ARankThatDoesNotAnswerHoldsUpNoOther) {
  net::LoopbackFaults faults;
  test::run_ranks({.num_ranks = kNumRanks}, [&faults](test::RankContext& context) {
    End end = End::create(context);
    if (end.fabric == nullptr) return;
    constexpr int kStalled = 2;
    constexpr int kOther = 3;
    constexpr std::uint64_t kLast = 50;
    context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "meeting of all ranks");
    if (context.rank() == 0) {
      faults.hold(0, kStalled);
      bool all_answered = true;
      for (std::uint64_t i = 1; i <= kLast && all_answered; ++i) {
        end.ring->post({.op = RequestOp::kSignalSet, .peer = kStalled, .remote_offset = 0, .value = i});
        end.ring->post({.op = RequestOp::kFence, .peer = kStalled});
        std::uint64_t before = 0;
        all_answered = is_answered(*end.ring, kOther, static_cast<std::uint32_t>(i), before) && before == i - 1;
      }
      context.expect(all_answered, "the other rank answers");
      faults.release(0, kStalled);
      if (all_answered) context.expect(end.ring->quiet(), "quiet after the rank continues");
    }
    context.expect_ok(context.bootstrap()->all_gather({}, 2 * kTimeoutNs).status(), "all requests have arrived");
    if (context.rank() == kStalled) {
      std::uint64_t last = 0;
      std::memcpy(&last, end.fabric->heap(), sizeof(last));
      context.expect(last == kLast, "each signal arrives after the fence before it");
    }
    context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "the end");
    end.fabric->driver()->detach(end.source.get());
    end.fabric.reset();
  });
}

/// The caller that asks for the next request keeps the network waiting.
TEST(RingSource, HoweverManyRequestsAreForThisNodeTheNetworkHasItsTurn) {
  constexpr std::uint64_t kNumRequests = 4096;
  test::LoneSource lone({.num_slots = kNumRequests});
  for (std::uint64_t i = 0; i < kNumRequests; ++i) {
    lone.ring.post({.op = RequestOp::kSignalAdd, .peer = 0, .remote_offset = 8, .value = 1});
  }
  EXPECT_EQ(lone.source->front(test::any_peer), nullptr);
  EXPECT_GT(lone.source->num_taken(), 0U);
  EXPECT_LT(lone.source->num_taken(), kNumRequests / 4);
  EXPECT_TRUE(lone.source->has_news());
  for (std::uint64_t i = 0; i < kNumRequests && lone.source->has_news(); ++i) {
    EXPECT_EQ(lone.source->front(test::any_peer), nullptr);
  }
  EXPECT_EQ(*reinterpret_cast<std::uint64_t*>(lone.heap.data() + 8), kNumRequests);
}

TEST(RingSource, AGetOfNothingIsCompleteAndAnswered) {
  test::LoneSource lone({.num_slots = 4});
  RingSource& source = *lone.source;
  test::HostRing& ring = lone.ring;
  ring.post({.op = RequestOp::kGet, .peer = 1, .wants_reply = true, .reply = 7});
  const std::uint64_t quiet = ring.post({.op = RequestOp::kQuiet});
  // The get needs no network request, but the source may want a flush of the peer.
  for (const NetworkRequest* next = source.front(test::any_peer); next != nullptr;
       next = source.front(test::any_peer)) {
    ASSERT_EQ(next->kind, NetworkRequest::Kind::kFlush);
    Completion* const completion = next->completion;
    source.taken();
    completion->done(0);
  }
  std::uint64_t value = 1;
  EXPECT_TRUE(ring.writer().has_reply(7, value));
  EXPECT_EQ(value, 0U);
  EXPECT_GT(ring.writer().completed(), quiet);
}

/// Gets `num_bytes` of a row of `peer` that has other bytes at both ends. Returns the value of the reply.
std::uint64_t answer_of_get(test::LoneSource& lone, std::uint32_t peer, std::uint32_t reply, std::uint64_t num_bytes,
                            bool is_staged) {
  constexpr std::uint64_t kRow = 128;
  for (std::uint64_t b = 0; b < 16; ++b) lone.heap[kRow + b] = static_cast<std::byte>(0xF0 + b);
  const std::uint64_t into = is_staged ? lone.ring.writer().reply_staging_offset(reply) : 0;
  lone.ring.post({.op = RequestOp::kGet,
                  .peer = peer,
                  .wants_reply = true,
                  .reply = reply,
                  .local_offset = into,
                  .remote_offset = kRow,
                  .num_bytes = num_bytes});
  // Copies the bytes as a network would if it is asked.
  for (const NetworkRequest* next = lone.source->front(test::any_peer); next != nullptr;
       next = lone.source->front(test::any_peer)) {
    std::memcpy(next->local, lone.heap.data() + next->offset, next->num_bytes);
    Completion* const completion = next->completion;
    lone.source->taken();
    completion->done(0);
  }
  std::uint64_t value = 1;
  EXPECT_TRUE(lone.ring.writer().has_reply(reply, value)) << num_bytes << " bytes from rank " << peer;
  return value;
}

TEST(RingSource, TheReplyToAGetOfAtMostEightStagedBytesHasThem) {
  test::LoneSource lone({.num_slots = 4});
  std::uint32_t reply = 7;
  for (const std::uint32_t peer : {0U, 1U}) {
    const auto ask = [&lone, &reply, peer](std::uint64_t num_bytes, bool is_staged) {
      return answer_of_get(lone, peer, reply++, num_bytes, is_staged);
    };
    EXPECT_EQ(ask(1, true), 0xF0U);
    EXPECT_EQ(ask(3, true), 0xF2F1F0U);
    EXPECT_EQ(ask(4, true), 0xF3F2F1F0U);
    EXPECT_EQ(ask(8, true), 0xF7F6F5F4F3F2F1F0U);
    // Longer gets, and gets into symmetric memory, leave their bytes at the requested address.
    EXPECT_EQ(ask(9, true), 0U);
    EXPECT_EQ(ask(8, false), 0U);
    EXPECT_EQ(lone.heap[7], std::byte{0xF7});
  }
}

TEST(RingSource, ALostPeerEndsFetchesAndQuietAndNothingElse) {
  test::run_ranks({.num_ranks = kNumRanks}, [](test::RankContext& context) {
    End end = End::create(context);
    if (end.fabric == nullptr) return;
    context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "meeting of all ranks");
    constexpr int kLost = 2;
    constexpr int kOther = 3;
    if (context.rank() == kLost) {
      end.fabric->driver()->detach(end.source.get());
      end.fabric.reset();
    }
    context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "one has left");
    if (context.rank() == 0) {
      std::uint64_t value = 0;
      while (end.fabric->driver()->peer_status(kLost).ok()) std::this_thread::yield();
      const device::Request add{.op = RequestOp::kFetchAdd, .peer = kLost, .remote_offset = kTotal, .value = 1};
      context.expect(!end.ring->fetch(add, value), "no answer from the lost rank");
      context.expect(end.ring->quiet(), "quiet ends");
      context.expect(end.ring->writer().take_loss(), "quiet reports the loss");
      const device::Request put{.op = RequestOp::kPutValue, .peer = kLost, .remote_offset = kTotal, .value = 1};
      const device::Request quiet{.op = RequestOp::kQuietPeer, .peer = kLost};
      end.ring->post(put);
      context.expect(!end.ring->fetch(quiet, value), "a quiet of the lost rank reports the loss");
      context.expect(end.ring->fetch(quiet, value), "the next one has nothing to report");
      context.expect(end.ring->quiet(), "quiet ends");
      context.expect(end.ring->writer().take_loss(), "a quiet of all reports that loss too");
      context.expect_ok(end.fabric->quiet("quiet"), "the host's quiet does not repeat the loss");
      end.ring->post({.op = RequestOp::kFence, .peer = device::kEveryPeer});
      const device::Request other{.op = RequestOp::kFetchAdd, .peer = kOther, .remote_offset = kTotal, .value = 1};
      context.expect(end.ring->fetch(other, value) && value == 0, "the others still answer");
      context.expect(end.ring->quiet() && !end.ring->writer().take_loss(), "quiet between the others reports no loss");
      context.expect_ok(end.fabric->quiet("quiet"), "a fence loses nothing");
    }
    context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "the end");
    if (end.fabric != nullptr) end.fabric->driver()->detach(end.source.get());
    end.fabric.reset();
  });
}

TEST(RingSource, WhatIsLostUnderWayIsToldByTheQuietOfWhoAskedForIt) {
  net::LoopbackFaults faults;
  test::run_ranks({.num_ranks = kNumRanks}, [&faults](test::RankContext& context) {
    constexpr int kLost = 2;
    for (const bool by_kernel : {true, false}) {
      End end = End::create(context);
      if (end.fabric == nullptr) return;
      std::uint64_t source = 1;
      std::uint64_t got = 0;
      context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "meeting of all ranks");
      if (context.rank() == 0) {
        faults.hold(0, kLost);
        if (by_kernel) {
          end.ring->post({.op = RequestOp::kPutValue, .peer = kLost, .remote_offset = 0, .value = 1});
          end.ring->post({.op = RequestOp::kGet, .peer = kLost, .num_bytes = sizeof(got)});
          while (end.source->num_taken() < 2) std::this_thread::yield();
        } else {
          NetworkRequest request{.kind = NetworkRequest::Kind::kPut,
                                 .peer = kLost,
                                 .offset = end.fabric->engine_offset(0),
                                 .local = reinterpret_cast<std::byte*>(&source),
                                 .num_bytes = sizeof(source)};
          context.expect_ok(end.fabric->issue(request, "put"), "put");
          request.kind = NetworkRequest::Kind::kGet;
          request.local = reinterpret_cast<std::byte*>(&got);
          context.expect_ok(end.fabric->issue(request, "get"), "get");
        }
      }
      context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "all requests are under way");
      if (context.rank() == kLost) {
        end.fabric->driver()->detach(end.source.get());
        end.fabric.reset();
      }
      context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "one has left");
      if (context.rank() == 0) {
        faults.release(0, kLost);
        while (end.fabric->driver()->peer_status(kLost).ok()) std::this_thread::yield();
        context.expect(end.ring->quiet(), "quiet ends");
        context.expect(end.ring->writer().take_loss() == by_kernel, "the loss of the kernels' requests");
        context.expect_code(end.fabric->quiet("quiet"), by_kernel ? ErrorCode::kOk : ErrorCode::kPeerLost,
                            "the loss of the calls' requests");
        context.expect(end.ring->quiet() && !end.ring->writer().take_loss(), "the loss is reported once");
        context.expect_ok(end.fabric->quiet("quiet"), "the loss is reported once");
      }
      context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "the end");
      if (end.fabric != nullptr) end.fabric->driver()->detach(end.source.get());
      end.fabric.reset();
    }
  });
}

}  // namespace
}  // namespace ferry::one_sided
