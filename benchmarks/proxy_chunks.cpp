/// Processor time that the thread which drives the network of a GPU rank (net::Proxy over the ucx engine) takes for a
/// chunk between nodes, where a network card moves the bytes: over a stand-in for UCX whose operations cost next to
/// nothing (null_ucx.cpp). For each chunk that is sent, one is received, with the credits of both. Prints JSON.
///
/// The rank and all its peers are one more thread. A turn of the proxy ends with a poll of its engine; turns in which
/// nothing was sent or received are counted apart, so that waiting for the other thread does not count. With --in-turn
/// one thread drives the proxy (Proxy::acquire) and the rest in turn, so that neither waits for a core.

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/proxy.hpp"
#include "options.hpp"

namespace {

using ferry::net::RingWords;
using Word = std::atomic_ref<std::uint64_t>;

constexpr std::size_t kNumChunks = 16;
constexpr std::int64_t kTimeoutNs = 10'000'000'000;
enum Channel : int { kChunks = 0, kCredits, kNumChannels };

struct Plan {
  std::vector<int> peers{1, 2, 7, 31};
  std::vector<int> windows{1, 4, 16};
  std::size_t chunk_bytes = std::size_t{512} << 10;
  std::uint64_t num_chunks = 20'000;
  int num_polls = 4;
  int num_runs = 5;
  bool in_turn = false;
  bool phases = false;
};

std::int64_t thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

std::int64_t wall_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Time that one reading of the thread's clock takes; the least of some attempts, because interruptions only add to it.
std::int64_t cost_of_clock() {
  constexpr int kNumAttempts = 50;
  constexpr int kNumReadings = 200;
  std::int64_t least_ns = std::numeric_limits<std::int64_t>::max();
  for (int attempt = 0; attempt < kNumAttempts; ++attempt) {
    const std::int64_t begin = thread_ns();
    for (int i = 0; i < kNumReadings; ++i) thread_ns();
    least_ns = std::min(least_ns, (thread_ns() - begin) / kNumReadings);
  }
  return least_ns;
}

/// Account of the proxy's thread, as its engine sees it.
struct Account {
  std::uint64_t num_chunks = 0;
  std::uint64_t num_busy_turns = 0;
  std::uint64_t num_idle_turns = 0;
  std::int64_t busy_ns = 0;
  std::int64_t idle_ns = 0;
  // With --phases; by another clock, which costs less.
  std::int64_t put_ns = 0;
  std::int64_t notify_ns = 0;
  std::int64_t poll_ns = 0;
};

/// Adds the time since its construction to a sum, if there is one, unless the thread was interrupted meanwhile.
class Timer {
 public:
  explicit Timer(std::int64_t* sum) : sum_(sum), begin_(sum != nullptr ? wall_ns() : 0) {}
  ~Timer() {
    if (sum_ == nullptr) return;
    const std::int64_t passed_ns = wall_ns() - begin_;
    if (passed_ns < kInterruptedNs) *sum_ += passed_ns;
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  static constexpr std::int64_t kInterruptedNs = 50'000;
  std::int64_t* sum_;
  std::int64_t begin_;
};

/// Engine that keeps account of its calls.
class MeteredEngine final : public ferry::net::Engine {
 public:
  MeteredEngine(std::unique_ptr<Engine> engine, const Plan& plan)
      : engine_(std::move(engine)), phases_(plan.phases), meters_turns_(!plan.in_turn) {}

  /// The account begins and ends while this is true.
  std::atomic<bool> is_counting{false};
  Account account;
  const std::int64_t clock_ns = cost_of_clock();

  std::string_view name() const override { return engine_->name(); }
  std::span<std::byte> memory() const override { return engine_->memory(); }
  ferry::Result<ferry::net::Blob> address() const override { return engine_->address(); }
  ferry::Status connect(std::span<const ferry::net::Blob> addresses, ferry::net::EngineEvents events) override {
    events.notified = [this, hand_on = std::move(events.notified)](int peer, int channel, std::uint64_t value) {
      moved_ = true;
      hand_on(peer, channel, value);
    };
    return engine_->connect(addresses, std::move(events));
  }
  void put(int peer, int channel, std::size_t local, std::size_t remote, std::size_t num_bytes) override {
    moved_ = true;
    ++num_puts_;
    const Timer timer(phases_ ? &account.put_ns : nullptr);
    engine_->put(peer, channel, local, remote, num_bytes);
  }
  void notify(int peer, int channel, std::uint64_t value) override {
    moved_ = true;
    const Timer timer(phases_ ? &account.notify_ns : nullptr);
    engine_->notify(peer, channel, value);
  }
  void put_notify(int peer, int channel, std::size_t local, std::size_t remote, std::size_t num_bytes,
                  std::uint64_t value) override {
    moved_ = true;
    ++num_puts_;
    const Timer timer(phases_ ? &account.put_ns : nullptr);
    engine_->put_notify(peer, channel, local, remote, num_bytes, value);
  }
  bool poll() override {
    bool moved = false;
    {
      const Timer timer(phases_ ? &account.poll_ns : nullptr);
      moved = engine_->poll();
    }
    end_turn(moved);
    return moved;
  }
  void put_from(int peer, int channel, std::span<const std::byte> source, std::size_t remote) override {
    engine_->put_from(peer, channel, source, remote);
  }
  void get(int peer, std::span<std::byte> into, std::size_t remote, std::uint64_t ticket) override {
    engine_->get(peer, into, remote, ticket);
  }
  void atomic(int peer, int channel, const ferry::net::AtomicOp& op, std::uint64_t ticket) override {
    engine_->atomic(peer, channel, op, ticket);
  }
  void flush(int peer, std::uint64_t ticket) override { engine_->flush(peer, ticket); }
  void forget(std::uint64_t ticket) override { engine_->forget(ticket); }
  bool flushed(int peer) const override { return engine_->flushed(peer); }
  int event_fd() const override { return engine_->event_fd(); }
  bool arm() override { return engine_->arm(); }
  std::vector<ferry::net::Path> paths() const override { return engine_->paths(); }
  void limit_close_time(std::int64_t timeout_ns) override { engine_->limit_close_time(timeout_ns); }
  void close() override { engine_->close(); }

 private:
  void end_turn(bool moved) {
    const std::int64_t now = meters_turns_ ? thread_ns() : 0;
    const bool counts = is_counting.load(std::memory_order_acquire);
    if (counts && was_counting_) {
      const bool is_busy = moved || moved_;
      if (meters_turns_) (is_busy ? account.busy_ns : account.idle_ns) += now - last_ns_ - clock_ns;
      ++(is_busy ? account.num_busy_turns : account.num_idle_turns);
      account.num_chunks += num_puts_;
    } else if (counts) {
      account = {};
    }
    was_counting_ = counts;
    moved_ = false;
    num_puts_ = 0;
    last_ns_ = now;
  }

  std::unique_ptr<Engine> engine_;
  const bool phases_;
  const bool meters_turns_;
  bool was_counting_ = false;
  bool moved_ = false;
  std::uint64_t num_puts_ = 0;
  std::int64_t last_ns_ = 0;
};

const ferry::net::EngineFactory& ucx() {
  return *std::ranges::find(ferry::net::engine_factories(), std::string_view("ucx"), &ferry::net::EngineFactory::name);
}

/// A peer of the proxy's rank: it credits each chunk that comes, and sends its own.
struct Peer {
  std::vector<std::byte> memory;
  std::unique_ptr<std::byte[]> gpu_memory;  // almost never touched
  std::unique_ptr<ferry::net::Engine> engine;
  std::uint64_t arrived = 0;
  std::uint64_t credited = 0;
  std::uint64_t sent = 0;
  std::uint64_t credits = 0;

  void serve(std::uint64_t most, std::size_t chunk_bytes) {
    engine->poll();
    while (sent < most) {
      engine->put(0, kChunks, ferry::net::kGpuOffset, ferry::net::kGpuOffset, chunk_bytes);
      engine->notify(0, kChunks, ++sent);
    }
    if (std::exchange(credited, arrived) != arrived) engine->notify(0, kCredits, arrived);
  }
};

/// The proxy's rank and its peers.
class World {
 public:
  World(const Plan& plan, int num_peers)
      : chunk_bytes_(plan.chunk_bytes), in_turn_(plan.in_turn), words_(static_cast<std::size_t>(num_peers) + 1) {
    std::vector<ferry::net::Blob> addresses;
    ferry::net::EngineOptions options{
        .num_peers = num_peers + 1, .num_channels = kNumChannels, .timeout_ns = kTimeoutNs};
    const std::size_t gpu_bytes =
        kNumChunks * plan.chunk_bytes + ferry::net::gpu_probe_bytes(static_cast<std::size_t>(num_peers) + 1);
    std::vector<std::unique_ptr<Peer>> ends;
    for (int end = 0; end <= num_peers; ++end) {
      ends.push_back(std::make_unique<Peer>());
      ends.back()->memory.resize(4096);
      options.self = end;
      options.memory = ends.back()->memory;
      ends.back()->gpu_memory = std::make_unique_for_overwrite<std::byte[]>(gpu_bytes);
      options.gpu_memory = {ends.back()->gpu_memory.get(), gpu_bytes};
      ends.back()->engine = ucx().create(options).value();
      addresses.push_back(ends.back()->engine->address().value());
    }
    options.self = 0;
    self_ = std::move(ends[0]);
    auto metered = std::make_unique<MeteredEngine>(std::move(self_->engine), plan);
    metered_ = metered.get();
    proxy_ = std::make_unique<ferry::net::Proxy>(std::move(metered), options, [] {});
    for (int peer = 1; peer <= num_peers; ++peer) {
      proxy_->attach_kernel_ring(peer, {.words = &words_[static_cast<std::size_t>(peer)],
                                        .num_chunks = kNumChunks,
                                        .chunk_stride = plan.chunk_bytes,
                                        .send_offset = ferry::net::kGpuOffset,
                                        .remote_offset = ferry::net::kGpuOffset,
                                        .chunk_channel = kChunks,
                                        .credit_channel = kCredits});
      Peer* mine = ends[static_cast<std::size_t>(peer)].get();
      ferry::net::EngineEvents events;
      events.notified = [mine](int, int channel, std::uint64_t value) {
        std::uint64_t& word = channel == kChunks ? mine->arrived : mine->credits;
        word = std::max(word, value);
      };
      events.lost = [](int, const ferry::Status& why) {
        fmt::print(stderr, "proxy_chunks: {}\n", why.to_string());
        std::exit(1);
      };
      if (!mine->engine->connect(addresses, std::move(events)).ok()) std::exit(1);
      peers_.push_back(std::move(ends[static_cast<std::size_t>(peer)]));
    }
    if (!proxy_->start(addresses).ok()) std::exit(1);
    if (in_turn_) {
      proxy_->acquire();
    } else {
      proxy_->keep_polling(true);
    }
  }

  ~World() {
    proxy_->release();
    proxy_->limit_close_time(0);
    for (auto& peer : peers_) peer->engine->limit_close_time(0);
  }

  /// Exchanges `num_chunks` with each peer, at most `window` of them on their way.
  void exchange(std::uint64_t num_chunks, std::uint64_t window) {
    last_chunk_ += num_chunks;
    bool is_done = false;
    while (!is_done) {
      is_done = true;
      for (std::size_t i = 0; i < peers_.size(); ++i) {
        RingWords& words = words_[i + 1];
        Peer& peer = *peers_[i];
        const std::uint64_t credits = Word(words.credits).load(std::memory_order_acquire);
        for (const std::uint64_t end = std::min(credits + window, last_chunk_); words.num_filled < end;) {
          std::uint64_t& word = words.filled[words.num_filled % kNumChunks];
          const auto num_bytes = static_cast<std::uint32_t>(chunk_bytes_);
          Word(word).store(ferry::net::filled_word(words.num_filled++, num_bytes), std::memory_order_release);
        }
        while (words.num_used < Word(words.arrived).load(std::memory_order_acquire)) {
          std::uint64_t& word = words.used[words.num_used % kNumChunks];
          Word(word).store(++words.num_used, std::memory_order_release);
        }
        peer.serve(std::min(peer.credits + window, last_chunk_), chunk_bytes_);
        is_done = is_done && credits >= last_chunk_ && peer.credits >= last_chunk_;
      }
      if (in_turn_) drive();
    }
  }

  Account measure(std::uint64_t num_chunks, std::uint64_t window) {
    exchange(num_chunks / 10 + 1, window);
    metered_->is_counting = true;
    exchange(num_chunks, window);
    metered_->is_counting = false;
    if (!in_turn_) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the proxy ends its turn
    return metered_->account;
  }

 private:
  /// A turn of the proxy.
  void drive() {
    const std::int64_t begin = thread_ns();
    for (std::size_t peer = 1; peer <= peers_.size(); ++peer) proxy_->post_ring(static_cast<int>(peer));
    proxy_->progress();
    metered_->account.busy_ns += thread_ns() - begin - metered_->clock_ns;
  }

  const std::size_t chunk_bytes_;
  const bool in_turn_;
  std::vector<RingWords> words_;  // by end
  std::unique_ptr<Peer> self_;    // memory of the proxy's rank
  std::vector<std::unique_ptr<Peer>> peers_;
  MeteredEngine* metered_ = nullptr;
  std::unique_ptr<ferry::net::Proxy> proxy_;
  std::uint64_t last_chunk_ = 0;
};

double per(std::int64_t sum, std::uint64_t count) {
  return count == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(count);
}

/// Middle one of some runs.
template <typename Value>
double median(const std::vector<Account>& runs, Value value) {
  std::vector<double> values;
  for (const Account& run : runs) values.push_back(value(run));
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double ns_per_chunk(const Account& run) { return per(run.busy_ns, run.num_chunks); }

nlohmann::json report_of(const std::vector<Account>& runs, bool phases) {
  const auto per_chunk = [&runs](std::int64_t Account::*sum) {
    return median(runs, [sum](const Account& run) { return per(run.*sum, run.num_chunks); });
  };
  nlohmann::json report{
      {"ns_per_chunk", median(runs, ns_per_chunk)},
      {"least_ns_per_chunk", ns_per_chunk(std::ranges::min(runs, {}, ns_per_chunk))},
      {"chunks_per_turn",
       median(runs,
              [](const Account& run) { return per(static_cast<std::int64_t>(run.num_chunks), run.num_busy_turns); })},
      {"ns_per_idle_turn", median(runs, [](const Account& run) { return per(run.idle_ns, run.num_idle_turns); })}};
  if (phases) {
    report["put_ns"] = per_chunk(&Account::put_ns);
    report["notify_ns"] = per_chunk(&Account::notify_ns);
    report["poll_ns"] = per_chunk(&Account::poll_ns);
  }
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  Plan plan;
  ferry::benchmarks::Options options("Processor time of the network's thread for each chunk between nodes");
  options.add("--peers", plan.peers, "Numbers of rail peers");
  options.add("--windows", plan.windows, "Chunks on their way to a peer, at most 16");
  options.add("--chunk-bytes", plan.chunk_bytes, "Bytes of a chunk, of which none is copied");
  options.add("--chunks", plan.num_chunks, "Chunks of a run, to all peers together");
  options.add("--polls", plan.num_polls, "Polls that a put and a flush take; 0: they are complete at once");
  options.add("--runs", plan.num_runs, "Runs, of which the median is reported", ferry::benchmarks::Range{1, 1000});
  options.add_flag("--in-turn", plan.in_turn, "One thread for the proxy and all else");
  options.add_flag("--phases", plan.phases, "Also measure where the time goes, with clocks that take some themselves");
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  setenv("FERRY_UCX_LIBRARY", FERRY_NULL_UCX_FOLDER, 1);
  setenv("UCX_TLS", "rc,cuda_copy", 1);
  setenv("FERRY_NULL_UCX_POLLS", std::to_string(plan.num_polls).c_str(), 1);
  nlohmann::json reports = nlohmann::json::array();
  for (const int num_peers : plan.peers) {
    World world(plan, num_peers);
    for (const int window : plan.windows) {
      const std::uint64_t share = plan.num_chunks / static_cast<std::uint64_t>(num_peers);
      std::vector<Account> accounts;
      for (int run = 0; run < plan.num_runs; ++run) {
        accounts.push_back(world.measure(share, static_cast<std::uint64_t>(window)));
      }
      nlohmann::json report = report_of(accounts, plan.phases);
      report["peers"] = num_peers;
      report["window"] = window;
      reports.push_back(std::move(report));
    }
  }
  fmt::print("{}\n", reports.dump(2));
  return 0;
}
