#include "net/proxy.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "ferry/bootstrap.hpp"
#include "net/numa.hpp"

namespace ferry::net {
namespace {

using Clock = std::chrono::steady_clock;

/// Time that the thread polls before it sleeps: an answer within it costs no wake-up if the thread has its own core. On
/// shared cores the thread does not poll: on 2 cores with 8 ranks the rings of two nodes carried 2.6 GB/s over TCP
/// without polling and 2.0 GB/s with it (benchmarks/rail_stage.cpp).
constexpr std::chrono::microseconds kSpinTime{20};
/// Longest sleep. Bounds the cost of a wake-up lost by a network library.
constexpr std::int64_t kLongestSleepNs = 1'000'000'000;
/// First and longest sleep if nothing wakes the thread: an engine without a descriptor, or one that must be polled
/// until an operation has left.
constexpr std::int64_t kFirstNapNs = 50'000;
constexpr std::int64_t kLongestNapNs = 2'000'000;
/// Bytes of ring chunks handed to the engine between two polls. Over TCP the engine copies them at once: eight
/// mebibytes take two milliseconds, during which arrived credits are not seen. docs/transport.md has the measured gain.
constexpr std::size_t kMaxTurnBytes = std::size_t{512} << 10;

/// Flag in the value that carries `filled`: no more chunks follow.
constexpr std::uint64_t kRingClosed = std::uint64_t{1} << 63;

using Word = std::atomic_ref<std::uint64_t>;

/// Negative descriptors are ignored.
void poll_for(std::span<pollfd> entries, std::int64_t timeout_ns) {
  const timespec timeout{timeout_ns / kNsPerSecond, timeout_ns % kNsPerSecond};
  ppoll(entries.data(), entries.size(), &timeout, nullptr);
}

void add(std::atomic<std::uint64_t>* counter, std::uint64_t amount) {
  counter->fetch_add(amount, std::memory_order_relaxed);
}

/// Raises a word that only this thread writes. False if it already has this value or a higher one.
bool raise(Word word, std::uint64_t value) {
  if (value <= word.load(std::memory_order_relaxed)) return false;
  word.store(value, std::memory_order_release);
  return true;
}

}  // namespace

Proxy::Proxy(std::unique_ptr<Engine> engine, const EngineOptions& options, std::function<void()> wake_rank, bool spins)
    : engine_(std::move(engine)),
      num_peers_(options.num_peers),
      num_channels_(options.num_channels),
      wake_rank_(std::move(wake_rank)),
      spin_time_(spins ? kSpinTime : std::chrono::microseconds(0)),
      close_timeout_ns_(options.timeout_ns),
      received_(static_cast<std::size_t>(options.num_peers) * static_cast<std::size_t>(options.num_channels)),
      losses_(static_cast<std::size_t>(options.num_peers)),
      traffic_(static_cast<std::size_t>(options.num_peers)),
      rings_(2 * static_cast<std::size_t>(options.num_peers)) {}

Proxy::~Proxy() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    taken_ = false;
    asked_.store(true, std::memory_order_release);
  }
  released_.notify_one();
  wake_.signal();
  if (thread_.joinable()) {
    thread_.join();
  } else if (engine_ != nullptr) {
    engine_->close();
  }
}

void Proxy::attach_ring(int peer, const RingPort& port) { attach(peer, &ring(peer), port); }

void Proxy::attach_kernel_ring(int peer, const RingPort& port) { attach(peer, &kernel_ring(peer), port); }

void Proxy::attach(int peer, Ring* ring, const RingPort& port) {
  ring->port = port;
  attached_.emplace_back(peer, ring);
}

Status Proxy::start(std::span<const Blob> addresses) {
  if (started_) return Status(ErrorCode::kInternal, "network proxy: started twice; please report this bug");
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
    thread_ = std::thread([this] {
      net::run_on(cpus_);
      run();
    });
  } catch (const std::system_error& error) {
    return Status(ErrorCode::kSystem,
                  fmt::format("network proxy: cannot start its thread: {}; raise the limit of threads (ulimit -u)",
                              error.what()));
  }
  started_ = true;
  return {};
}

void Proxy::push(const Order& order) {
  if (!started_) return;
  if (driving_) {
    execute(order);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    orders_.push_back(order);
    asked_.store(true, std::memory_order_release);
  }
  wake();
}

void Proxy::wake() {
  if (asleep_.exchange(false, std::memory_order_seq_cst)) wake_.signal();
}

void Proxy::keep_polling(bool polling) {
  polling_.store(polling, std::memory_order_seq_cst);
  if (polling) wake();
}

void Proxy::put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) {
  add(&counters(peer).put_bytes, num_bytes);
  add(&counters(peer).num_puts, 1);
  Order order;
  order.kind = Order::Kind::kPut;
  order.peer = peer;
  order.channel = channel;
  order.local_offset = local_offset;
  order.remote_offset = remote_offset;
  order.num_bytes = num_bytes;
  push(order);
}

void Proxy::notify(int peer, int channel, std::uint64_t value) {
  add(&counters(peer).num_notifies, 1);
  Order order;
  order.kind = Order::Kind::kNotify;
  order.peer = peer;
  order.channel = channel;
  order.value = value;
  push(order);
}

void Proxy::put_notify(int peer, int channel, std::size_t local_offset, std::size_t remote_offset,
                       std::size_t num_bytes, std::uint64_t value) {
  add(&counters(peer).put_bytes, num_bytes);
  add(&counters(peer).num_puts, 1);
  add(&counters(peer).num_notifies, 1);
  Order order;
  order.kind = Order::Kind::kPutNotify;
  order.peer = peer;
  order.channel = channel;
  order.local_offset = local_offset;
  order.remote_offset = remote_offset;
  order.num_bytes = num_bytes;
  order.value = value;
  push(order);
}

void Proxy::close_ring(int peer) {
  Order order;
  order.kind = Order::Kind::kCloseRing;
  order.peer = peer;
  push(order);
}

std::vector<Path> Proxy::paths() {
  if (!started_) return {};
  std::promise<std::vector<Path>> answer;
  std::future<std::vector<Path>> answered = answer.get_future();
  Order order;
  order.kind = Order::Kind::kPaths;
  order.paths = &answer;
  push(order);
  return answered.get();
}

Status Proxy::peer_status(int peer) const {
  const Loss& lost = losses_[static_cast<std::size_t>(peer)];
  return lost.gone.load(std::memory_order_acquire) ? lost.why : Status();
}

PeerTraffic Proxy::traffic(int peer) const {
  const TrafficCounters& counted = traffic_[static_cast<std::size_t>(peer)];
  return {.put_bytes = counted.put_bytes.load(std::memory_order_relaxed),
          .num_puts = counted.num_puts.load(std::memory_order_relaxed),
          .num_notifies = counted.num_notifies.load(std::memory_order_relaxed)};
}

void Proxy::limit_close_time(std::int64_t timeout_ns) {
  const std::lock_guard lock(mutex_);
  close_timeout_ns_ = std::min(close_timeout_ns_, timeout_ns);
}

void Proxy::on_notified(int peer, int channel, std::uint64_t value) {
  if (!is_peer(peer) || channel < 0 || channel >= num_channels_) return;
  for (Ring* one : {&ring(peer), &kernel_ring(peer)}) {
    if (one->port.words == nullptr) continue;
    if (channel != one->port.chunk_channel && channel != one->port.credit_channel) continue;
    changed_ |= on_ring_notified(*one, channel, value);
    return;
  }
  std::atomic<std::uint64_t>& highest = received_[static_cast<std::size_t>(peer * num_channels_ + channel)];
  if (value <= highest.load(std::memory_order_relaxed)) return;
  highest.store(value, std::memory_order_release);
  changed_ = true;
}

bool Proxy::on_ring_notified(Ring& ring, int channel, std::uint64_t value) {
  RingWords& words = *ring.port.words;
  if (channel == ring.port.credit_channel) return raise(Word(words.credits), value);
  const bool arrived = raise(Word(words.arrived), value & ~kRingClosed);
  const bool closed = (value & kRingClosed) != 0 && raise(Word(words.closed), 1);
  return arrived || closed;
}

void Proxy::on_lost(int peer, const Status& why) {
  if (!is_peer(peer)) return;
  Loss& lost = loss(peer);
  if (lost.gone.load(std::memory_order_relaxed)) return;
  lost.why = why;
  lost.gone.store(true, std::memory_order_release);
  changed_ = true;
}

/// Begins a turn of the proxy's thread, which drives the engine until the end of the turn unless the rank's thread
/// does. False: stop.
bool Proxy::begin_turn(std::vector<Order>* orders) {
  // The last turn goes on unless something was asked for, or the thread has slept.
  if (turning_ && !asked_.load(std::memory_order_acquire)) return true;
  std::unique_lock lock(mutex_);
  asked_.store(false, std::memory_order_relaxed);
  turning_ = false;
  if (taken_) {
    turn_ended_.notify_one();
    released_.wait(lock, [this] { return !taken_; });
    asked_.store(false, std::memory_order_relaxed);
  }
  turning_ = true;
  orders->swap(orders_);
  return !stop_;
}

void Proxy::run() {
  std::vector<Order> orders;
  Clock::time_point last_move = Clock::now();
  std::int64_t nap_ns = 0;
  while (true) {
    const bool stopping = !begin_turn(&orders);
    // Rings before orders: close_ring() and paths() refer to chunks that were filled before the call.
    bool moved = serve_rings(orders.empty() ? kMaxTurnBytes : kNoLimit);
    moved |= execute(&orders);
    moved |= engine_->poll();
    if (std::exchange(changed_, false)) wake_rank_();
    if (stopping) break;
    if (moved) {
      last_move = Clock::now();
      nap_ns = 0;
    } else if (Clock::now() - last_move >= spin_time_) {
      if (polling_.load(std::memory_order_relaxed)) {
        // The thread that moves next may be waiting for this core: with four threads on two busy cores the rings of GPU
        // ranks took 52 ms with this yield and 150 ms and more without it, over a network that needs 47 ms
        // (benchmarks/rail_stage).
        std::this_thread::yield();
      } else {
        sleep_until_woken(&nap_ns);
      }
    }
  }
  std::int64_t timeout_ns = 0;
  {
    const std::lock_guard lock(mutex_);
    timeout_ns = close_timeout_ns_;
  }
  engine_->limit_close_time(timeout_ns);
  engine_->close();
}

void Proxy::acquire() {
  if (!started_) return;
  std::vector<Order> orders;
  {
    std::unique_lock lock(mutex_);
    taken_ = true;
    asked_.store(true, std::memory_order_release);
    turn_ended_.wait(lock, [this] { return !turning_; });
    orders.swap(orders_);
  }
  driving_ = true;
  own_nap_ns_ = 0;
  serve_rings(kNoLimit);
  execute(&orders);
}

void Proxy::release() {
  if (!driving_) return;
  // Send the last orders now: the proxy's thread may have to wait for a core.
  progress();
  driving_ = false;
  {
    const std::lock_guard lock(mutex_);
    taken_ = false;
  }
  // The proxy's thread has slept since before acquire(): this thread may have consumed the event that it waits for.
  if (asleep_.exchange(false, std::memory_order_seq_cst)) {
    wake_.signal();
  } else {
    released_.notify_one();
  }
}

bool Proxy::progress() {
  if (!driving_) return false;
  const bool moved = engine_->poll();
  changed_ = false;
  if (moved) own_nap_ns_ = 0;
  return moved;
}

bool Proxy::execute(std::vector<Order>* orders) {
  if (orders->empty()) return false;
  for (const Order& order : *orders) execute(order);
  orders->clear();
  return true;
}

void Proxy::execute(const Order& order) {
  if (order.kind == Order::Kind::kPaths) {
    order.paths->set_value(engine_->paths());
  } else if (loss(order.peer).gone.load(std::memory_order_relaxed)) {
    return;
  } else if (order.kind == Order::Kind::kPut) {
    engine_->put(order.peer, order.channel, order.local_offset, order.remote_offset, order.num_bytes);
  } else if (order.kind == Order::Kind::kNotify) {
    engine_->notify(order.peer, order.channel, order.value);
  } else if (order.kind == Order::Kind::kPutNotify) {
    engine_->put_notify(order.peer, order.channel, order.local_offset, order.remote_offset, order.num_bytes,
                        order.value);
  } else {
    for (const Ring* one : {&ring(order.peer), &kernel_ring(order.peer)}) {
      if (one->port.words == nullptr) continue;
      engine_->notify(order.peer, one->port.chunk_channel, one->num_sent | kRingClosed);
    }
  }
}

/// Bytes of the next chunk to send; nullopt: it is not filled.
std::optional<std::size_t> Proxy::next_filled(const Ring& ring, std::memory_order order) {
  const RingPort& port = ring.port;
  const std::uint64_t word = Word(port.words->filled[ring.num_sent % port.num_chunks]).load(order);
  if (!is_filled(word, ring.num_sent)) return std::nullopt;
  return bytes_of_filled(word);
}

/// Whether chunk `chunk_idx` of those that have arrived is used.
bool Proxy::is_next_used(const Ring& ring, std::uint64_t chunk_idx, std::memory_order order) {
  return Word(ring.port.words->used[chunk_idx % ring.port.num_chunks]).load(order) == chunk_idx + 1;
}

bool Proxy::serve_ring(int peer, std::size_t max_bytes) {
  const bool moved = serve(peer, ring(peer), max_bytes);
  return serve(peer, kernel_ring(peer), max_bytes) || moved;
}

/// Sends newly filled chunks, at least one and no more than `max_bytes` allows, and the credits that are due.
bool Proxy::serve(int peer, Ring& ring, std::size_t max_bytes) {
  const RingPort& port = ring.port;
  if (port.words == nullptr) return false;
  RingWords& words = *port.words;
  std::optional<std::size_t> filled_bytes = next_filled(ring, std::memory_order_acquire);
  std::uint64_t used = ring.num_credited;
  while (is_next_used(ring, used, std::memory_order_acquire)) ++used;
  if (!filled_bytes && used == ring.num_credited) return false;
  if (loss(peer).gone.load(std::memory_order_relaxed)) return false;
  bool moved = false;
  for (std::size_t sent_bytes = 0; filled_bytes && sent_bytes < max_bytes; moved = true) {
    const std::size_t offset = ring.num_sent % port.num_chunks * port.chunk_stride;
    const std::size_t num_bytes = std::min(*filled_bytes, port.chunk_stride);
    sent_bytes += num_bytes;
    engine_->put_notify(peer, port.chunk_channel, port.send_offset + offset, port.remote_offset + offset, num_bytes,
                        ++ring.num_sent);
    add(&counters(peer).put_bytes, num_bytes);
    add(&counters(peer).num_puts, 1);
    add(&counters(peer).num_notifies, 1);
    filled_bytes = next_filled(ring, std::memory_order_acquire);
  }
  if (moved) Word(words.sent).store(ring.num_sent, std::memory_order_relaxed);
  if (ring.num_credited != used) {
    ring.num_credited = used;
    engine_->notify(peer, port.credit_channel, used);
    add(&counters(peer).num_notifies, 1);
    moved = true;
  }
  return moved;
}

bool Proxy::serve_rings(std::size_t max_bytes) {
  bool moved = false;
  for (const auto& [peer, ring] : attached_) moved |= serve(peer, *ring, max_bytes);
  return moved;
}

bool Proxy::has_ring_work() const {
  return std::ranges::any_of(attached_, [](const std::pair<int, Ring*>& attached) {
    const Ring& ring = *attached.second;
    return next_filled(ring, std::memory_order_seq_cst) ||
           is_next_used(ring, ring.num_credited, std::memory_order_seq_cst);
  });
}

/// Plan for the driver's sleep: whether the engine will wake it, and the time limit. Null: do not sleep, poll first.
std::optional<Proxy::Sleep> Proxy::plan_sleep(std::int64_t* nap_ns, std::int64_t longest_ns) {
  const int engine_fd = engine_->event_fd();
  if (engine_fd >= 0 && engine_->arm()) {
    *nap_ns = 0;
    return Sleep{engine_fd, longest_ns};
  }
  const std::int64_t now_ns = *nap_ns;
  // Usually an operation has just arrived.
  *nap_ns = std::clamp(*nap_ns * 2, kFirstNapNs, kLongestNapNs);
  if (now_ns == 0) return std::nullopt;
  return Sleep{-1, std::min(now_ns, longest_ns)};
}

/// Sleeps until there are operations to send or the engine has work.
void Proxy::sleep_until_woken(std::int64_t* nap_ns) {
  const std::optional<Sleep> plan = plan_sleep(nap_ns, kLongestSleepNs);
  if (!plan) return;
  {
    const std::lock_guard lock(mutex_);
    if (stop_ || taken_) return;
    // A thread that adds work after the checks below sees the flag and wakes this one.
    asleep_.store(true, std::memory_order_seq_cst);
    if (!orders_.empty() || polling_.load(std::memory_order_seq_cst) || has_ring_work()) {
      asleep_.store(false, std::memory_order_relaxed);
      return;
    }
    turning_ = false;
  }
  std::array<pollfd, 2> entries{pollfd{wake_.get(), POLLIN, 0}, pollfd{plan->engine_fd, POLLIN, 0}};
  poll_for(entries, plan->timeout_ns);
  asleep_.store(false, std::memory_order_relaxed);
  if ((entries[0].revents & POLLIN) != 0) wake_.clear();
}

bool Proxy::sleep(std::int64_t timeout_ns) {
  if (!driving_) return false;
  if (const std::optional<Sleep> plan = plan_sleep(&own_nap_ns_, timeout_ns); plan) {
    std::array<pollfd, 1> entries{pollfd{plan->engine_fd, POLLIN, 0}};
    poll_for(entries, plan->timeout_ns);
  }
  return true;
}

}  // namespace ferry::net
