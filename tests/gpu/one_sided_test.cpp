/// The one-sided layer on GPUs: host calls on streams, and kernels of the program. Several ranks share a GPU if there
/// are too few; nodes are emulated on one host.

#include "ferry/one_sided.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "ferry/device/world.hpp"
#include "gpu/gpu_group.hpp"
#include "gpu/on_device.hpp"
#include "gpu/one_sided_case.hpp"
#include "gpu/one_sided_kernels.hpp"
#include "support/device_memory.hpp"

namespace ferry::test {
namespace {

class GpuOneSided : public OneSidedOnGpus {};

TEST_P(GpuOneSided, CallsOfTheHostFollowTheirStream) {
  run([](RankContext& context, OneSided& shm) {
    const OwnedStream owned;
    const Stream stream = owned.get();
    warm_up(context, shm, stream);
    const int next = (shm.rank() + 1) % shm.num_ranks();
    const int before = (shm.rank() + shm.num_ranks() - 1) % shm.num_ranks();
    auto words = shm.allocate<std::uint64_t>(4);
    if (!context.expect_ok(words.status(), "allocate")) return;
    std::uint64_t round = 0;
    for (const std::size_t num_words : {1U, 3U, 1000U, 300'000U}) {
      ++round;
      auto row = shm.allocate<std::uint64_t>(num_words);
      if (!context.expect_ok(row.status(), "allocate")) return;
      std::vector<std::uint64_t> mine(num_words);
      std::iota(mine.begin(), mine.end(), static_cast<std::uint64_t>(shm.rank()) * 1'000'000);
      const OnDevice<std::uint64_t> source(mine);
      const OnDevice<std::uint64_t> fetched(std::vector<std::uint64_t>(num_words + 1));
      auto* const landing = static_cast<std::uint64_t*>(fetched.data());
      const std::size_t num_bytes = num_words * sizeof(std::uint64_t);
      const std::string name = fmt::format("{} words: ", num_words);
      context.expect_ok(
          shm.put_signal(next, row->data(), source.data(), num_bytes, words->data(), round, SignalOp::kSet, stream),
          name + "put_signal");
      context.expect_ok(shm.wait_until(words->data(), Comparison::kEqual, round, stream), name + "wait_until");
      context.expect_ok(shm.quiet(stream), name + "quiet");
      // Gets back the data that was put: the row of the next rank is the one that this rank sent.
      context.expect_ok(shm.get(next, landing, row->data(), num_bytes, stream), name + "get");
      context.expect_ok(shm.fetch_add(0, words->data() + 1, 1, landing + num_words, stream), name + "fetch_add");
      context.expect_ok(shm.barrier(stream), name + "barrier");
      if (!context.expect_ok(finish(shm, stream), name + "all of it")) return;
      std::vector<std::uint64_t> got(num_words + 1);
      fetched.read(got);
      context.expect(std::equal(mine.begin(), mine.end(), got.begin()), name + "get returns the data of put");
      std::vector<std::uint64_t> received(num_words);
      copy_from_device(received.data(), row->data(), num_bytes);
      std::iota(mine.begin(), mine.end(), static_cast<std::uint64_t>(before) * 1'000'000);
      context.expect(received == mine, name + "the row of the previous rank has arrived");
      context.expect_ok(shm.free(row->data()), "free");
    }
    const Result<std::uint64_t> total = shm.fetch_add(0, words->data() + 1, 0);
    context.expect_ok(total.status(), "fetch_add on the host");
    context.expect(total.ok() && *total == 4 * static_cast<std::uint64_t>(shm.num_ranks()), "each rank added four");
    const Result<bool> holds = shm.test(words->data(), Comparison::kEqual, round);
    context.expect(holds.ok() && *holds, "test sees the last signal");
    // No rank may be ahead by a barrier while others still read.
    context.expect_ok(shm.barrier(stream), "barrier");
    context.expect_ok(finish(shm, stream), "the end");
  });
}

TEST_P(GpuOneSided, KernelsOfEveryScopeHandOnRows) {
  run([](RankContext& context, OneSided& shm) {
    const OwnedStream owned;
    const Stream stream = owned.get();
    warm_up(context, shm, stream);
    auto world = shm.device_world();
    if (!context.expect_ok(world.status(), "device_world")) return;
    for (const CallScope scope : {CallScope::kThread, CallScope::kWarp, CallScope::kBlock}) {
      for (const std::uint64_t num_bytes : {std::uint64_t{8}, std::uint64_t{100}, std::uint64_t{50'000}}) {
        auto row = shm.allocate<std::byte>(2 * num_bytes);
        auto mine = shm.allocate<std::byte>(2 * num_bytes);
        auto words = shm.allocate<std::uint64_t>(2);
        if (!context.expect_ok(words.status(), "allocate")) return;
        const DeviceMemory plain(2 * num_bytes);
        const bool nbi = num_bytes == 100;
        const ErrorCount num_errors;
        launch_hand_on({.world = *world,
                        .scope = scope,
                        .nbi = nbi,
                        .row = row->data(),
                        .mine = nbi ? mine->data() : plain.data(),
                        .num_bytes = num_bytes,
                        .came = words->data(),
                        .used = words->data() + 1,
                        .num_rounds = num_bytes > 1000 ? 6 : 300,
                        .num_errors = num_errors.data()},
                       stream);
        const std::string name = fmt::format("scope {}, {} bytes", static_cast<int>(scope), num_bytes);
        context.expect_ok(finish(shm, stream), name);
        context.expect(num_errors.read() == 0, name + ": every row arrives before its signal");
        for (void* block :
             {static_cast<void*>(row->data()), static_cast<void*>(mine->data()), static_cast<void*>(words->data())}) {
          context.expect_ok(shm.free(block), "free");
        }
      }
    }
  });
}

TEST_P(GpuOneSided, QuietForbidsStoreBufferingAtEveryScope) {
  run([](RankContext& context, OneSided& shm) {
    const OwnedStream owned;
    const Stream stream = owned.get();
    warm_up(context, shm, stream);
    constexpr std::size_t kRounds = 100;
    auto world = shm.device_world();
    auto team = shm.device_team(shm.world());
    if (!context.expect_ok(team.status(), "device_team")) return;
    for (const CallScope scope : {CallScope::kThread, CallScope::kWarp, CallScope::kBlock}) {
      auto cells = shm.allocate<std::uint64_t>(2 * kRounds);
      auto seen = shm.allocate<std::uint64_t>(2 * kRounds);
      auto room = shm.allocate<std::uint64_t>(1);
      if (!context.expect_ok(room.status(), "allocate")) return;
      const OnDevice<std::uint64_t> got(std::vector<std::uint64_t>(1));
      const ErrorCount num_errors;
      launch_buffer({.world = *world,
                     .team = *team,
                     .scope = scope,
                     .cells = cells->data(),
                     .seen = seen->data(),
                     .room = room->data(),
                     .got = static_cast<std::uint64_t*>(got.data()),
                     .num_rounds = static_cast<int>(kRounds),
                     .num_errors = num_errors.data()},
                    stream);
      const std::string name = fmt::format("scope {}", static_cast<int>(scope));
      context.expect_ok(finish(shm, stream), name);
      context.expect(num_errors.read() == 0, name + ": calls, and the reserved room");
      meet(context);
      if (shm.rank() == 0) {
        std::vector<std::uint64_t> both(2 * kRounds);
        copy_from_device(both.data(), seen->data(), both.size() * sizeof(both[0]));
        for (std::size_t round = 0; round < kRounds; ++round) {
          context.expect(both[2 * round] + both[2 * round + 1] >= 3, name + ": one of the two sees the other's");
        }
      }
    }
    meet(context);
  });
}

TEST_P(GpuOneSided, ManyThreadsCountExactly) {
  run([](RankContext& context, OneSided& shm) {
    const OwnedStream owned;
    const Stream stream = owned.get();
    warm_up(context, shm, stream);
    auto world = shm.device_world();
    auto words = shm.allocate<std::uint64_t>(3);
    if (!context.expect_ok(world.status(), "device_world") || !context.expect_ok(words.status(), "allocate")) return;
    // More requests than the ring has room for.
    constexpr unsigned kNumBlocks = 4;
    constexpr unsigned kNumThreads = 96;
    constexpr int kNumRounds = 5;
    const ErrorCount num_errors;
    launch_count({.world = *world,
                  .word = words->data(),
                  .signal = words->data() + 1,
                  .lock = words->data() + 2,
                  .num_blocks = kNumBlocks,
                  .num_threads = kNumThreads,
                  .num_rounds = kNumRounds,
                  .num_errors = num_errors.data()},
                 stream);
    context.expect_ok(shm.barrier(stream), "barrier");
    context.expect_ok(finish(shm, stream), "counting");
    context.expect(num_errors.read() == 0, "no call failed");
    const std::uint64_t expected =
        static_cast<std::uint64_t>(shm.num_ranks()) * kNumBlocks * kNumThreads * static_cast<std::uint64_t>(kNumRounds);
    std::vector<std::uint64_t> seen(3);
    copy_from_device(seen.data(), words->data(), seen.size() * sizeof(std::uint64_t));
    if (shm.rank() == 0) {
      context.expect(seen[0] == expected, fmt::format("{} counted, expected {}", seen[0], expected));
      context.expect(seen[2] == 7, "a thread took the lock");
    }
    if (shm.rank() == shm.num_ranks() - 1) context.expect(seen[1] == expected, "every signal arrived once");
    meet(context);
  });
}

TEST_P(GpuOneSided, GraphsReplayBarriersAndGets) {
  run([](RankContext& context, OneSided& shm) {
    const OwnedStream owned;
    const Stream stream = owned.get();
    warm_up(context, shm, stream);
    constexpr std::uint64_t kNumWords = 500;
    auto world = shm.device_world();
    // Each rank has been in a different number of teams, so it has the words of this team at a different place.
    Result<Team> all = shm.split(shm.world(), shm.rank());
    const Team alone = all.ok() ? *all : Team();
    for (int i = 0; i < shm.rank() && all.ok(); ++i) all = shm.split(alone, 0);
    if (all.ok()) all = shm.split(shm.world(), 0);
    if (!context.expect_ok(all.status(), "split")) return;
    auto team = shm.device_team(*all);
    auto row = shm.allocate<std::uint64_t>(kNumWords);
    auto flag = shm.allocate<std::uint64_t>(1);
    if (!context.expect_ok(team.status(), "device_team") || !context.expect_ok(flag.status(), "allocate")) return;
    const OnDevice<std::uint64_t> into(std::vector<std::uint64_t>(kNumWords + 1));
    const OnDevice<std::uint64_t> value(std::vector<std::uint64_t>(1));
    const ErrorCount num_errors;
    auto* const fetched = static_cast<std::uint64_t*>(into.data()) + kNumWords;
    const GatherParams params{.world = *world,
                              .team = *team,
                              .row = row->data(),
                              .into = static_cast<std::uint64_t*>(into.data()),
                              .num_words = kNumWords,
                              .value = static_cast<const std::uint64_t*>(value.data()),
                              .num_rounds = 3,
                              .num_errors = num_errors.data()};
    CapturedGraph graph;
    graph.begin(stream);
    launch_gather(params, stream);
    context.expect_ok(shm.fetch_add(0, flag->data(), 1, fetched, stream), "fetch_add, captured");
    context.expect_ok(shm.barrier(stream), "barrier, captured");
    graph.end();
    graph.prepare();
    for (std::uint64_t replay = 1; replay <= 3; ++replay) {
      copy_to_device(value.data(), &replay, sizeof(replay));
      meet(context);
      graph.launch();
      if (!context.expect_ok(finish(shm, stream), fmt::format("replay {}", replay))) return;
      context.expect(num_errors.read() == 0, "every get returns this replay's data");
    }
    const Result<std::uint64_t> total = shm.fetch_add(0, flag->data(), 0);
    context.expect(total.ok() && *total == 3 * static_cast<std::uint64_t>(shm.num_ranks()), "each replay added one");
    meet(context);
  });
}

TEST_P(GpuOneSided, ErrorsOfKernelsReachTheHostAndLeaveTheRestUsable) {
  run([](RankContext& context, OneSided& shm) {
    const OwnedStream owned;
    const Stream stream = owned.get();
    warm_up(context, shm, stream);
    auto world = shm.device_world();
    auto words = shm.allocate<std::uint64_t>(1);
    if (!context.expect_ok(world.status(), "device_world") || !context.expect_ok(words.status(), "allocate")) return;
    constexpr std::int64_t kShortNs = 50'000'000;
    context.expect_ok(shm.wait_until(words->data(), Comparison::kEqual, 1, stream, kShortNs), "wait_until, launched");
    context.expect_code(finish(shm, stream), ErrorCode::kTimeout, "wait_until, afterwards");
    const ErrorCount num_errors;
    launch_bad_put(*world, num_errors.data(), stream);
    context.expect_code(finish(shm, stream), ErrorCode::kInvalidArgument, "a put outside of symmetric memory");
    context.expect(num_errors.read() == 0, "the kernel got the error as well");
    context.expect_ok(shm.signal(shm.rank(), words->data(), 1, SignalOp::kSet, stream), "signal");
    context.expect_ok(shm.wait_until(words->data(), Comparison::kEqual, 1, stream, kShortNs), "wait_until");
    context.expect_ok(shm.barrier(stream), "barrier");
    context.expect_ok(finish(shm, stream), "everything works again");
  });
}

TEST_P(GpuOneSided, ALostRankEndsWaits) {
  run_gpu_ranks({GetParam().kind, GetParam().num_ranks}, [&](RankContext& context) {
    auto shm = OneSided::create(context.bootstrap(), options_of(GetParam()));
    if (!context.expect_ok(shm.status(), "OneSided::create")) return;
    auto words = (*shm)->allocate<std::uint64_t>(1);
    if (!context.expect_ok(words.status(), "allocate")) return;
    const OwnedStream stream;
    warm_up(context, **shm, stream.get());
    if (context.rank() == 1) {
      shm->reset();
    } else {
      context.expect_ok((*shm)->wait_until(words->data(), Comparison::kEqual, 1, stream.get()), "wait_until, launched");
      context.expect_code(finish(**shm, stream.get()), ErrorCode::kPeerLost, "wait_until, afterwards");
    }
    meet(context);
  });
}

TEST_P(GpuOneSided, ALossIsToldOnce) {
  if (GetParam().num_ranks == GetParam().ranks_per_node) GTEST_SKIP() << "a rank of this node gets no requests";
  run_gpu_ranks({GetParam().kind, GetParam().num_ranks}, [&](RankContext& context) {
    auto shm = OneSided::create(context.bootstrap(), options_of(GetParam()));
    if (!context.expect_ok(shm.status(), "OneSided::create")) return;
    const int lost = (*shm)->num_ranks() - 1;
    auto words = (*shm)->allocate<std::uint64_t>(2);
    auto others = (*shm)->split((*shm)->world(), context.rank() == lost ? 1 : 0);
    if (!context.expect_ok(words.status(), "allocate") || !context.expect_ok(others.status(), "split")) return;
    const OwnedStream stream;
    warm_up(context, **shm, stream.get());
    if (context.rank() == lost) shm->reset();
    meet(context);
    if (context.rank() == 0) {
      // From symmetric memory: no kernel of the call waits for it.
      context.expect_ok((*shm)->put_nbi(lost, words->data(), words->data() + 1, sizeof(std::uint64_t), stream.get()),
                        "put_nbi");
      context.expect_ok((*shm)->quiet(stream.get()), "quiet, launched");
      context.expect_code(finish(**shm, stream.get()), ErrorCode::kPeerLost, "quiet, afterwards");
    }
    if (context.rank() != lost) {
      context.expect_ok((*shm)->split(*others, 0).status(), "the first call of the other ranks after that");
    }
    meet(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, GpuOneSided,
                         testing::Values(OneSidedShape{2, 2}, OneSidedShape{4, 4}, OneSidedShape{2, 1},
                                         OneSidedShape{4, 2}),
                         [](const testing::TestParamInfo<OneSidedShape>& shape) { return describe(shape.param); });
INSTANTIATE_TEST_SUITE_P(Processes, GpuOneSided,
                         testing::Values(OneSidedShape{2, 2, RankKind::kProcesses, "ucx"},
                                         OneSidedShape{2, 1, RankKind::kProcesses, "ucx"}),
                         [](const testing::TestParamInfo<OneSidedShape>& shape) { return describe(shape.param); });

}  // namespace
}  // namespace ferry::test
