#include "one_sided/driver.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "node/futex.hpp"

namespace ferry::one_sided {
namespace {

/// Channels of the engine. An atomic waits for earlier puts on its channel; atomics that need not wait have a channel
/// of their own.
enum Channel : int { kPuts = 0, kAtomics = 1 };

/// Limits between two flushes of a peer, for operations and for source bytes that the driver has copied: beyond them a
/// flush begins by itself; at twice these amounts under way, nothing is issued. They bound the state that engines hold
/// and order.
constexpr std::uint64_t kFlushAfter = 4096;
constexpr std::size_t kFlushAfterBytes = std::size_t{4} << 20;

/// Size of the blocks that hold copies of small sources, once there is more than one copy.
constexpr std::size_t kCopyBlockBytes = std::size_t{4} << 10;

/// Longest get passed to the engine at once: an engine that answers gets by messages queues a whole get.
constexpr std::size_t kMaxGetBytes = std::size_t{1} << 20;

/// Requests of a source issued in one turn; the engine is polled between turns.
constexpr int kMaxRequestsPerTurn = 256;
/// Rounds of polling after a caller has issued an operation: enough to send it off.
constexpr int kIssueRounds = 4;

}  // namespace

Driver::Driver(std::unique_ptr<net::Engine> engine, const net::EngineOptions& options, std::function<void()> changed)
    : engine_(std::move(engine)),
      num_peers_(options.num_peers),
      changed_(std::move(changed)),
      losses_(static_cast<std::size_t>(options.num_peers)),
      peers_(static_cast<std::size_t>(options.num_peers)),
      close_timeout_ns_(options.timeout_ns) {}

Driver::~Driver() {
  {
    const std::lock_guard lock(mutex_);
    stop_.store(true, std::memory_order_relaxed);
  }
  wake_.signal();
  if (thread_.joinable()) thread_.join();
  if (engine_ == nullptr) return;
  engine_->limit_close_time(close_timeout_ns_);
  engine_->close();
}

Status Driver::start(std::span<const net::Blob> addresses) {
  if (wake_.get() < 0) {
    return Status(ErrorCode::kSystem,
                  fmt::format("one-sided driver: eventfd failed: {}; raise the open-file limit (ulimit -n) if "
                              "descriptors ran out",
                              std::strerror(wake_.error())));
  }
  net::EngineEvents events;
  events.notified = [](int, int, std::uint64_t) {};
  events.lost = [this](int peer, const Status& why) { on_lost(peer, why); };
  events.completed = [this](int peer, std::uint64_t ticket, std::uint64_t value) { on_completed(peer, ticket, value); };
  events.apply_atomic = apply_;
  events.changed = [this] { ++num_changes_; };
  if (Status status = engine_->connect(addresses, std::move(events)); !status.ok()) return status;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status(ErrorCode::kSystem,
                  fmt::format("one-sided driver: cannot start its thread: {}; raise the limit of threads (ulimit -u)",
                              error.what()));
  }
  return {};
}

std::uint64_t Driver::num_parts(const NetworkRequest& request) {
  return request.kind == NetworkRequest::Kind::kGet ? (request.num_bytes + kMaxGetBytes - 1) / kMaxGetBytes : 1;
}

bool Driver::can_issue(int peer) const {
  const Peer& to = peers_[static_cast<std::size_t>(peer)];
  return to.flush_done >= to.fence && to.num_since_full < 2 * kFlushAfter && to.copied_bytes < 2 * kFlushAfterBytes;
}

std::uint64_t Driver::add_ticket(const Ticket& ticket) {
  tickets_.emplace(++last_ticket_, ticket);
  return last_ticket_;
}

void Driver::begin_flush(int peer, Completion* completion) {
  Peer& to = at(peer);
  to.num_issued = 0;
  to.copied_since_flush = 0;
  engine_->flush(peer, add_ticket({.peer = peer, .completion = completion, .flush = ++to.flush_begun}));
}

/// Small sources share a block, so that few copies need memory from the system.
std::span<const std::byte> Driver::copy(Peer& to, std::span<const std::byte> source) {
  const std::uint64_t flush = to.flush_begun + 1;
  const auto has_room = [&](const Copies& copies) {
    return copies.flush == flush && source.size() <= copies.bytes.capacity() - copies.bytes.size();
  };
  if (to.copies.empty() || !has_room(to.copies.back())) {
    to.copies.push_back({.flush = flush, .bytes = {}});
    to.copies.back().bytes.reserve(std::max(source.size(), to.num_issued == 0 ? source.size() : kCopyBlockBytes));
  }
  std::vector<std::byte>& bytes = to.copies.back().bytes;
  const std::size_t begin = bytes.size();
  bytes.insert(bytes.end(), source.begin(), source.end());
  to.copied_bytes += source.size();
  to.copied_since_flush += source.size();
  return std::span(bytes).subspan(begin);
}

/// Losses of a source's requests are reported only through their completions.
void Driver::issue(const NetworkRequest& request, Asker asker) {
  Peer& to = at(request.peer);
  const bool by_call = asker == Asker::kCall;
  if (losses_[static_cast<std::size_t>(request.peer)].gone.load(std::memory_order_relaxed)) {
    using Kind = NetworkRequest::Kind;
    if (request.kind == Kind::kFence || request.kind == Kind::kOrder || request.kind == Kind::kShow) {
      return;  // it loses no operation that was not reported already
    }
    to.has_failed |= by_call && request.counts;
    // One report per part, like the end of the operation.
    for (std::uint64_t part = 0; request.completion != nullptr && part < num_parts(request); ++part) {
      request.completion->lost(request.peer);
    }
    return;
  }
  switch (request.kind) {
    case NetworkRequest::Kind::kShow:
      if (to.num_issued > 0 && !engine_->shows_puts(request.peer)) begin_flush(request.peer, nullptr);
      return;
    case NetworkRequest::Kind::kOrder:
      engine_->order_puts(request.peer);
      return;
    case NetworkRequest::Kind::kFence:
      if (to.num_issued > 0) begin_flush(request.peer, nullptr);
      to.fence = to.flush_begun;
      return;
    case NetworkRequest::Kind::kFlush:
      begin_flush(request.peer, request.completion);
      return;
    case NetworkRequest::Kind::kRelease:
      if (!engine_->is_released(request.peer)) {
        engine_->release(request.peer, add_ticket({.peer = request.peer, .completion = request.completion}));
      } else if (request.completion != nullptr) {
        // Usual where puts are messages, which UCX has copied when its call returns.
        ++num_changes_;
        request.completion->done(0);
      }
      return;
    case NetworkRequest::Kind::kGet: {
      for (std::size_t done = 0; done < request.num_bytes; done += kMaxGetBytes) {
        const std::span into(request.local + done, std::min(kMaxGetBytes, request.num_bytes - done));
        // Answers arrive in any order, so each piece is counted; the completion is for the whole get.
        if (by_call) ++to.num_pending_gets;
        engine_->get(request.peer, into, request.offset + done,
                     add_ticket({.peer = request.peer, .completion = request.completion, .pending_get = by_call}));
      }
      return;
    }
    case NetworkRequest::Kind::kPut:
    case NetworkRequest::Kind::kPutSignal: {
      std::span<const std::byte> source(request.local, request.num_bytes);
      if (request.copy_source && !source.empty()) {
        source = copy(to, source);
      }
      if (request.kind == NetworkRequest::Kind::kPut) {
        if (!source.empty()) engine_->put_from(request.peer, kPuts, source, request.offset);
      } else if (source.empty()) {
        engine_->atomic(request.peer, kPuts, request.op, net::kNoTicket);
      } else {
        engine_->put_atomic(request.peer, kPuts, source, request.offset, request.op);
      }
      break;
    }
    case NetworkRequest::Kind::kAtomic:
      engine_->atomic(request.peer, kAtomics, request.op,
                      request.completion == nullptr
                          ? net::kNoTicket
                          : add_ticket({.peer = request.peer, .completion = request.completion}));
      if (!request.counts) return;
      break;
  }
  if (by_call) to.calls_end = to.flush_begun + 1;
  ++to.num_issued;
  ++to.num_since_full;
  if (to.num_issued >= kFlushAfter || to.copied_since_flush >= kFlushAfterBytes) begin_flush(request.peer, nullptr);
}

bool Driver::try_issue(const NetworkRequest& request) {
  {
    const std::lock_guard lock(mutex_);
    if (!can_issue(request.peer)) return false;
    issue(request, Asker::kCall);
  }
  settle();
  return true;
}

/// Called after a caller has issued or waited: moves its operations and leaves remaining work to the thread.
void Driver::settle() {
  const Moved moved = turn(kIssueRounds);
  const bool is_idle = num_drivers_.load(std::memory_order_relaxed) == 0;
  if ((moved.last && is_idle) || (moved.any && armed_.load(std::memory_order_seq_cst))) wake();
}

void Driver::forget(const Completion* completion) {
  const std::lock_guard lock(mutex_);
  for (auto& [number, ticket] : tickets_) {
    if (ticket.completion != completion) continue;
    ticket.completion = nullptr;
    if (ticket.flush != 0) continue;
    engine_->forget(number);
    if (ticket.pending_get) --at(ticket.peer).num_pending_gets;
    ticket.pending_get = false;
  }
  std::erase_if(tickets_, [](const auto& entry) {
    return entry.second.completion == nullptr && entry.second.flush == 0 && !entry.second.pending_get;
  });
}

int Driver::flush_all(Completion* completion, int only) {
  int num_flushes = 0;
  {
    const std::lock_guard lock(mutex_);
    for (int peer = std::max(only, 0); peer < (only < 0 ? num_peers_ : only + 1); ++peer) {
      Peer& to = at(peer);
      if (std::exchange(to.has_failed, false)) {
        ++num_flushes;
        completion->lost(peer);
        continue;
      }
      if (losses_[static_cast<std::size_t>(peer)].gone.load(std::memory_order_relaxed)) continue;
      if (to.calls_end <= to.flush_done) continue;
      ++num_flushes;
      begin_flush(peer, completion);
    }
  }
  if (num_flushes > 0) settle();
  return num_flushes;
}

int Driver::find_pending_get(int only) const {
  const std::lock_guard lock(mutex_);
  if (only >= 0) return peers_[static_cast<std::size_t>(only)].num_pending_gets > 0 ? only : -1;
  const auto found = std::ranges::find_if(peers_, [](const Peer& peer) { return peer.num_pending_gets > 0; });
  return found == peers_.end() ? -1 : static_cast<int>(found - peers_.begin());
}

int Driver::find_late(const Completion* completion, int only) const {
  int late = -1;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, ticket] : tickets_) {
      if (ticket.completion == completion && (late < 0 || ticket.peer < late)) late = ticket.peer;
    }
  }
  return late < 0 ? find_pending_get(only) : late;
}

int Driver::take_failure(int peer) {
  const std::lock_guard lock(mutex_);
  if (peer >= 0) return std::exchange(at(peer).has_failed, false) ? peer : -1;
  const auto found = std::ranges::find_if(peers_, [](const Peer& one) { return one.has_failed; });
  if (found == peers_.end()) return -1;
  found->has_failed = false;
  return static_cast<int>(found - peers_.begin());
}

void Driver::on_completed(int peer, std::uint64_t ticket, std::uint64_t value) {
  const auto found = tickets_.find(ticket);
  if (found == tickets_.end() || found->second.peer != peer) return;
  const Ticket done = found->second;
  tickets_.erase(found);
  ++num_changes_;
  Peer& from = at(peer);
  if (done.pending_get) --from.num_pending_gets;
  if (done.flush > from.flush_done) {
    from.flush_done = done.flush;
    from.num_since_full = from.flush_done == from.flush_begun ? from.num_issued : kFlushAfter;
    while (!from.copies.empty() && from.copies.front().flush <= from.flush_done) {
      from.copied_bytes -= from.copies.front().bytes.size();
      from.copies.pop_front();
    }
  }
  if (done.completion != nullptr) done.completion->done(value);
}

void Driver::on_lost(int peer, const Status& why) {
  if (peer < 0 || peer >= num_peers_) return;
  Loss& loss = losses_[static_cast<std::size_t>(peer)];
  if (loss.gone.load(std::memory_order_relaxed)) return;
  loss.why = why;
  loss.gone.store(true, std::memory_order_release);
  ++num_changes_;
  Peer& gone = at(peer);
  gone.has_failed = gone.calls_end > gone.flush_done || gone.num_pending_gets > 0;
  gone.num_pending_gets = 0;
  gone.fence = 0;
  gone.num_since_full = 0;
  gone.copied_bytes = 0;
  std::vector<Completion*> losers;
  for (auto entry = tickets_.begin(); entry != tickets_.end();) {
    if (entry->second.peer != peer) {
      ++entry;
      continue;
    }
    if (entry->second.completion != nullptr) losers.push_back(entry->second.completion);
    entry = tickets_.erase(entry);
  }
  for (Completion* loser : losers) loser->lost(peer);
}

bool Driver::serve_sources() {
  bool moved = false;
  const CanIssue can_issue = [this](int peer) { return this->can_issue(peer); };
  for (RequestSource* source : sources_) {
    for (int served = 0; served < kMaxRequestsPerTurn; ++served) {
      const NetworkRequest* request = source->front(can_issue);
      if (request == nullptr) break;
      issue(*request, Asker::kSource);
      source->taken();
      moved = true;
    }
  }
  return moved;
}

Driver::Moved Driver::turn(int max_rounds) {
  Moved moved;
  bool tell = false;
  {
    const std::lock_guard lock(mutex_);
    for (int round = 0; round < max_rounds; ++round) {
      const bool served = serve_sources();
      moved.last = engine_->poll() || served;
      moved.any |= moved.last;
      if (!moved.last) break;
    }
    tell = num_told_ != num_changes_;
    num_told_ = num_changes_;
  }
  if (tell) changed_();
  return moved;
}

bool Driver::progress() { return turn(1).any; }

void Driver::begin_wait() { num_drivers_.fetch_add(1, std::memory_order_relaxed); }

void Driver::end_wait() {
  num_drivers_.fetch_sub(1, std::memory_order_relaxed);
  last_drive_ns_.store(node::monotonic_ns(), std::memory_order_relaxed);
  // Usually everything has been sent, and the caller must return soon. The thread handles later events at its next
  // check.
  if (armed_.load(std::memory_order_seq_cst) || has_unsent()) settle();
}

bool Driver::has_unsent() {
  const std::lock_guard lock(mutex_);
  for (int peer = 0; peer < num_peers_; ++peer) {
    if (!engine_->flushed(peer)) return true;
  }
  return false;
}

void Driver::hand_over() {
  last_drive_ns_.store(0, std::memory_order_relaxed);
  // If armed, the engine wakes it.
  if (!armed_.load(std::memory_order_seq_cst)) wake();
}

void Driver::attach(RequestSource* source) {
  {
    const std::lock_guard lock(mutex_);
    sources_.push_back(source);
    num_sources_.store(sources_.size(), std::memory_order_relaxed);
  }
  wake();
}

void Driver::detach(RequestSource* source) {
  const std::lock_guard lock(mutex_);
  std::erase(sources_, source);
  num_sources_.store(sources_.size(), std::memory_order_relaxed);
}

void Driver::wake() {
  if (asleep_.exchange(false, std::memory_order_seq_cst)) wake_.signal();
}

Status Driver::peer_status(int peer) const {
  const Loss& loss = losses_[static_cast<std::size_t>(peer)];
  return loss.gone.load(std::memory_order_acquire) ? loss.why : Status();
}

std::vector<net::Path> Driver::paths() {
  const std::lock_guard lock(mutex_);
  return engine_->paths();
}

void Driver::limit_close_time(std::int64_t timeout_ns) {
  const std::lock_guard lock(mutex_);
  close_timeout_ns_ = std::min(close_timeout_ns_, timeout_ns);
}

}  // namespace ferry::one_sided
