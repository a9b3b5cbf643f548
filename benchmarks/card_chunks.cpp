/// Time that the stand-in for a network card (tests/ucx_card) takes for a chunk by itself: ranks of one process send
/// each other small chunks through the ucx engine, each a put, its flush and a message, and credit those that come.
/// Where this is more than a card would need, what is measured over the stand-in says nothing of Ferry. Prints JSON.
///
/// FERRY_UCX_LIBRARY names another library in its place: an earlier stand-in, or null_ucx.cpp for the engine's share.

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/engine.hpp"
#include "options.hpp"

namespace {

constexpr std::int64_t kTimeoutNs = 10'000'000'000;
enum Channel : int { kChunks = 0, kCredits, kNumChannels };

struct Plan {
  std::vector<int> ranks{2, 4};
  std::size_t chunk_bytes = 8192;
  std::uint64_t num_chunks = 20'000;
  int window = 8;
  int num_runs = 5;
  bool in_turn = false;
  bool spin = false;
  bool alone = false;
  std::size_t rate = 0;
};

std::int64_t cpu_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

std::int64_t wall_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Times {
  std::int64_t wall_ns = 0;
  std::int64_t callers_ns = 0;  // processor time of the ranks' threads, polls that find nothing included
  std::int64_t card_ns = 0;     // of all other threads
};

/// Chunks and credits between a rank and a peer, both ways.
struct Link {
  std::uint64_t sent = 0;
  std::uint64_t credits = 0;
  std::uint64_t arrived = 0;
  std::uint64_t credited = 0;
};

class Rank {
 public:
  Rank(const Plan& plan, int self, int num_ranks)
      : plan_(plan),
        memory_(std::make_unique<std::byte[]>(kHostBytes)),
        links_(static_cast<std::size_t>(num_ranks)),
        self_(self) {
    const std::size_t num_peers = links_.size();
    const std::size_t gpu_bytes = 2 * num_peers * plan.chunk_bytes + ferry::net::gpu_probe_bytes(num_peers);
    gpu_memory_ = std::make_unique<std::byte[]>(gpu_bytes);
    const auto& factories = ferry::net::engine_factories();
    const auto ucx = std::ranges::find(factories, std::string_view("ucx"), &ferry::net::EngineFactory::name);
    engine_ = ucx->create({.self = self,
                           .num_peers = num_ranks,
                           .num_channels = kNumChannels,
                           .memory = {memory_.get(), kHostBytes},
                           .gpu_memory = {gpu_memory_.get(), gpu_bytes},
                           .timeout_ns = kTimeoutNs})
                  .value();
    engine_->limit_close_time(0);
  }

  ferry::net::Blob address() const { return engine_->address().value(); }

  void connect(const std::vector<ferry::net::Blob>& addresses) {
    ferry::net::EngineEvents events;
    events.notified = [this](int peer, int channel, std::uint64_t value) {
      Link& link = links_[static_cast<std::size_t>(peer)];
      std::uint64_t& word = channel == kChunks ? link.arrived : link.credits;
      word = std::max(word, value);
    };
    events.lost = [](int, const ferry::Status& why) {
      fmt::print(stderr, "card_chunks: {}\n", why.to_string());
      std::exit(1);
    };
    if (!engine_->connect(addresses, std::move(events)).ok()) std::exit(1);
  }

  /// Sends and credits what can be. True once `last` chunks have gone each way. `moved`: there was something to do.
  bool turn(std::uint64_t last, bool* moved) {
    const auto window = static_cast<std::uint64_t>(plan_.window);
    bool is_done = true;
    for (std::size_t peer = 0; peer < links_.size(); ++peer) {
      if (static_cast<int>(peer) == self_) continue;
      Link& link = links_[peer];
      if (link.sent < std::min(link.credits + window, last)) {
        const std::size_t source = peer * plan_.chunk_bytes;
        const std::size_t place = (links_.size() + static_cast<std::size_t>(self_)) * plan_.chunk_bytes;
        engine_->put(static_cast<int>(peer), kChunks, ferry::net::kGpuOffset + source, ferry::net::kGpuOffset + place,
                     plan_.chunk_bytes);
        engine_->notify(static_cast<int>(peer), kChunks, ++link.sent);
        *moved = true;
      }
      if (std::exchange(link.credited, link.arrived) != link.arrived) {
        engine_->notify(static_cast<int>(peer), kCredits, link.arrived);
      }
      is_done = is_done && link.credits >= last && link.arrived >= last;
    }
    *moved |= engine_->poll();
    return is_done;
  }

 private:
  static constexpr std::size_t kHostBytes = 4096;
  const Plan& plan_;
  std::unique_ptr<std::byte[]> memory_;
  std::unique_ptr<std::byte[]> gpu_memory_;
  std::vector<Link> links_;
  const int self_;
  std::unique_ptr<ferry::net::Engine> engine_;
};

class World {
 public:
  World(const Plan& plan, int num_ranks) : plan_(plan) {
    std::vector<ferry::net::Blob> addresses;
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(plan, rank, num_ranks));
      addresses.push_back(ranks_.back()->address());
    }
    for (const auto& rank : ranks_) rank->connect(addresses);
  }

  /// Each rank sends so many chunks to each other one.
  Times exchange(std::uint64_t num_chunks) {
    last_ += num_chunks;
    const std::int64_t wall_begin = wall_ns();
    const std::int64_t process_begin = cpu_ns(CLOCK_PROCESS_CPUTIME_ID);
    std::atomic<std::int64_t> callers_ns{0};
    std::atomic<std::size_t> num_done{0};
    const auto drive = [&](std::size_t begin, std::size_t end) {
      const std::int64_t thread_begin = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
      std::vector<bool> done(ranks_.size());
      // A rank that is done goes on: its peers wait for its credits.
      while (num_done < ranks_.size()) {
        bool moved = false;
        for (std::size_t rank = begin; rank < end; ++rank) {
          if (!ranks_[rank]->turn(last_, &moved) || done[rank]) continue;
          done[rank] = true;
          ++num_done;
        }
        if (!moved) std::this_thread::yield();
      }
      callers_ns += cpu_ns(CLOCK_THREAD_CPUTIME_ID) - thread_begin;
    };
    if (plan_.in_turn) {
      drive(0, ranks_.size());
    } else {
      std::vector<std::thread> threads;
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        threads.emplace_back([&drive, rank] { drive(rank, rank + 1); });
      }
      for (std::thread& thread : threads) thread.join();
    }
    const std::int64_t process_ns = cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - process_begin;
    return {wall_ns() - wall_begin, callers_ns, process_ns - callers_ns};
  }

 private:
  const Plan& plan_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::uint64_t last_ = 0;
};

nlohmann::json report_of(const std::vector<Times>& runs, std::uint64_t num_chunks, std::int64_t Times::*time) {
  std::vector<double> values;
  for (const Times& run : runs) values.push_back(static_cast<double>(run.*time) / static_cast<double>(num_chunks));
  std::ranges::sort(values);
  return {{"median", values[values.size() / 2]}, {"least", values.front()}};
}

}  // namespace

int main(int argc, char** argv) {
  Plan plan;
  ferry::benchmarks::Options options("Time of the stand-in for a network card for each chunk");
  options.add("--ranks", plan.ranks, "Numbers of ranks, each of which sends to all others");
  options.add("--chunk-bytes", plan.chunk_bytes, "Bytes of a chunk, which are copied");
  options.add("--chunks", plan.num_chunks, "Chunks that a rank sends in a run");
  options.add("--window", plan.window, "Chunks on their way to a peer", ferry::benchmarks::Range{1, 1000});
  options.add("--runs", plan.num_runs, "Timed runs", ferry::benchmarks::Range{1, 1000});
  options.add("--rate", plan.rate, "Rate of an end in bytes per microsecond; 0: no limit");
  options.add_flag("--in-turn", plan.in_turn, "One thread for all ranks");
  options.add_flag("--alone", plan.alone, "The stand-in has no threads: its work is the callers', without any wait");
  options.add_flag("--spin", plan.spin, "The stand-in's threads never sleep; needs a core for each");
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  setenv("FERRY_UCX_LIBRARY", FERRY_UCX_CARD_FOLDER, 0);
  setenv("UCX_TLS", "rc,cuda_copy", 1);
  std::string card = fmt::format("steady=1,piece_bytes=1073741824,spin={},rate={}", plan.spin ? 1 : 0, plan.rate);
  if (plan.alone) card += ",thread=0";
  setenv("FERRY_UCX_CARD", card.c_str(), 0);
  nlohmann::json reports = nlohmann::json::array();
  for (const int num_ranks : plan.ranks) {
    World world(plan, num_ranks);
    const std::uint64_t share = std::max<std::uint64_t>(1, plan.num_chunks / static_cast<std::uint64_t>(num_ranks - 1));
    const std::uint64_t num_sent = share * static_cast<std::uint64_t>(num_ranks - 1);
    (void)world.exchange(share / 10 + 1);
    std::vector<Times> runs;
    for (int run = 0; run < plan.num_runs; ++run) runs.push_back(world.exchange(share));
    const std::uint64_t num_in_all = num_sent * static_cast<std::uint64_t>(num_ranks);
    reports.push_back({{"ranks", num_ranks},
                       {"wall_ns_per_chunk_of_a_rank", report_of(runs, num_sent, &Times::wall_ns)},
                       {"callers_ns_per_chunk", report_of(runs, num_in_all, &Times::callers_ns)},
                       {"card_ns_per_chunk", report_of(runs, num_in_all, &Times::card_ns)}});
  }
  fmt::print("{}\n", reports.dump(2));
  return 0;
}
