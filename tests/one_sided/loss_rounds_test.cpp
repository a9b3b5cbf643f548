// Rounds in which one rank of a group leaves, is killed or is stopped while the others are in a call: every survivor
// that needs it names it, with the same error, and the others are not disturbed. FERRY_LOSS_ROUNDS sets the number of
// rounds of each kind of loss; the first of them are the same on every run.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "node/futex.hpp"
#include "one_sided/world.hpp"

namespace ferry::test {
namespace {

constexpr int kMaxRanks = 8;
constexpr int kDefaultRounds = 8;
/// Survivors of a rank that leaves or dies need milliseconds; more than half of this deadline means that one waited for
/// its end.
constexpr std::int64_t kLongNs = 30 * kNsPerSecond;
/// Every survivor of a stopped rank waits for the whole deadline. Long enough to create a OneSided on a busy host.
constexpr std::int64_t kStoppedNs = 5 * kNsPerSecond;

enum class Loss { kLeaves, kIsKilled, kIsStopped };
enum class Call { kBarrier, kTeamBarrier, kAllocate, kFree, kSplit, kQuiet, kWaitUntil };
constexpr std::array kCalls{Call::kBarrier, Call::kTeamBarrier, Call::kAllocate, Call::kFree,
                            Call::kSplit,   Call::kQuiet,       Call::kWaitUntil};

std::string_view name_of(Call call) {
  constexpr std::array<std::string_view, kCalls.size()> kNames{
      "barrier", "barrier of a team", "allocate", "free", "split", "quiet", "wait_until"};
  return kNames[static_cast<std::size_t>(call)];
}

struct Shape {
  int num_nodes = 1;
  int ranks_per_node = 1;
  int num_ranks() const { return num_nodes * ranks_per_node; }
};

std::vector<Shape> shapes() {
  std::vector<Shape> all{{1, 3}, {1, 4}, {1, 5}, {1, 8}};
#if defined(FERRY_TESTS_WITH_UCX)
  all.insert(all.end(), {{2, 2}, {3, 1}, {2, 3}, {3, 2}, {2, 4}});
#endif
  return all;
}

struct Round {
  Shape shape{};
  Loss loss = Loss::kLeaves;
  Call call = Call::kBarrier;
  int victim = 0;
  /// The victim is in the call itself when it is killed or stopped, and the rank before it enters afterwards. Then no
  /// rank can finish the call, except for a barrier, which the victim has entered.
  bool inside = false;
  /// Survivors leave as soon as their call has failed, instead of staying until all calls have.
  bool leave_at_once = false;

  std::int64_t deadline_ns() const { return loss == Loss::kIsStopped ? kStoppedNs : kLongNs; }
  bool is_near(int rank) const { return rank / shape.ranks_per_node == victim / shape.ranks_per_node; }
  /// Whether the call of the rank needs the victim.
  bool needs_victim(int rank) const {
    if (call == Call::kTeamBarrier) return rank % 2 == victim % 2;
    return call != Call::kQuiet || !is_near(rank);
  }
  std::string text() const {
    return fmt::format("{} nodes of {}, {}, rank {}{}{}", shape.num_nodes, shape.ranks_per_node, name_of(call), victim,
                       inside ? ", inside" : "", leave_at_once ? ", survivors leave" : "");
  }
};

Round draw(Loss loss, int number) {
  std::mt19937 random(static_cast<unsigned>(number * 3 + static_cast<int>(loss)));
  const auto below = [&random](std::size_t end) { return static_cast<std::size_t>(random() % end); };
  const std::vector<Shape> all = shapes();
  Round round{.shape = all[below(all.size())], .loss = loss};
  // Each call in turn.
  round.call = kCalls[static_cast<std::size_t>(number) % kCalls.size()];
  if (round.call == Call::kQuiet && round.shape.num_nodes == 1) round.shape = all.back();
  round.victim = static_cast<int>(below(static_cast<std::size_t>(round.shape.num_ranks())));
  const bool meets = round.call == Call::kBarrier || round.call == Call::kAllocate || round.call == Call::kFree ||
                     round.call == Call::kSplit;
  round.inside = meets && loss != Loss::kLeaves && below(2) == 0;
  // Any rank that leaves ends wait_until, also one that left at its own deadline.
  const bool ends_others = loss == Loss::kIsStopped && round.call == Call::kWaitUntil;
  round.leave_at_once = below(2) == 0 && !ends_others;
  return round;
}

/// End of a survivor's call.
struct End {
  bool returned = false;
  ErrorCode code = ErrorCode::kOk;
  int peer = -1;
  std::int64_t at_ns = 0;
  std::array<char, 512> message{};
};

/// Memory that all processes of a round share.
struct Board {
  std::atomic<int> num_entered{0};
  std::atomic<std::int64_t> lost_ns{0};
  std::atomic<int> num_ended{0};
  std::array<End, kMaxRanks> ends{};
  std::atomic<std::uint32_t> num_changes{0};

  void enter() {
    num_entered.fetch_add(1);
    changed();
  }
  void changed() {
    num_changes.fetch_add(1);
    node::futex_wake_all(num_changes);
  }
  void wait_until(const std::function<bool()>& holds) const {
    while (true) {
      const std::uint32_t seen = num_changes.load();
      if (holds()) return;
      node::futex_wait(num_changes, seen, kNsPerSecond);
    }
  }
};

class SharedBoard {
 public:
  SharedBoard()
      : board_(new (mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board()) {}
  ~SharedBoard() { munmap(board_, sizeof(Board)); }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  Board* operator->() const { return board_; }
  Board& operator*() const { return *board_; }

 private:
  Board* board_;
};

/// True if the process is stopped or dead.
bool is_out(pid_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string text;
  std::getline(file, text);
  // The name, in brackets, may hold anything.
  const std::size_t end = text.rfind(')');
  return end == std::string::npos || end + 2 >= text.size() ||
         std::string_view("TZX").find(text[end + 2]) != std::string_view::npos;
}

/// Arguments of the calls of a round. The source of puts outlives the OneSided.
struct Scene {
  std::vector<std::uint64_t> source = std::vector<std::uint64_t>(4096, 7);
  std::span<std::uint64_t> words;
  void* block = nullptr;
  Team team;
};

bool prepare(RankContext& context, OneSided& shm, Scene& scene) {
  scene.words = block<std::uint64_t>(context, shm, scene.source.size());
  const Result<void*> made = shm.allocate(64);
  const Result<Team> team = shm.split(shm.world(), context.rank() % 2);
  if (!context.expect_ok(made.status(), "a block to free") || !context.expect_ok(team.status(), "a team")) return false;
  scene.block = *made;
  scene.team = *team;
  return !scene.words.empty();
}

Status make_call(const Round& round, OneSided& shm, Scene& scene) {
  const std::size_t num_bytes = scene.source.size() * sizeof(std::uint64_t);
  switch (round.call) {
    case Call::kBarrier:
      return shm.barrier();
    case Call::kTeamBarrier:
      return shm.barrier(scene.team);
    case Call::kAllocate:
      return shm.allocate(64).status();
    case Call::kFree:
      return shm.free(scene.block);
    case Call::kSplit:
      return shm.split(shm.world(), 0).status();
    case Call::kQuiet: {
      // A near rank's memory takes the bytes without it. On other nodes the victim answers until it is lost.
      Status status;
      do {
        status = shm.put_nbi(round.victim, scene.words.data(), scene.source.data(), num_bytes);
        if (status.ok()) status = shm.quiet();
      } while (status.ok() && round.needs_victim(shm.rank()));
      return status;
    }
    case Call::kWaitUntil:
      return shm.wait_until(scene.words.data(), Comparison::kEqual, 1);
  }
  return {};
}

/// Never returns if the victim is killed or stopped.
void lose(const Round& round, Board& board, std::shared_ptr<OneSided>& shm) {
  board.lost_ns.store(node::monotonic_ns());
  board.changed();
  if (round.loss == Loss::kLeaves) {
    shm.reset();
    return;
  }
  kill(getpid(), round.loss == Loss::kIsKilled ? SIGKILL : SIGSTOP);
  // The signal may reach another thread first. A stopped process is killed at the end of the round.
  while (true) pause();
}

void be_victim(const Round& round, Board& board, std::shared_ptr<OneSided>& shm, Scene& scene) {
  // The rank itself is among them if another one is late.
  const auto lose_when_entered = [&] {
    board.wait_until([&] { return board.num_entered.load() == round.shape.num_ranks() - 1; });
    lose(round, board, shm);
  };
  if (!round.inside) {
    lose_when_entered();
    return;
  }
  std::thread waits(lose_when_entered);
  board.enter();
  (void)make_call(round, *shm, scene);
  waits.join();
}

void play(RankContext& context, const Round& round, Board& board) {
  OneSidedOptions options;
  options.backend = "cpu";
  options.heap_bytes = std::size_t{1} << 20;
  options.ranks_per_node = round.shape.ranks_per_node;
  if (round.shape.num_nodes > 1) options.transport = "ucx";
  options.timeout_ns = round.deadline_ns();
  Result<std::shared_ptr<OneSided>> made = OneSided::create(context.bootstrap(), options);
  if (!context.expect_ok(made.status(), "create")) return;
  std::shared_ptr<OneSided> shm = std::move(*made);
  Scene scene;
  if (!prepare(context, *shm, scene)) return;
  const pid_t mine = getpid();
  const auto pids = context.bootstrap()->all_gather(std::as_bytes(std::span(&mine, 1)), kLongNs);
  if (!context.expect_ok(pids.status(), "ids of the processes")) return;
  const int num_ranks = context.num_ranks();
  if (context.rank() == round.victim) {
    be_victim(round, board, shm, scene);
    // The end of its process would be another sign.
    board.wait_until([&] { return board.num_ended.load() == num_ranks - 1; });
    return;
  }
  pid_t victim = 0;
  std::memcpy(&victim, (*pids)[static_cast<std::size_t>(round.victim)].data(), sizeof(victim));
  const bool is_late = round.inside && context.rank() == (round.victim + num_ranks - 1) % num_ranks;
  if (is_late) {
    board.wait_until([&] { return board.lost_ns.load() != 0; });
    while (!is_out(victim)) std::this_thread::yield();
  } else {
    board.enter();
  }
  const Status status = make_call(round, *shm, scene);
  End& end = board.ends[static_cast<std::size_t>(context.rank())];
  end.at_ns = node::monotonic_ns();
  end.returned = true;
  end.code = status.code();
  end.peer = status.peer();
  status.message().copy(end.message.data(), end.message.size() - 1);
  if (round.leave_at_once) shm.reset();
  const bool is_last = board.num_ended.fetch_add(1) + 2 == num_ranks;
  board.changed();
  if (is_last && round.loss == Loss::kIsStopped) kill(victim, SIGKILL);
  board.wait_until([&] { return board.num_ended.load() == num_ranks - 1; });
}

/// Adds a failure for each survivor whose call did not end as it should. Returns the longest time from the loss to an
/// error, in nanoseconds.
std::int64_t check(const Round& round, const Board& board, std::vector<std::string>& failures) {
  std::int64_t longest_ns = 0;
  std::set<ErrorCode> codes;
  const bool stopped = round.loss == Loss::kIsStopped;
  // Any rank may write the word that wait_until waits for.
  const int named = stopped && round.call == Call::kWaitUntil ? -1 : round.victim;
  for (int rank = 0; rank < round.shape.num_ranks(); ++rank) {
    if (rank == round.victim) continue;
    const End& end = board.ends[static_cast<std::size_t>(rank)];
    const std::string_view message(end.message.data());
    const std::int64_t after_ns = end.at_ns - board.lost_ns.load();
    const auto expect = [&](bool held, std::string_view what) {
      if (held) return;
      failures.push_back(fmt::format("rank {}, expected {}: {} after {} ms, peer {}: {}", rank, what,
                                     to_string(end.code), after_ns / 1'000'000, end.peer, message));
    };
    if (!round.needs_victim(rank)) {
      expect(end.returned && end.code == ErrorCode::kOk, "success");
      continue;
    }
    if (round.inside && round.call == Call::kBarrier && end.code == ErrorCode::kOk) continue;
    codes.insert(end.code);
    longest_ns = std::max(longest_ns, after_ns);
    const bool is_lost = end.code == ErrorCode::kPeerLost || end.code == ErrorCode::kTransport;
    expect(end.returned && (stopped ? end.code == ErrorCode::kTimeout : is_lost), "the error of the loss");
    expect(end.peer == named, "the lost rank");
    expect(round.loss != Loss::kLeaves || message.find("has left") != std::string_view::npos, "that it has left");
    expect(stopped || after_ns < kLongNs / 2, "no wait for a deadline");
  }
  if (codes.size() > 1) failures.push_back("survivors got different errors");
  return longest_ns;
}

int num_rounds() {
  const char* const text = std::getenv("FERRY_LOSS_ROUNDS");
  const int given = text == nullptr ? 0 : std::atoi(text);
  return given > 0 ? given : kDefaultRounds;
}

void play_rounds(Loss loss) {
  std::vector<double> all_ms;
  // Reported at the end: rank processes would take an earlier failure of this one for their own.
  std::vector<std::string> all_failures;
  for (int number = 0; number < num_rounds(); ++number) {
    const Round round = draw(loss, number);
    const SharedBoard board;
    std::vector<std::string> failures =
        collect_rank_failures({.kind = RankKind::kProcesses, .num_ranks = round.shape.num_ranks()},
                              [&](RankContext& context) { play(context, round, *board); });
    if (loss != Loss::kLeaves) std::erase(failures, fmt::format("rank {}: died of signal 9", round.victim));
    const std::int64_t longest_ns = failures.empty() ? check(round, *board, failures) : 0;
    for (const std::string& failure : failures) {
      all_failures.push_back(fmt::format("round {}: {}: {}", number, round.text(), failure));
    }
    const std::int64_t late_ns = longest_ns - (loss == Loss::kIsStopped ? kStoppedNs : 0);
    all_ms.push_back(static_cast<double>(late_ns) / 1e6);
    fmt::print("round {}: {}: {:.1f} ms after {}{}\n", number, round.text(), all_ms.back(),
               loss == Loss::kIsStopped ? "the deadline" : "the loss", failures.empty() ? "" : ", FAILED");
  }
  for (const std::string& failure : all_failures) ADD_FAILURE() << failure;
  std::ranges::sort(all_ms);
  fmt::print("{} rounds: median {:.1f} ms, longest {:.1f} ms\n", all_ms.size(), all_ms[all_ms.size() / 2],
             all_ms.back());
}

TEST(OneSidedLossRounds, ARankThatLeavesIsNamedByAll) { play_rounds(Loss::kLeaves); }

TEST(OneSidedLossRounds, AKilledRankIsNamedByAll) { play_rounds(Loss::kIsKilled); }

TEST(OneSidedLossRounds, AStoppedRankIsNamedByAll) { play_rounds(Loss::kIsStopped); }

}  // namespace
}  // namespace ferry::test
