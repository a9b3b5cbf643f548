/// Signals of a rank's watch to its kernels and its peers. The test stands in for the kernels, so no GPU is needed.

#include "cuda/context/peer_watch.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <optional>

#include "call/call_sync.hpp"
#include "core/flight_snapshot.hpp"
#include "cuda/sync/fault_text.hpp"
#include "fault/trap_memory.hpp"
#include "node/futex.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
constexpr int kVictim = 2;
constexpr unsigned kNumSurvivors = kNumRanks - 1;
/// Deadline of the group, which no watch waits for.
constexpr std::int64_t kFarDeadlineNs = 600 * kNsPerSecond;
constexpr std::int64_t kSoonNs = kNsPerSecond;

/// A rank of a CUDA group without the GPU.
class WatchedRank {
 public:
  explicit WatchedRank(RankContext& context, int num_nodes = 1, bool masks = false) {
    BackendContext backend;
    bootstrap_ = context.bootstrap();
    backend.bootstrap = bootstrap_.get();
    backend.topology = {context.rank(), context.num_ranks(), context.num_ranks() / num_nodes};
    backend.options.transport = "loopback";
    backend.options.arena_bytes = std::size_t{1} << 20;
    backend.options.timeout_ns = kFarDeadlineNs;
    sync_ = std::move(call::CallSync::create(backend)).value();
    calls_ = cuda::CallLog::create(sync_->peers()).value();
    calls_->append(record_of(Operation::kRoute));
    calls_->append(record_of(context.rank() == kVictim ? Operation::kLatencyCombine : Operation::kLatencyDispatch));
    watch_ = std::make_unique<cuda::PeerWatch>(sync_->state(), *report_, *calls_);
    if (masks) watch_->tell_lost_ranks();
    throw_if_error(watch_->start());
    throw_if_error(bootstrap_->all_gather({}, kNsPerSecond * 20).status());
  }

  call::GroupState& group() { return sync_->state(); }
  const cuda::CallLog& calls() const { return *calls_; }
  const Topology& topology() const { return sync_->topology(); }

  /// Writes the report that a kernel's wait writes when it ends.
  void end_wait(bool stopped) {
    report_->lost.peer = kVictim;
    report_->lost.stopped = stopped ? 1 : 0;
    __atomic_store_n(&report_->lost.state, 1, __ATOMIC_RELEASE);
  }
  /// Shows a wait for the victim's rows, as a kernel does that has waited until `now_ns`.
  void show_kernel_wait(std::int64_t now_ns) {
    __atomic_store_n(report_->waiting.words + kVictim,
                     cuda::WaitingWords::word_of(cuda::Awaited::kRows, static_cast<std::uint64_t>(now_ns)),
                     __ATOMIC_RELAXED);
  }
  /// Status that this rank's next call returns after the report.
  Status next_call() {
    return sync_->give_up_on(report_->lost.peer,
                             cuda::describe_lost(report_->lost, sync_->topology(), kFarDeadlineNs, &*calls_));
  }

  bool is_stopped() const { return __atomic_load_n(&report_->stop.requested, __ATOMIC_ACQUIRE) != 0; }
  bool is_told_lost(int rank) const { return __atomic_load_n(&report_->lost_ranks.lost[rank], __ATOMIC_ACQUIRE) != 0; }
  /// Returns true if the kernels are stopped within kSoonNs.
  bool await_stop() const {
    return await([this] { return is_stopped(); });
  }
  static bool await(const std::function<bool()>& there) {
    const std::int64_t deadline_ns = node::monotonic_ns() + kSoonNs;
    while (!there() && node::monotonic_ns() < deadline_ns) sched_yield();
    return there();
  }

 private:
  static CallRecord record_of(Operation operation) {
    CallRecord record;
    record.operation = operation;
    return record;
  }

  std::shared_ptr<Bootstrap> bootstrap_;
  std::unique_ptr<cuda::DeviceReport> report_ = std::make_unique<cuda::DeviceReport>();
  std::unique_ptr<call::CallSync> sync_;
  std::optional<cuda::CallLog> calls_;
  std::unique_ptr<cuda::PeerWatch> watch_;
};

void expect_loss(RankContext& context, const Status& status, std::string_view loss) {
  context.expect_code(status, ErrorCode::kPeerLost, "the call");
  context.expect(status.peer() == kVictim, status.to_string());
  // The rank that saw the loss first may follow.
  context.expect(
      status.message().starts_with(fmt::format("a call on the GPU was stopped while it waited for other ranks; rank {} "
                                               "{}; rank {} has made no call",
                                               kVictim, loss, kVictim)),
      status.to_string());
  context.expect(status.message().find("; destroy this group and create a new one from the surviving ranks") !=
                     std::string_view::npos,
                 status.to_string());
}

TEST(PeerWatch, ShowsWhatKernelsWaitForWhileTheyDo) {
  std::latch done(kNumRanks);
  run_ranks({.kind = RankKind::kThreads, .num_ranks = kNumRanks}, [&done](RankContext& context) {
    WatchedRank rank(context);
    const auto waits = [&rank] { return take_snapshot(rank.group().peers().flight_of(0)).waits; };
    if (context.rank() == 0) {
      rank.show_kernel_wait(node::monotonic_ns());
      context.expect(WatchedRank::await([&] { return !waits().empty(); }), "the wait is shown");
      const std::vector<RecordedWait> seen = waits();
      context.expect(seen.size() == 1 && seen[0].on_gpu && seen[0].ranks == std::vector{kVictim} &&
                         seen[0].reason == "to send its rows",
                     "the rank and the reason");
      // The word no longer changes.
      context.expect(WatchedRank::await([&] { return waits().empty(); }), "the wait is over");
    }
    done.arrive_and_wait();
  });
}

TEST(PeerWatch, AKilledProcessStopsTheKernelsOfAllOthersWhoSayTheSame) {
  SharedWords* const words = make_shared_words();
  const std::vector<std::string> failures =
      collect_rank_failures({.kind = RankKind::kProcesses, .num_ranks = kNumRanks}, [words](RankContext& context) {
        WatchedRank rank(context);
        if (context.rank() == kVictim) {
          (void)kill(getpid(), SIGKILL);
          return;
        }
        context.expect(rank.await_stop(), "the kernels were not stopped");
        rank.end_wait(true);
        expect_loss(context, rank.next_call(), "has died");
        report_survivor_done(words);
        wait_for_survivors(words, kNumSurvivors);
      });
  EXPECT_EQ(failures, std::vector<std::string>{fmt::format("rank {}: died of signal 9", kVictim)});
}

class PeerWatchOfRanks : public testing::TestWithParam<RankKind> {};

TEST_P(PeerWatchOfRanks, ARankThatLeavesStopsTheKernelsOfAllOthers) {
  SharedWords* const words = make_shared_words();
  run_ranks({.kind = GetParam(), .num_ranks = kNumRanks}, [words](RankContext& context) {
    auto rank = std::make_unique<WatchedRank>(context);
    if (context.rank() == kVictim) {
      rank.reset();
    } else {
      context.expect(rank->await_stop(), "the kernels were not stopped");
      rank->end_wait(true);
      expect_loss(context, rank->next_call(), "has destroyed its group");
      report_survivor_done(words);
    }
    wait_for_survivors(words, kNumSurvivors);
  });
}

/// Rank 0 makes no call after its kernel has timed out: its watch reports the loss to the others.
TEST_P(PeerWatchOfRanks, ADeadlineOfOneRankStopsTheKernelsOfAllWhoSayTheSame) {
  SharedWords* const words = make_shared_words();
  run_ranks({.kind = GetParam(), .num_ranks = kNumRanks}, [words](RankContext& context) {
    WatchedRank rank(context);
    if (context.rank() == 0) {
      context.expect(!rank.is_stopped(), "stopped before anything happened");
      rank.end_wait(false);
    }
    context.expect(rank.await_stop(), "the kernels were not stopped");
    if (context.rank() != 0) {
      rank.end_wait(true);
      report_survivor_done(words);
    }
    wait_for_survivors(words, kNumRanks - 1);
    const Status status = rank.next_call();
    context.expect_code(status, ErrorCode::kTimeout, "the call");
    context.expect(status.peer() == kVictim, status.to_string());
    context.expect(status.message().find("timed out after 600000 ms waiting for rank 2") != std::string_view::npos,
                   status.to_string());
    context.expect(status.message().find("; rank 0 called latency_dispatch where rank 2 called latency_combine; ") !=
                       std::string_view::npos,
                   status.to_string());
    const std::string_view note = context.rank() == 0         ? ""
                                  : context.rank() == kVictim ? "gave up on this rank"
                                                              : "(reported by rank 0)";
    context.expect(status.message().find(note) != std::string_view::npos, status.to_string());
    context.expect(context.rank() != 0 || !status.message().ends_with(')'), status.to_string());
    report_survivor_done(words);
    wait_for_survivors(words, 2 * kNumRanks - 1);  // no rank leaves while others still look
  });
}

TEST_P(PeerWatchOfRanks, AnErrorOfOneRanksOwnStopsItsKernelsAndThoseOfTheOthers) {
  SharedWords* const words = make_shared_words();
  run_ranks({.kind = GetParam(), .num_ranks = kNumRanks}, [words](RankContext& context) {
    WatchedRank rank(context);
    if (context.rank() == 1) (void)rank.group().fail(ErrorCode::kCuda, 1, "dispatch: launching failed");
    context.expect(rank.await_stop(), "the kernels were not stopped");
    rank.end_wait(true);
    context.expect_code(rank.next_call(), ErrorCode::kCuda, "the call");
    report_survivor_done(words);
    wait_for_survivors(words, kNumRanks);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PeerWatchOfRanks, testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& test) { return test.param == RankKind::kThreads ? "threads" : "processes"; });

/// Calls of a masked rank are not compared with the calls of the other ranks.
TEST(FaultText, OfARefusedCallIsFoundWithoutMaskedRanks) {
  run_ranks({.kind = RankKind::kThreads, .num_ranks = kNumRanks}, [](RankContext& context) {
    const WatchedRank rank(context);
    cuda::FaultReport fault{};
    fault.fault = static_cast<std::int32_t>(cuda::Fault::kDisagreement);
    for (int peer = 0; peer < kNumRanks; ++peer) fault.record_numbers[peer] = 2;  // the victim makes another call
    const auto describe = [&] {
      return cuda::describe_fault(fault, {rank.calls(), nullptr, rank.topology()}, "wait").to_string();
    };
    context.expect(describe().find("ranks made different calls: rank 0 called") != std::string::npos, describe());
    fault.record_numbers[kVictim] = cuda::kMaskedRecord;
    context.expect(describe().find("the details have been overwritten") != std::string::npos, describe());
    context.expect(describe().find("called") == std::string::npos, describe());
    throw_if_error(context.bootstrap()->all_gather({}, kNsPerSecond * 20).status());
  });
}

/// A combine on a Routing whose dispatch another rank refused reports only that refusal.
TEST(FaultText, OfALaterCallOnARefusedRoutingSaysWhereTheReasonWasTold) {
  run_ranks({.kind = RankKind::kThreads, .num_ranks = 2}, [](RankContext& context) {
    const WatchedRank rank(context);
    cuda::FaultReport fault{};
    fault.fault = static_cast<std::int32_t>(cuda::Fault::kDisagreement);
    fault.record_numbers[0] = fault.record_numbers[1] = -1;
    const Status repeated = cuda::describe_fault(fault, {rank.calls(), nullptr, rank.topology()}, "wait");
    context.expect_code(repeated, ErrorCode::kInvalidArgument, "a repeated refusal");
    context.expect(repeated.message().starts_with("wait: the call that made the Routing was refused"),
                   repeated.to_string());
    fault.record_numbers[0] = 1;
    const Status lost = cuda::describe_fault(fault, {rank.calls(), nullptr, rank.topology()}, "wait");
    context.expect(lost.message().find("the details have been overwritten") != std::string_view::npos,
                   lost.to_string());
    throw_if_error(context.bootstrap()->all_gather({}, kNsPerSecond * 20).status());
  });
}

/// One rank dies, and another reports an error: calls that mask lost ranks exclude both.
TEST(PeerWatch, KernelsThatMaskLostRanksAreToldWhich) {
  constexpr int kGivesUp = 3;
  SharedWords* const words = make_shared_words();
  const std::vector<std::string> failures =
      collect_rank_failures({.kind = RankKind::kProcesses, .num_ranks = kNumRanks}, [words](RankContext& context) {
        WatchedRank rank(context, 1, true);
        if (context.rank() == kVictim) {
          (void)kill(getpid(), SIGKILL);
          return;
        }
        if (context.rank() == kGivesUp) {
          (void)rank.group().fail(ErrorCode::kCuda, kGivesUp, "dispatch: launching failed");
        } else {
          context.expect(
              WatchedRank::await([&rank] { return rank.is_told_lost(kVictim) && rank.is_told_lost(kGivesUp); }),
              "the kernels did not learn of the lost ranks");
          context.expect(!rank.is_told_lost(0) && !rank.is_told_lost(1), "a live rank is reported lost");
        }
        report_survivor_done(words);
        wait_for_survivors(words, kNumSurvivors);
      });
  EXPECT_EQ(failures, std::vector<std::string>{fmt::format("rank {}: died of signal 9", kVictim)});
}

/// Two nodes: rank 1 exchanges nothing with rank 2, rank 3 nothing with rank 0.
TEST(PeerWatchOverNodes, ARankThatLeavesStopsTheKernelsOfAllOthers) {
  SharedWords* const words = make_shared_words();
  run_ranks({.kind = RankKind::kThreads, .num_ranks = kNumRanks}, [words](RankContext& context) {
    auto rank = std::make_unique<WatchedRank>(context, 2);
    if (context.rank() == kVictim) {
      rank.reset();
    } else {
      context.expect(rank->await_stop(), "the kernels were not stopped");
      rank->end_wait(true);
      const Status status = rank->next_call();
      context.expect_code(status, ErrorCode::kPeerLost, "the call");
      context.expect(status.peer() == kVictim, status.to_string());
      report_survivor_done(words);
    }
    wait_for_survivors(words, kNumSurvivors);
  });
}

TEST(PeerWatchOverNodes, AnErrorOfOneRankReachesRanksWhoseNeighboursMakeNoCall) {
  SharedWords* const words = make_shared_words();
  run_ranks({.kind = RankKind::kThreads, .num_ranks = kNumRanks}, [words](RankContext& context) {
    WatchedRank rank(context, 2);
    if (context.rank() == 0) (void)rank.group().fail(ErrorCode::kCuda, 0, "dispatch: launching failed");
    context.expect(rank.await_stop(), "the kernels were not stopped");
    report_survivor_done(words);
    wait_for_survivors(words, kNumRanks);
    const Status status = rank.next_call();
    context.expect_code(status, ErrorCode::kCuda, "the call");
    context.expect(status.peer() == 0, status.to_string());
    report_survivor_done(words);
    wait_for_survivors(words, 2 * kNumRanks);
  });
}

/// Two threads of a rank find an error at once: the rank reports the same error to its caller and to its peers.
TEST(PeerWatch, TheRanksOwnCallTakesOverWhatItsWatchHasReported) {
  run_ranks({.kind = RankKind::kThreads, .num_ranks = 2}, [](RankContext& context) {
    WatchedRank rank(context);
    if (context.rank() == 0) rank.group().report_lost(1, "the watch's words");
    context.expect(rank.await_stop(), "the kernels were not stopped");
    const Status status = context.rank() == 0 ? rank.group().fail(ErrorCode::kCuda, 0, "the caller's words")
                                              : rank.group().give_up_on(0, "a wait");
    context.expect_code(status, ErrorCode::kTimeout, "the call");
    context.expect(status.message().find("the watch's words") == 0, status.to_string());
    throw_if_error(context.bootstrap()->all_gather({}, kNsPerSecond * 20).status());
  });
}

}  // namespace
}  // namespace ferry::test
