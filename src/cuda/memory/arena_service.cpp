#include "cuda/memory/arena_service.hpp"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "node/futex.hpp"
#include "node/service_thread.hpp"

namespace ferry::cuda {

/// Message over a link, sent as its bytes in memory: both ends run the same build on the same host.
struct ArenaMessage {
  static constexpr std::uint32_t kMagic = 0x4652'4152;  // "FRAR"
  enum class Kind : std::uint32_t {
    kAnnounce = 1,  ///< map this chunk, and reply
    kWithdraw = 2,  ///< unmap it again; no reply
    kReply = 3,     ///< the result of mapping it
  };

  std::uint32_t magic = kMagic;
  Kind kind = Kind::kAnnounce;
  std::uint64_t sequence = 0;  ///< counts the sender's announcements; a reply repeats it
  std::uint64_t offset = 0;
  std::uint64_t size_bytes = 0;
  cudaIpcMemHandle_t ipc{};
  ErrorCode code = ErrorCode::kOk;  ///< of a reply, as is the text
  std::int32_t text_bytes = 0;
  std::array<char, 1024> text{};
};

namespace {

static_assert(std::is_trivially_copyable_v<ArenaMessage> && sizeof(ArenaMessage) <= node::kMaxLinkMessageBytes);

/// How often a waiting rank checks that its peers are alive; as often as hosts do (node/).
constexpr std::int64_t kLivenessIntervalNs = 20'000'000;

constexpr double kNsPerMillisecond = 1e6;

std::span<const std::byte> bytes_of(const ArenaMessage& message) { return std::as_bytes(std::span(&message, 1)); }

void set_outcome(ArenaMessage& reply, const Status& status) {
  reply.code = status.code();
  const std::size_t length = std::min(status.message().size(), reply.text.size());
  std::copy_n(status.message().data(), length, reply.text.data());
  reply.text_bytes = static_cast<std::int32_t>(length);
}

Status outcome(const ArenaMessage& reply, int rank) {
  if (reply.code == ErrorCode::kOk) return {};
  const bool known = reply.code > ErrorCode::kOk && reply.code <= ErrorCode::kInternal;
  const auto length = static_cast<std::size_t>(std::clamp<std::int64_t>(reply.text_bytes, 0, std::ssize(reply.text)));
  return Status(known ? reply.code : ErrorCode::kTransport,
                fmt::format("sharing device memory: rank {} cannot map memory of this rank: {}", rank,
                            std::string_view(reply.text.data(), length)),
                rank);
}

Status lost_peer(int rank) {
  return Status(ErrorCode::kPeerLost,
                fmt::format("sharing device memory: rank {} has died or destroyed its group, and cannot map memory of "
                            "this rank; destroy this group and create a new one from the surviving ranks",
                            rank),
                rank);
}

}  // namespace

ArenaService::ArenaService(const std::vector<Peer>& peers, const Options& options)
    : options_(options),
      out_of_memory_(
          ErrorCode::kSystem,
          "sharing device memory: this process ran out of memory while receiving from a peer; free some memory") {
  for (const Peer& peer : peers) states_.push_back(PeerState{peer, false, {}, {}});
}

ArenaService::~ArenaService() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  // Cannot fail: the counter is far from full. The write does not block, so no signal can interrupt it.
  [[maybe_unused]] const ssize_t written = write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

Status ArenaService::start() {
  if (states_.empty()) return {};
  stop_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_.valid()) {
    return Status(ErrorCode::kSystem,
                  fmt::format("sharing device memory: eventfd failed: {}; raise the open-file limit "
                              "(ulimit -n)",
                              std::strerror(errno)));
  }
  poll_set_.push_back(pollfd{stop_.get(), POLLIN, 0});
  for (const PeerState& state : states_) poll_set_.push_back(pollfd{state.peer.link->poll_fd(), POLLIN, 0});
  Result<std::thread> thread = node::start_service_thread("ferry-arena", "sharing device memory", [this] { serve(); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

void ArenaService::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  changed_.notify_all();
}

Status ArenaService::announce(const ArenaChunk& chunk) {
  const std::int64_t deadline_ns = node::monotonic_ns() + options_.timeout_ns;
  ArenaMessage message;
  message.offset = chunk.offset;
  message.size_bytes = chunk.size_bytes;
  message.ipc = chunk.ipc;
  {
    const std::lock_guard lock(mutex_);
    message.sequence = ++sequence_;
    for (PeerState& state : states_) {
      state.answered = false;
      state.answer = {};
    }
  }
  std::size_t num_sent = 0;
  Status status = send_to_all(message, chunk.fd, &num_sent);
  if (status.ok()) status = wait_for_answers(deadline_ns);
  if (status.ok()) return status;
  message.kind = ArenaMessage::Kind::kWithdraw;
  for (std::size_t i = 0; i < num_sent; ++i) {
    // A peer that does not receive this refuses the next chunk, and gives the reason in its reply.
    static_cast<void>(states_[i].peer.link->send(bytes_of(message)));
  }
  return status;
}

Status ArenaService::send_to_all(const ArenaMessage& message, int fd, std::size_t* num_sent) {
  for (PeerState& state : states_) {
    const Status status = state.peer.link->send(bytes_of(message), fd);
    const int rank = state.peer.rank;
    const bool is_lost = status.code() == ErrorCode::kPeerLost;
    if (is_lost && !options_.without_lost) return lost_peer(rank);
    if (is_lost) forgo(state);
    if (!status.ok() && !is_lost) {
      return Status(status.code(),
                    fmt::format("sharing device memory: sending to rank {} failed: {}", rank, status.message()), rank);
    }
    ++*num_sent;
  }
  return {};
}

Status ArenaService::wait_for_answers(std::int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  while (true) {
    const PeerState* missing = nullptr;
    for (PeerState& state : states_) {
      if (!state.answered && !state.lost.ok()) {
        if (!options_.without_lost || state.lost.code() != ErrorCode::kPeerLost) return state.lost;
        state.answered = true;
      }
      if (!state.answer.ok()) return state.answer;
      if (!state.answered && missing == nullptr) missing = &state;
    }
    if (missing == nullptr) return {};
    if (cancelled_) {
      return Status(ErrorCode::kInvalidArgument,
                    "sharing device memory: this rank's group is being destroyed; allocate before or in another group");
    }
    const std::int64_t left_ns = deadline_ns - node::monotonic_ns();
    if (left_ns <= 0) {
      return Status(
          ErrorCode::kTimeout,
          fmt::format("sharing device memory: timed out after {:.0f} ms waiting for rank {} to map memory of this "
                      "rank; it may be stopped or overloaded; try again, or destroy this group and create a new one "
                      "with a longer GroupOptions::timeout_ns",
                      static_cast<double>(options_.timeout_ns) / kNsPerMillisecond, missing->peer.rank),
          missing->peer.rank);
    }
    const auto pause = std::chrono::nanoseconds(std::min(left_ns, kLivenessIntervalNs));
    if (changed_.wait_for(lock, pause) == std::cv_status::no_timeout) continue;
    // A child forked by a dead peer may hold its socket open, so that the thread sees no end of the connection.
    for (PeerState& state : states_) {
      if (!state.answered && state.lost.ok() && state.peer.link->gone()) {
        if (!options_.without_lost) return lost_peer(state.peer.rank);
        state.answered = true;
      }
    }
  }
}

void ArenaService::forgo(PeerState& state) {
  const std::lock_guard lock(mutex_);
  state.answered = true;
}

void ArenaService::serve() noexcept {
  while (true) {
    // No deadline: this thread waits for peers as long as the group lives, and the eventfd ends it.
    const int ready = poll(poll_set_.data(), poll_set_.size(), -1);
    if (ready < 0 && errno != EINTR) {
      for (PeerState& state : states_) lose(state, out_of_memory_);  // poll has no other error than ENOMEM here
      return;
    }
    if (ready <= 0) continue;
    if (poll_set_.front().revents != 0) return;
    for (std::size_t i = 0; i < states_.size(); ++i) {
      pollfd& entry = poll_set_[i + 1];
      // poll ignores negative descriptors, so a lost peer is not polled again.
      if (entry.revents != 0 && !serve_peer(states_[i])) entry.fd = -1;
      entry.revents = 0;
    }
  }
}

bool ArenaService::serve_peer(PeerState& state) noexcept {
  Status status = out_of_memory_;
  try {
    status = receive_from(state);
  } catch (...) {  // std::bad_alloc: the peer gets no reply and times out
  }
  if (status.ok()) return true;
  lose(state, std::move(status));
  return false;
}

Status ArenaService::receive_from(PeerState& state) {
  const int rank = state.peer.rank;
  Result<node::ReceivedMessage> received = state.peer.link->receive();
  if (!received.ok()) {
    return Status(received.status().code(),
                  fmt::format("sharing device memory: rank {}: {}", rank, received.status().message()), rank);
  }
  if (received->kind == node::ReceivedMessage::Kind::kNothing) return {};
  if (received->kind == node::ReceivedMessage::Kind::kClosed) return lost_peer(rank);
  ArenaMessage message;
  if (received->bytes.size() == sizeof(message)) std::memcpy(&message, received->bytes.data(), sizeof(message));
  if (received->bytes.size() != sizeof(message) || message.magic != ArenaMessage::kMagic) {
    return Status(ErrorCode::kTransport,
                  fmt::format("sharing device memory: rank {} sent {} bytes that are no message, expected {}; run the "
                              "same build on every rank",
                              rank, received->bytes.size(), sizeof(message)),
                  rank);
  }
  handle(state, message, received->fd.get());
  return {};
}

void ArenaService::handle(PeerState& state, const ArenaMessage& message, int fd) {
  if (message.kind == ArenaMessage::Kind::kAnnounce) {
    ArenaMessage reply;
    reply.kind = ArenaMessage::Kind::kReply;
    reply.sequence = message.sequence;
    set_outcome(reply, state.peer.mapping->add(ArenaChunk{message.offset, message.size_bytes, fd, message.ipc}));
    // If this fails the peer is gone, or reads nothing and will time out: this rank need not care.
    static_cast<void>(state.peer.link->send(bytes_of(reply)));
  } else if (message.kind == ArenaMessage::Kind::kWithdraw) {
    state.peer.mapping->take_back(message.offset);
  } else if (message.kind == ArenaMessage::Kind::kReply) {
    Status answer = outcome(message, state.peer.rank);
    const std::lock_guard lock(mutex_);
    if (message.sequence != sequence_) return;  // the announcement has been abandoned
    state.answered = true;
    state.answer = std::move(answer);
    changed_.notify_all();
  }
}

void ArenaService::lose(PeerState& state, Status why) noexcept {
  const std::lock_guard lock(mutex_);
  state.lost = std::move(why);
  changed_.notify_all();
}

}  // namespace ferry::cuda
