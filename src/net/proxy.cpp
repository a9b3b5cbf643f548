#include "net/proxy.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <future>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "ferry/bootstrap.hpp"
#include "net/wake_fd.hpp"

namespace ferry::net {
namespace {

using Clock = std::chrono::steady_clock;

/// An answer that comes this soon is met awake by a thread that has a core to itself. Where cores are shared there is
/// no such wait: on 2 cores with 8 ranks the rings of two nodes carried 2.6 GB/s over TCP without and 2.0 GB/s with it
/// (benchmarks/rail_stage.cpp).
constexpr std::chrono::microseconds kAwakeTime{20};
/// Sleeping ends at the latest after this, so that a wake-up that a network library loses costs no more.
constexpr std::int64_t kLongestSleepNs = 1'000'000'000;
/// Where nothing wakes the thread (an engine without a descriptor, or one that must be polled until something left):
/// the first sleep, and how long they grow.
constexpr std::int64_t kFirstNapNs = 50'000;
constexpr std::int64_t kLongestNapNs = 2'000'000;

struct Order {
  enum class Kind { kPut, kNotify, kRoutes };
  Kind kind = Kind::kPut;
  int peer = 0;
  int channel = 0;
  std::size_t local_offset = 0;
  std::size_t remote_offset = 0;
  std::size_t num_bytes = 0;
  std::uint64_t value = 0;
  std::promise<std::vector<Route>>* routes = nullptr;
};

/// What the network knows about a peer. `why` is written before `gone` is set, and never again.
struct Loss {
  std::atomic<bool> gone{false};
  Status why;
};

/// Written by the rank's thread; atomic because anybody may ask.
struct TrafficCounters {
  std::atomic<std::uint64_t> put_bytes{0};
  std::atomic<std::uint64_t> num_puts{0};
  std::atomic<std::uint64_t> num_notifies{0};
};

/// Descriptors below 0 are left out.
void poll_for(std::span<pollfd> entries, std::int64_t timeout_ns) {
  const timespec timeout{timeout_ns / kNsPerSecond, timeout_ns % kNsPerSecond};
  ppoll(entries.data(), entries.size(), &timeout, nullptr);
}

void add(std::atomic<std::uint64_t>* counter, std::uint64_t amount) {
  counter->fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace

class Proxy::Impl {
 public:
  Impl(std::unique_ptr<Engine> engine, const EngineOptions& options, std::function<void()> ring, bool waits_awake)
      : engine_(std::move(engine)),
        num_peers_(options.num_peers),
        num_channels_(options.num_channels),
        ring_(std::move(ring)),
        awake_time_(waits_awake ? kAwakeTime : std::chrono::microseconds(0)),
        close_timeout_ns_(options.timeout_ns),
        received_(static_cast<std::size_t>(options.num_peers) * static_cast<std::size_t>(options.num_channels)),
        losses_(static_cast<std::size_t>(options.num_peers)),
        traffic_(static_cast<std::size_t>(options.num_peers)) {}

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      taken_ = false;
    }
    given_back_.notify_one();
    wake_.signal();
    if (thread_.joinable()) {
      thread_.join();
    } else if (engine_ != nullptr) {
      engine_->close();
    }
  }

  Status start(std::span<const Blob> addresses);
  void hurry(std::int64_t timeout_ns);
  void push(const Order& order);
  std::vector<Route> routes();
  void take_over();
  void give_back();
  bool drive();
  bool sleep_at_most(std::int64_t timeout_ns);

  std::atomic<std::uint64_t>& word(int peer, int channel) {
    return received_[static_cast<std::size_t>(peer) * static_cast<std::size_t>(num_channels_) +
                     static_cast<std::size_t>(channel)];
  }
  Loss& loss(int peer) { return losses_[static_cast<std::size_t>(peer)]; }
  TrafficCounters& traffic(int peer) { return traffic_[static_cast<std::size_t>(peer)]; }

 private:
  struct Sleep {
    int engine_fd = -1;  // -1: nothing wakes the sleeper
    std::int64_t timeout_ns = 0;
  };

  bool is_peer(int peer) const { return peer >= 0 && peer < num_peers_; }
  void on_notified(int peer, int channel, std::uint64_t value);
  void on_lost(int peer, const Status& why);
  void run();
  bool begin_turn(std::vector<Order>* orders);
  bool obey(std::vector<Order>* orders);
  void obey(const Order& order);
  std::optional<Sleep> plan_sleep(std::int64_t* nap_ns, std::int64_t longest_ns);
  void sleep(std::int64_t* nap_ns);

  std::unique_ptr<Engine> engine_;
  const int num_peers_;
  const int num_channels_;
  const std::function<void()> ring_;
  const std::chrono::microseconds awake_time_;
  std::int64_t close_timeout_ns_;  // guarded by mutex_
  std::vector<std::atomic<std::uint64_t>> received_;
  std::vector<Loss> losses_;
  std::vector<TrafficCounters> traffic_;

  WakeFd wake_;
  std::mutex mutex_;
  std::vector<Order> orders_;  // guarded by mutex_, as the next two
  bool asleep_ = false;        // the thread is in poll(2), or about to be, and wants a signal
  bool stop_ = false;
  bool taken_ = false;    // the rank's thread drives, or waits for the end of the thread's turn
  bool turning_ = false;  // the thread drives
  std::condition_variable turn_ended_;
  std::condition_variable given_back_;
  bool started_ = false;  // by the rank's thread only, as the next two
  bool driving_ = false;
  std::int64_t own_nap_ns_ = 0;
  bool changed_ = false;  // by the one who drives: a word changed since the last ring
  std::thread thread_;
};

Status Proxy::Impl::start(std::span<const Blob> addresses) {
  if (started_) return Status(ErrorCode::kInternal, "network proxy: started twice; please report this");
  if (wake_.get() < 0) {
    return Status(ErrorCode::kSystem,
                  fmt::format("network proxy: eventfd failed: {}; raise the open-file limit (ulimit -n) if descriptors "
                              "ran out",
                              std::strerror(wake_.error())));
  }
  EngineEvents events;
  events.notified = [this](int peer, int channel, std::uint64_t value) { on_notified(peer, channel, value); };
  events.lost = [this](int peer, const Status& why) { on_lost(peer, why); };
  if (Status status = engine_->connect(addresses, std::move(events)); !status.ok()) return status;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status(
        ErrorCode::kSystem,
        fmt::format("network proxy: no thread for it: {}; raise the limit of threads (ulimit -u)", error.what()));
  }
  started_ = true;
  return {};
}

void Proxy::Impl::push(const Order& order) {
  if (!started_) return;
  if (driving_) {
    obey(order);
    return;
  }
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    orders_.push_back(order);
    wake = std::exchange(asleep_, false);
  }
  if (wake) wake_.signal();
}

std::vector<Route> Proxy::Impl::routes() {
  if (!started_) return {};
  std::promise<std::vector<Route>> answer;
  std::future<std::vector<Route>> answered = answer.get_future();
  Order order;
  order.kind = Order::Kind::kRoutes;
  order.routes = &answer;
  push(order);
  return answered.get();
}

void Proxy::Impl::on_notified(int peer, int channel, std::uint64_t value) {
  if (!is_peer(peer) || channel < 0 || channel >= num_channels_) return;
  std::atomic<std::uint64_t>& highest = word(peer, channel);
  if (value <= highest.load(std::memory_order_relaxed)) return;
  highest.store(value, std::memory_order_release);
  changed_ = true;
}

void Proxy::Impl::on_lost(int peer, const Status& why) {
  if (!is_peer(peer)) return;
  Loss& lost = loss(peer);
  if (lost.gone.load(std::memory_order_relaxed)) return;
  lost.why = why;
  lost.gone.store(true, std::memory_order_release);
  changed_ = true;
}

/// Who drives: the thread, from here to the end of its turn, unless the rank's thread has taken over. False: stop.
bool Proxy::Impl::begin_turn(std::vector<Order>* orders) {
  std::unique_lock lock(mutex_);
  turning_ = false;
  if (taken_) {
    turn_ended_.notify_one();
    given_back_.wait(lock, [this] { return !taken_; });
  }
  turning_ = true;
  orders->swap(orders_);
  return !stop_;
}

void Proxy::Impl::run() {
  std::vector<Order> orders;
  Clock::time_point last_move = Clock::now();
  std::int64_t nap_ns = 0;
  while (true) {
    const bool stopping = !begin_turn(&orders);
    bool moved = obey(&orders);
    moved |= engine_->poll();
    if (std::exchange(changed_, false)) ring_();
    if (stopping) break;
    if (moved) {
      last_move = Clock::now();
      nap_ns = 0;
    } else if (Clock::now() - last_move >= awake_time_) {
      sleep(&nap_ns);
    }
  }
  std::int64_t timeout_ns = 0;
  {
    const std::lock_guard lock(mutex_);
    timeout_ns = close_timeout_ns_;
  }
  engine_->hurry(timeout_ns);
  engine_->close();
}

void Proxy::Impl::take_over() {
  if (!started_) return;
  std::vector<Order> orders;
  {
    std::unique_lock lock(mutex_);
    taken_ = true;
    turn_ended_.wait(lock, [this] { return !turning_; });
    orders.swap(orders_);
  }
  driving_ = true;
  own_nap_ns_ = 0;
  obey(&orders);
}

void Proxy::Impl::give_back() {
  if (!driving_) return;
  // What was given last goes out now: the thread may have to wait for a core.
  drive();
  driving_ = false;
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    taken_ = false;
    wake = std::exchange(asleep_, false);
  }
  // Asleep since before: what it waited for may have come and gone.
  if (wake) {
    wake_.signal();
  } else {
    given_back_.notify_one();
  }
}

bool Proxy::Impl::drive() {
  if (!driving_) return false;
  const bool moved = engine_->poll();
  changed_ = false;
  if (moved) own_nap_ns_ = 0;
  return moved;
}

void Proxy::Impl::hurry(std::int64_t timeout_ns) {
  const std::lock_guard lock(mutex_);
  close_timeout_ns_ = std::min(close_timeout_ns_, timeout_ns);
}

bool Proxy::Impl::obey(std::vector<Order>* orders) {
  if (orders->empty()) return false;
  for (const Order& order : *orders) obey(order);
  orders->clear();
  return true;
}

void Proxy::Impl::obey(const Order& order) {
  if (order.kind == Order::Kind::kRoutes) {
    order.routes->set_value(engine_->routes());
  } else if (loss(order.peer).gone.load(std::memory_order_relaxed)) {
    return;
  } else if (order.kind == Order::Kind::kPut) {
    engine_->put(order.peer, order.channel, order.local_offset, order.remote_offset, order.num_bytes);
  } else {
    engine_->notify(order.peer, order.channel, order.value);
  }
}

/// How the driver may sleep: will the engine wake it, and for how long at most. Null: not at all, poll first.
std::optional<Proxy::Impl::Sleep> Proxy::Impl::plan_sleep(std::int64_t* nap_ns, std::int64_t longest_ns) {
  const int engine_fd = engine_->event_fd();
  if (engine_fd >= 0 && engine_->arm()) {
    *nap_ns = 0;
    return Sleep{engine_fd, longest_ns};
  }
  const std::int64_t now_ns = *nap_ns;
  // Most often something has just arrived.
  *nap_ns = std::clamp(*nap_ns * 2, kFirstNapNs, kLongestNapNs);
  if (now_ns == 0) return std::nullopt;
  return Sleep{-1, std::min(now_ns, longest_ns)};
}

/// Until there are orders or the engine has something to do.
void Proxy::Impl::sleep(std::int64_t* nap_ns) {
  const std::optional<Sleep> plan = plan_sleep(nap_ns, kLongestSleepNs);
  if (!plan) return;
  {
    const std::lock_guard lock(mutex_);
    if (!orders_.empty() || stop_ || taken_) return;
    asleep_ = true;
    turning_ = false;
  }
  std::array<pollfd, 2> entries{pollfd{wake_.get(), POLLIN, 0}, pollfd{plan->engine_fd, POLLIN, 0}};
  poll_for(entries, plan->timeout_ns);
  const std::lock_guard lock(mutex_);
  asleep_ = false;
  if ((entries[0].revents & POLLIN) != 0) wake_.clear();
}

bool Proxy::Impl::sleep_at_most(std::int64_t timeout_ns) {
  if (!driving_) return false;
  if (const std::optional<Sleep> plan = plan_sleep(&own_nap_ns_, timeout_ns); plan) {
    std::array<pollfd, 1> entries{pollfd{plan->engine_fd, POLLIN, 0}};
    poll_for(entries, plan->timeout_ns);
  }
  return true;
}

Proxy::Proxy(std::unique_ptr<Engine> engine, const EngineOptions& options, std::function<void()> ring, bool waits_awake)
    : impl_(std::make_unique<Impl>(std::move(engine), options, std::move(ring), waits_awake)) {}

Proxy::~Proxy() = default;

Status Proxy::start(std::span<const Blob> addresses) { return impl_->start(addresses); }

void Proxy::put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) {
  add(&impl_->traffic(peer).put_bytes, num_bytes);
  add(&impl_->traffic(peer).num_puts, 1);
  Order order;
  order.kind = Order::Kind::kPut;
  order.peer = peer;
  order.channel = channel;
  order.local_offset = local_offset;
  order.remote_offset = remote_offset;
  order.num_bytes = num_bytes;
  impl_->push(order);
}

void Proxy::hurry(std::int64_t timeout_ns) { impl_->hurry(timeout_ns); }

void Proxy::notify(int peer, int channel, std::uint64_t value) {
  add(&impl_->traffic(peer).num_notifies, 1);
  Order order;
  order.kind = Order::Kind::kNotify;
  order.peer = peer;
  order.channel = channel;
  order.value = value;
  impl_->push(order);
}

std::uint64_t Proxy::received(int peer, int channel) const {
  return impl_->word(peer, channel).load(std::memory_order_acquire);
}

Status Proxy::peer_status(int peer) const {
  const Loss& loss = impl_->loss(peer);
  return loss.gone.load(std::memory_order_acquire) ? loss.why : Status();
}

void Proxy::take_over() { impl_->take_over(); }

void Proxy::give_back() { impl_->give_back(); }

bool Proxy::drive() { return impl_->drive(); }

bool Proxy::sleep(std::int64_t timeout_ns) { return impl_->sleep_at_most(timeout_ns); }

PeerTraffic Proxy::traffic(int peer) const {
  const TrafficCounters& counters = impl_->traffic(peer);
  return {.put_bytes = counters.put_bytes.load(std::memory_order_relaxed),
          .num_puts = counters.num_puts.load(std::memory_order_relaxed),
          .num_notifies = counters.num_notifies.load(std::memory_order_relaxed)};
}

std::vector<Route> Proxy::routes() { return impl_->routes(); }

}  // namespace ferry::net
