#include "one_sided/fabric.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "core/create_together.hpp"
#include "net/threads.hpp"
#include "node/futex.hpp"
#include "one_sided/words.hpp"
#include "rail/network.hpp"

namespace ferry::one_sided {
namespace {

/// Spin time if each rank has a core: longer than another rank needs to wake and answer, so that two ranks that answer
/// each other do not both go to sleep every time after one has slept. (With 20 µs they did, on 2 cores of a busy host:
/// a message took 24 µs instead of 0.1.)
constexpr std::int64_t kSpinNs = 100'000;
/// Part of the spin time without yields. Afterwards other threads may have the core between polls: where other programs
/// keep the cores busy, the rank that must answer may be waiting for it.
constexpr std::int64_t kSoloSpinNs = 20'000;
/// Yields before a waiting thread sleeps if ranks share cores: about as long as a few of them need to reach their next
/// signal.
constexpr int kYields = 8;
/// First and longest nap of a sleeper, which polls its word between naps: plain stores and puts inside a node wake no
/// thread.
constexpr std::int64_t kFirstNapNs = 50'000;
constexpr std::int64_t kLongestNapNs = 1'000'000;
/// Interval at which a waiting thread asks the system whether the others are still present.
constexpr std::int64_t kPresenceIntervalNs = 4'000'000;

}  // namespace

class Fabric::Driving {
 public:
  explicit Driving(Driver* driver) : driver_(driver) {
    if (driver_ != nullptr) driver_->begin_wait();
  }
  ~Driving() {
    if (driver_ != nullptr) driver_->end_wait();
  }
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;

  bool progress() { return driver_ != nullptr && driver_->progress(); }

 private:
  Driver* driver_;
};

Fabric::Fabric(const BackendContext& context, std::size_t heap_bytes, node::Rendezvous rendezvous)
    : topology_(context.topology),
      timeout_ns_(context.options.timeout_ns),
      heap_bytes_(heap_bytes),
      spins_(std::thread::hardware_concurrency() >=
             static_cast<unsigned>(std::ranges::count_if(rendezvous.places, &RankPlace::on_this_host))),
      peers_(topology_.rank, topology_.node_of(topology_.rank) * topology_.ranks_per_node, std::move(rendezvous)) {
  for (int rank = 0; rank < topology_.num_ranks; ++rank) all_ranks_.push_back(rank);
}

Fabric::~Fabric() { abandon(); }

void Fabric::abandon() {
  if (driver_ != nullptr) say_goodbye();
  // Closing the network may take long, and ranks of the node need not wait for it.
  peers_.leave();
  if (driver_ != nullptr) driver_->limit_close_time(kLastWordsNs);
  driver_.reset();
}

std::size_t Fabric::notices_offset(int num_ranks) {
  return sizeof(Control) + kMaxTeams * static_cast<std::size_t>(num_ranks) * kEntryBytes;
}

std::size_t Fabric::control_bytes(int num_ranks) {
  return node::round_up_to_page(notices_offset(num_ranks) + static_cast<std::size_t>(num_ranks) * sizeof(Notice));
}

Result<std::unique_ptr<Fabric>> Fabric::create(const BackendContext& context, std::size_t heap_bytes) {
  BackendContext sized = context;
  const std::size_t memory_bytes = control_bytes(context.topology.num_ranks) + heap_bytes;
  sized.options.arena_bytes = memory_bytes;
  net::ReservedThreads threads;
  const Status reserved = rail::reserve_threads(context.topology, &threads);
  const bool has_network = context.topology.num_nodes() > 1;
  Result<node::Rendezvous> met =
      node::rendezvous(sized, has_network ? rail::place_to_publish(context) : RankPlace{}, reserved);
  if (!met.ok()) return met.status();
  threads.give_back();
  const std::vector<RankPlace> places = met->places;
  std::unique_ptr<Fabric> fabric(new Fabric(context, heap_bytes, std::move(*met)));

  Status status;
  if (Result<std::byte*> memory = fabric->peers_.arena().take(memory_bytes); memory.ok()) {
    fabric->memory_ = *memory;
    fabric->arena_offset_ = static_cast<std::size_t>(*memory - fabric->peers_.arena().mapping()->base());
    new (*memory) Control();
  } else {
    status = Status(ErrorCode::kSystem, fmt::format("OneSided::create: no memory for a heap of {} bytes ({}); lower "
                                                    "OneSidedOptions::heap_bytes",
                                                    heap_bytes, memory.status().message()));
  }
  for (int rank = fabric->peers_.first_rank(); rank < fabric->peers_.end_rank() && status.ok(); ++rank) {
    const std::size_t theirs = fabric->peers_.peer(rank).arena->size_bytes();
    if (theirs >= fabric->arena_offset_ + memory_bytes) continue;
    status =
        Status(ErrorCode::kTransport,
               fmt::format("OneSided::create: rank {} has an arena of {} bytes, expected {}; run the same build on "
                           "every rank",
                           rank, theirs, fabric->arena_offset_ + memory_bytes),
               rank);
  }
  // No rank writes to a control area before its owner has created it: the creation ends with an exchange.
  status = fabric->join_network(context, places, status);
  if (!status.ok()) return status;
  return fabric;
}

/// Every rank is an end, so that an end's index is its rank; the ends of this node's ranks are never used.
Status Fabric::join_network(const BackendContext& context, const std::vector<RankPlace>& places,
                            const Status& my_status) {
  if (topology_.num_nodes() == 1) return my_status;
  const std::size_t memory_bytes = engine_offset(heap_bytes_);
  rail::NetworkParams params;
  params.engine.self = topology_.rank;
  params.engine.num_peers = topology_.num_ranks;
  params.engine.num_channels = Driver::kNumChannels;
  params.engine.memory = {memory_, memory_ == nullptr ? 0 : memory_bytes};
  params.engine.timeout_ns = timeout_ns_;
  params.engine.ranks = all_ranks_;
  params.places = places;
  Result<rail::Network> network = rail::open_network(context, params, my_status);
  if (!network.ok()) return network.status();
  driver_ = std::make_unique<Driver>(std::move(network->engine), network->options,
                                     [this] { ring(topology_.rank, kAnyWord); });
  Status status = driver_->start(network->addresses);
  if (!status.ok()) {
    status = Status(status.code(),
                    fmt::format("OneSided::create: connecting over {}: {}", network->describe(), status.message()),
                    status.peer());
  }
  if (Status all = gather_or_fail(*context.bootstrap, status, {}, timeout_ns_).status(); !all.ok()) return all;
  // Engines connect when something is sent. Meet now, so that an unreachable rank is found here.
  const TeamState joining{
      .ranks = all_ranks_, .slots = std::vector(all_ranks_.size(), kJoiningTeam), .my_place = topology_.rank};
  if (status = barrier(joining, "OneSided::create"); !status.ok()) return status;
  return quiet("OneSided::create");
}

std::byte* Fabric::memory_of(int rank) const {
  if (rank == topology_.rank) return memory_;
  return peers_.includes(rank) ? peers_.peer(rank).arena->base() + arena_offset_ : nullptr;
}

std::byte* Fabric::peer_heap(int rank) const {
  std::byte* memory = memory_of(rank);
  return memory == nullptr ? nullptr : memory + control_bytes(topology_.num_ranks);
}

std::size_t Fabric::engine_offset(std::size_t heap_offset) const {
  return control_bytes(topology_.num_ranks) + heap_offset;
}

Control& Fabric::control(int rank) const { return *reinterpret_cast<Control*>(memory_of(rank)); }

void Fabric::ring(int rank, std::size_t offset) const {
  Control& theirs = control(rank);
  // Both are sequentially consistent, like the earlier change of the word: either this rank sees the sleeper, or the
  // sleeper sees the word.
  const std::uint32_t num_sleepers = theirs.num_sleepers.load(std::memory_order_seq_cst);
  if (num_sleepers == 0) return;
  const std::size_t watched = theirs.watched.load(std::memory_order_seq_cst);
  if (num_sleepers == 1 && watched != kAnyWord && offset != kAnyWord && watched != offset) return;
  theirs.doorbell.fetch_add(1, std::memory_order_seq_cst);
  node::futex_wake_all(theirs.doorbell);
}

Status Fabric::issue(const NetworkRequest& request, std::string_view operation) {
  const std::array<int, 1> peer{request.peer};
  if (const Status why = report_loss(request.peer); !why.ok()) {
    return Status(why.code(), fmt::format("{}: {}", operation, why.message()), request.peer);
  }
  if (driver_->try_issue(request)) return {};
  return wait({.operation = operation,
               .what =
                   [&request] {
                     return Awaited{fmt::format("earlier operations to rank {}", request.peer), request.peer};
                   },
               .ranks = peer,
               .timeout_ns = timeout_ns_},
              [&] { return driver_->try_issue(request); });
}

/// True if `done` held before the sleep.
bool Fabric::sleep_until_rung(const Wait& wait, const std::function<bool()>& done, std::int64_t timeout_ns) const {
  Control& mine = control(topology_.rank);
  const bool alone = mine.num_sleepers.fetch_add(1, std::memory_order_seq_cst) == 0;
  mine.watched.store(alone ? wait.word : kAnyWord, std::memory_order_seq_cst);
  const std::uint32_t rings = mine.doorbell.load(std::memory_order_seq_cst);
  const bool is_done = done();
  if (!is_done) node::futex_wait(mine.doorbell, rings, timeout_ns);
  mine.num_sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return is_done;
}

Status Fabric::wait(const Wait& wait, const std::function<bool()>& done) {
  if (done()) return {};
  bool announced = false;
  const Status status = wait_unannounced(wait, done, &announced);
  // After its deadline the call is not over: mates that reach theirs a little later still find the one for which all
  // wait.
  if (announced && status.ok()) retract(*wait.team);
  return status;
}

Status Fabric::wait_unannounced(const Wait& wait, const std::function<bool()>& done, bool* announced) {
  const std::int64_t start_ns = node::monotonic_ns();
  std::int64_t looked_ns = start_ns;
  std::int64_t nap_ns = kFirstNapNs;
  int num_yields = 0;
  std::int64_t now_ns = start_ns;
  while (true) {
    bool idle = false;
    {
      Driving driving(driver_.get());
      std::int64_t spin_start_ns = now_ns;
      // The loop is bounded: the network may always have work for other ranks.
      do {
        const bool moved = driving.progress();
        if (done()) return {};
        if (moved) {
          spin_start_ns = now_ns;
          nap_ns = kFirstNapNs;
        } else if (!spins_) {
          idle = num_yields >= kYields;
          if (!idle) {
            ++num_yields;
            std::this_thread::yield();
          }
        } else if (now_ns - spin_start_ns >= kSoloSpinNs) {
          std::this_thread::yield();
        }
        now_ns = node::monotonic_ns();
        idle = idle || now_ns - spin_start_ns >= kSpinNs;
      } while (!idle && now_ns - start_ns < wait.timeout_ns && now_ns - looked_ns < kPresenceIntervalNs);
    }
    const std::int64_t left_ns = wait.timeout_ns - (now_ns - start_ns);
    if (left_ns <= 0) break;
    if (idle) {
      if (driver_ != nullptr) driver_->hand_over();
      if (sleep_until_rung(wait, done, std::min(nap_ns, left_ns))) return {};
      if (done()) return {};
      nap_ns = std::min(nap_ns * 2, kLongestNapNs);
      now_ns = node::monotonic_ns();
    }
    if (now_ns - looked_ns < kPresenceIntervalNs) continue;
    looked_ns = now_ns;
    if (wait.team != nullptr && !*announced && now_ns - start_ns >= wait.timeout_ns / 2) {
      *announced = true;
      announce(*wait.team, wait.what().rank);
    }
    const std::optional<Finding> loss = find_loss(wait.ranks, wait.team);
    if (!loss) continue;
    // Operations that the rank completed before its loss are visible now.
    if (driver_ != nullptr) driver_->progress();
    if (done()) return {};
    note_loss(*loss);
    const Status why = status_of(*loss);
    return Status(why.code(),
                  fmt::format("{}: {} while this rank waited for {}", wait.operation, why.message(), wait.what().what),
                  why.peer());
  }
  auto [what, late] = wait.what();
  if (wait.team != nullptr) {
    const int behind = find_late(*wait.team, late);
    if (behind != late) what += fmt::format(", which waits for rank {}", behind);
    late = behind;
  }
  return Status(
      ErrorCode::kTimeout,
      fmt::format("{}: timed out after {} ms waiting for {}; raise the deadline, or find out why other ranks do "
                  "not respond",
                  wait.operation, wait.timeout_ns / 1'000'000, what),
      late);
}

namespace {

/// Counts the answers of several peers.
class Answers final : public Completion {
 public:
  void done(std::uint64_t /*value*/) override { num_missing_.fetch_sub(1, std::memory_order_release); }
  void lost(int peer) override {
    lost_peer_.store(peer, std::memory_order_relaxed);
    num_missing_.fetch_sub(1, std::memory_order_release);
  }
  void expect(int num_answers) { num_missing_.fetch_add(num_answers, std::memory_order_relaxed); }
  bool complete() const { return num_missing_.load(std::memory_order_acquire) == 0; }
  int lost_peer() const { return lost_peer_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int> num_missing_{0};
  std::atomic<int> lost_peer_{-1};
};

}  // namespace

Status Fabric::quiet(std::string_view operation, const TeamState* team, int rank) {
  static_assert(kEveryRank == -1, "the driver's number for all peers");
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (driver_ == nullptr) return {};
  Answers answers;
  answers.expect(driver_->flush_all(&answers, rank));
  // The driver ends the wait for a lost peer, so without a team no rank is watched: one without answers due may be
  // lost.
  Status status = wait({.operation = operation,
                        .what =
                            [this, &answers, rank] {
                              const int late = driver_->find_late(&answers, rank);
                              return Awaited{late < 0 ? std::string("this rank's operations to complete")
                                                      : fmt::format("rank {} to complete this rank's operations", late),
                                             late};
                            },
                        .ranks = team == nullptr ? std::span<const int>() : team->ranks,
                        .timeout_ns = timeout_ns_,
                        .team = team},
                       [&] { return answers.complete() && driver_->find_pending_get(rank) < 0; });
  if (!answers.complete()) driver_->forget(&answers);
  // Take the failure that this call reports, so that no later call reports it again; gets have no answer of their own
  // in it.
  const int failed = driver_->take_failure(answers.lost_peer() < 0 ? rank : answers.lost_peer());
  const int lost = answers.lost_peer() < 0 ? failed : answers.lost_peer();
  if (lost >= 0) {
    const Status why = report_loss(lost);
    status = Status(why.ok() ? ErrorCode::kPeerLost : why.code(),
                    fmt::format("{}: {}; operations of this rank on its memory may or may not have arrived", operation,
                                why.message()),
                    lost);
  }
  return team == nullptr ? status : conclude(*team, operation, status);
}

}  // namespace ferry::one_sided
