#include "one_sided/ring_source.hpp"

#include <fmt/format.h>

#include <cstring>
#include <string>
#include <utility>

#include "one_sided/request_atomics.hpp"
#include "one_sided/words.hpp"
#include "plan/to_size.hpp"

namespace ferry::one_sided {
namespace {

using device::RequestOp;
using Word = std::atomic_ref<std::uint64_t>;

/// Limit of requests completed or held in a row without the network, during which no thread can drive it.
constexpr int kMaxServedAtOnce = 256;
constexpr std::int64_t kNsPerMs = 1'000'000;

/// Value of at most eight bytes, the first one lowest.
std::uint64_t value_of(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
  return value;
}

Word word_at(std::byte* heap, std::uint64_t offset) { return Word(*reinterpret_cast<std::uint64_t*>(heap + offset)); }

}  // namespace

/// Answer that the network has still to deliver.
class RingSource::Pending final : public Completion {
 public:
  explicit Pending(RingSource& source) : source_(source) {}

  /// Expects `num_parts` callbacks.
  void begin(Epoch& epoch, PeerEpoch& peer_epoch, int peer, std::uint64_t num_parts, const device::Request* request) {
    epoch_ = &epoch;
    peer_epoch_ = &peer_epoch;
    peer_ = peer;
    num_parts_ = num_parts;
    has_reply_ = request != nullptr && request->wants_reply;
    reply_ = request != nullptr ? request->reply : 0;
    is_staged_get_ = request != nullptr && request->op == RequestOp::kGet && source_.is_staged(*request);
    answered_ = is_staged_get_ ? source_.answered_bytes(*request) : std::span<const std::byte>();
    lost_ = false;
    ++epoch.num_open;
    ++peer_epoch.num_open;
  }
  int peer() const { return peer_; }
  void close() const {
    --epoch_->num_open;
    --peer_epoch_->num_open;
    peer_epoch_->lost |= lost_;
  }

  void done(std::uint64_t value) override {
    if (--num_parts_ != 0) return;
    if (has_reply_ && !lost_) source_.reader_.answer(reply_, answered_.empty() ? value : value_of(answered_));
    source_.ended(*this);
  }
  void lost(int peer) override {
    if (!std::exchange(lost_, true)) {
      // If the peer was lost before, the driver reports it while it issues the request.
      const bool was_issued = source_.offered_ == nullptr || source_.offered_->completion != this;
      if (has_reply_) source_.reader_.lose_reply(reply_, is_staged_get_ && was_issued);
      source_.reader_.lose();
      if (source_.options_.lost) source_.options_.lost(peer);
    }
    if (--num_parts_ == 0) source_.ended(*this);
  }

 private:
  RingSource& source_;
  Epoch* epoch_ = nullptr;
  PeerEpoch* peer_epoch_ = nullptr;
  int peer_ = 0;
  std::uint64_t num_parts_ = 0;
  bool has_reply_ = false;
  bool lost_ = false;
  bool is_staged_get_ = false;
  std::span<const std::byte> answered_;  // bytes of a get that its reply carries
  std::uint32_t reply_ = 0;
};

RingSource::RingSource(Options options)
    : options_(std::move(options)),
      reader_(options_.ring, options_.limits),
      held_(to_size(options_.limits.num_peers), options_.max_held_bytes),
      used_(to_size(options_.limits.num_peers), false),
      unquiet_(used_),
      epochs_(1),
      peer_epochs_(used_.size()) {
  for (std::deque<PeerEpoch>& epochs : peer_epochs_) epochs.emplace_back();
}

RingSource::~RingSource() = default;

Status RingSource::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

void RingSource::note_failure() {
  if (reader_.status().ok()) return;
  const std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = reader_.status();
}

/// Fails the ring if a call found it full until its deadline: the call left a hole, at which later requests would wait
/// forever.
void RingSource::watch_writers() {
  if (!reader_.status().ok() || !reader_.is_broken()) return;
  const int peer = has_out_ ? out_.peer : -1;
  const std::string cause =
      peer < 0 ? std::string("the network has not taken its requests")
               : fmt::format("a request to rank {} could not be issued and blocked all later requests", peer);
  reader_.fail(
      Status(ErrorCode::kTimeout,
             fmt::format("one-sided requests: a kernel's call found the ring full and gave up its slot "
                         "after at most {} ms: {}; no more requests are taken; find out why that rank does not "
                         "answer, then destroy this OneSided and create a new one",
                         options_.limits.timeout_ns / kNsPerMs, cause),
             peer));
  note_failure();
}

const NetworkRequest* RingSource::front(const CanIssue& can_issue) {
  for (const bool from_ring : {ring_is_next_, !ring_is_next_}) {
    offered_ = from_ring ? next_of_ring(can_issue) : held_.find(can_issue);
    if (offered_ != nullptr) {
      ring_is_next_ = !from_ring;
      return offered_;
    }
    if (num_served_ >= kMaxServedAtOnce) break;  // as if the ring were empty: the next turn continues
  }
  num_served_ = 0;
  return nullptr;
}

/// Next request of the ring that can be issued now. Holds those that cannot be issued, if there is room.
const NetworkRequest* RingSource::next_of_ring(const CanIssue& can_issue) {
  while (has_out_ || read_next()) {
    if (!held_.has(out_.peer) && can_issue(out_.peer)) return &out_;
    if (!held_.hold(out_)) {
      watch_writers();
      return nullptr;
    }
    finish_out();
    ++num_served_;
  }
  return nullptr;
}

/// Converts the ring's next request for the network to `out_` and completes the local ones before it. False: there is
/// none now.
bool RingSource::read_next() {
  for (; expanded_.empty(); ++num_served_) {
    if (num_served_ >= kMaxServedAtOnce) return false;
    const device::Request* const request = reader_.front();
    if (request == nullptr) {
      watch_writers();
      note_failure();
      return false;
    }
    if (request->op == RequestOp::kQuiet || request->op == RequestOp::kFence) {
      expand(*request);
    } else if (request->op == RequestOp::kQuietPeer) {
      expand_quiet_of_peer(*request);
    } else if (request->op == RequestOp::kGet && request->num_bytes == 0) {
      if (request->wants_reply) reader_.answer(request->reply, 0);  // no part of it uses the network
      finish_front();
    } else if (is_local(*request)) {
      apply(*request);
      finish_front();
    } else {
      translate(*request);
      has_out_ = true;
      return true;
    }
  }
  out_ = expanded_.back();
  has_out_ = true;
  return true;
}

void RingSource::taken() {
  const NetworkRequest* const issued = std::exchange(offered_, nullptr);
  if (issued == &out_) {
    finish_out();
  } else {
    held_.drop_front(issued->peer);
  }
}

/// The request in `out_` was issued or is held.
void RingSource::finish_out() {
  has_out_ = false;
  if (!expanded_.empty()) {
    expanded_.pop_back();
  } else {
    finish_front();
  }
}

void RingSource::finish_front() {
  reader_.pop();
  num_taken_.store(reader_.num_taken(), std::memory_order_relaxed);
}

bool RingSource::is_local(const device::Request& request) const { return options_.peer_heaps[request.peer] != nullptr; }

/// Address of local bytes: symmetric memory, then staging.
std::byte* RingSource::local_memory(std::uint64_t offset) const {
  const std::uint64_t heap_bytes = options_.limits.remote_bytes;
  return offset < heap_bytes ? options_.heap + offset : options_.staging + (offset - heap_bytes);
}

bool RingSource::is_staged(const device::Request& request) const {
  return request.local_offset >= options_.limits.remote_bytes;
}

/// Bytes that the reply carries, see device::kAnsweredBytes. Empty: the reply carries none.
std::span<const std::byte> RingSource::answered_bytes(const device::Request& request) const {
  if (!is_staged(request) || request.num_bytes > device::kAnsweredBytes) return {};
  return {local_memory(request.local_offset), request.num_bytes};
}

/// Applies a request for a rank of this node, whose memory the kernel or this processor reaches directly.
void RingSource::apply(const device::Request& request) {
  std::byte* const heap = options_.peer_heaps[request.peer];
  std::uint64_t got = 0;
  switch (request.op) {
    case RequestOp::kPut:
    case RequestOp::kPutSignalSet:
    case RequestOp::kPutSignalAdd:
      store_bytes(heap + request.remote_offset, local_memory(request.local_offset), request.num_bytes);
      break;
    case RequestOp::kPutValueSignalSet:
    case RequestOp::kPutValueSignalAdd:
      word_at(heap, request.remote_offset).store(request.operand, std::memory_order_release);
      break;
    case RequestOp::kGet:
      load_bytes(local_memory(request.local_offset), heap + request.remote_offset, request.num_bytes);
      got = value_of(answered_bytes(request));
      break;
    default:
      break;
  }
  const std::uint64_t before = apply_atomic(request);
  if (request.wants_reply) reader_.answer(request.reply, request.op == RequestOp::kGet ? got : before);
  if (options_.changed) options_.changed(static_cast<int>(request.peer));
}

/// Returns the previous value of the word, if it changes one.
std::uint64_t RingSource::apply_atomic(const device::Request& request) {
  std::byte* const heap = options_.peer_heaps[request.peer];
  if (request.op == RequestOp::kPutValue) {
    word_at(heap, request.remote_offset).store(request.value, std::memory_order_release);
  }
  const bool changes_word = device::has_signal(request.op) || device::is_atomic(request.op);
  return changes_word ? net::apply_atomic(heap, atomic_of(request)) : 0;
}

/// Converts a request for a rank of another node to the driver's form.
void RingSource::translate(const device::Request& request) {
  out_ = NetworkRequest();
  out_.peer = static_cast<int>(request.peer);
  out_.offset = options_.heap_offset + request.remote_offset;
  out_.num_bytes = request.num_bytes;
  out_.op = atomic_of(request);
  out_.op.offset += options_.heap_offset;
  used_[request.peer] = true;
  unquiet_[request.peer] = true;
  switch (request.op) {
    case RequestOp::kPut:
    case RequestOp::kPutSignalSet:
    case RequestOp::kPutSignalAdd:
      out_.kind = device::has_signal(request.op) ? NetworkRequest::Kind::kPutSignal : NetworkRequest::Kind::kPut;
      out_.local = local_memory(request.local_offset);
      // The slot and its staging memory are free as soon as the request is taken.
      out_.copy_source = is_staged(request);
      break;
    case RequestOp::kSignalSet:
    case RequestOp::kSignalAdd:
      // A put without bytes: the signal is seen after all earlier puts.
      out_.kind = NetworkRequest::Kind::kPutSignal;
      out_.num_bytes = 0;
      break;
    case RequestOp::kPutValue:
    case RequestOp::kPutValueSignalSet:
    case RequestOp::kPutValueSignalAdd:
      out_.kind = device::has_signal(request.op) ? NetworkRequest::Kind::kPutSignal : NetworkRequest::Kind::kPut;
      value_ = device::has_signal(request.op) ? request.operand : request.value;
      out_.local = reinterpret_cast<std::byte*>(&value_);
      out_.num_bytes = sizeof(value_);
      out_.copy_source = true;
      break;
    case RequestOp::kGet:
      out_.kind = NetworkRequest::Kind::kGet;
      out_.local = local_memory(request.local_offset);
      out_.completion = expect(out_.peer, &request, options_.num_parts(out_));
      break;
    default:
      out_.kind = NetworkRequest::Kind::kAtomic;
      if (request.wants_reply) out_.completion = expect(out_.peer, &request, 1);
  }
}

/// Expands kQuiet and kFence to one request per affected peer.
void RingSource::expand(const device::Request& request) {
  const bool is_quiet = request.op == RequestOp::kQuiet;
  const bool every = is_quiet || request.peer == device::kEveryPeer;
  for (std::size_t peer = 0; peer < used_.size(); ++peer) {
    // A fence must stay behind operations that a quiet is still completing.
    if (!(is_quiet ? unquiet_ : used_)[peer] || (!every && peer != request.peer)) continue;
    if (is_quiet) {
      flush(static_cast<int>(peer));
    } else {
      expanded_.push_back({.kind = NetworkRequest::Kind::kFence, .peer = static_cast<int>(peer)});
    }
  }
  finish_front();
  if (!is_quiet) return;
  epochs_.back().closed = true;
  epochs_.back().end = reader_.num_taken();
  epochs_.emplace_back();
  publish();
}

void RingSource::flush(int peer) {
  expanded_.push_back({.kind = NetworkRequest::Kind::kFlush, .peer = peer, .completion = expect(peer, nullptr, 1)});
  unquiet_[to_size(peer)] = false;
}

/// Closes the peer's epoch, which answers the request once all is complete that was asked of the peer.
void RingSource::expand_quiet_of_peer(const device::Request& request) {
  const int peer = static_cast<int>(request.peer);
  // Otherwise nothing was asked of it since its last flush, for which an earlier epoch waits.
  if (unquiet_[request.peer]) flush(peer);
  std::deque<PeerEpoch>& epochs = peer_epochs_[request.peer];
  epochs.back().closed = true;
  epochs.back().has_reply = request.wants_reply;
  epochs.back().reply = request.reply;
  epochs.emplace_back();
  finish_front();
  publish(peer);
}

/// `request`: null for a flush.
RingSource::Pending* RingSource::expect(int peer, const device::Request* request, std::uint64_t num_parts) {
  if (free_pending_.empty()) {
    all_pending_.push_back(std::make_unique<Pending>(*this));
    free_pending_.push_back(all_pending_.back().get());
  }
  Pending* const pending = free_pending_.back();
  free_pending_.pop_back();
  pending->begin(epochs_.back(), peer_epochs_[to_size(peer)].back(), peer, num_parts, request);
  return pending;
}

bool RingSource::has_news() const {
  const std::uint64_t next = num_taken_.load(std::memory_order_relaxed);
  const RequestRingMemory& ring = options_.ring;
  std::uint64_t& word = ring.words[next % ring.num_slots * device::kRequestWords];
  return (Word(word).load(std::memory_order_relaxed) & device::kLapBit) == device::lap_bit(next, ring.num_slots);
}

void RingSource::ended(Pending& pending) {
  pending.close();
  free_pending_.push_back(&pending);
  publish();
  publish(pending.peer());
}

void RingSource::publish() {
  while (epochs_.front().closed && epochs_.front().num_open == 0) {
    reader_.complete(epochs_.front().end);
    epochs_.pop_front();
  }
}

void RingSource::publish(int peer) {
  std::deque<PeerEpoch>& epochs = peer_epochs_[to_size(peer)];
  for (; epochs.front().closed && epochs.front().num_open == 0; epochs.pop_front()) {
    const PeerEpoch& over = epochs.front();
    if (!over.has_reply) continue;
    if (over.lost) {
      reader_.lose_reply(over.reply, false);
    } else {
      reader_.answer(over.reply, 0);
    }
  }
}

}  // namespace ferry::one_sided
