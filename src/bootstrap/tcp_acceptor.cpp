#include "bootstrap/tcp_acceptor.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/descriptors.hpp"

namespace ferry::bootstrap {
namespace {

// Pending connections beyond one per rank. Even if silent connections hold all of them, a rank that connects has the
// time of this many further accepts to send its hello.
constexpr std::size_t kNumSparePending = 128;

// Accepts per call of serve(), so that a flood of connections cannot starve those accepted before.
constexpr int kMaxAcceptsPerCall = 32;

// Pause after file descriptors ran out: the listener stays readable, so polling it at once would spin.
constexpr std::int64_t kAcceptPauseNs = 20'000'000;

// Age at which a connection without a hello is closed if descriptors are short; a rank sends its hello long before.
constexpr std::int64_t kHelloPatienceNs = 100'000'000;

bool is_out_of_memory(int error) { return error == ENOBUFS || error == ENOMEM; }

// All other errors concern the new connection, not the listener (accept(2), "Error handling").
bool is_listener_broken(int error) {
  return error == EBADF || error == EINVAL || error == ENOTSOCK || error == EOPNOTSUPP || error == EFAULT;
}

}  // namespace

TcpAcceptor::TcpAcceptor(Params params)
    : params_(std::move(params)),
      max_pending_(kNumSparePending + static_cast<std::size_t>(params_.num_ranks)),
      accept_again_(Deadline::after(0)),
      spare_(fcntl(params_.listener.get(), F_DUPFD_CLOEXEC, 0)) {}

void TcpAcceptor::add_poll_entries(std::vector<pollfd>* entries) const {
  // poll() skips negative descriptors: the entry stays, so that the positions of the others do not change.
  entries->push_back({accepting_ ? params_.listener.get() : -1, POLLIN, 0});
  for (const Pending& pending : pending_) entries->push_back({pending.fd.get(), POLLIN, 0});
}

Deadline TcpAcceptor::next_deadline(Deadline latest) const {
  Deadline next = latest;
  if (!accepting_) next = earlier(next, accept_again_);
  // All get the same time, so the oldest expires first.
  if (!pending_.empty()) next = earlier(next, pending_.front().deadline);
  return next;
}

Status TcpAcceptor::serve(std::span<const pollfd> entries, std::vector<AuthenticatedPeer>* peers) {
  const bool has_connections = entries.front().revents != 0;
  std::vector<Pending> still_pending;
  Status error;
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    Pending& pending = pending_[i];
    Result<Hello> hello = Status();
    const Progress progress = entries[i + 1].revents != 0 ? read_from(&pending, &hello) : Progress::kWaiting;
    if (progress == Progress::kProven) {
      if (Status status = hand_out(&pending, *hello, peers); !status.ok()) error = status;
    } else if (progress == Progress::kWaiting && !pending.deadline.expired()) {
      still_pending.push_back(std::move(pending));
    }
  }
  pending_ = std::move(still_pending);
  if (accept_again_.expired()) accepting_ = true;
  if (has_connections && error.ok()) error = accept_some();
  // A caller that goes on must not find the listener readable again at once.
  if (!error.ok()) pause();
  return error;
}

TcpAcceptor::Progress TcpAcceptor::read_from(Pending* pending, Result<Hello>* hello) {
  while (pending->num_received < pending->received.size()) {
    const IoOutcome outcome = read_some(pending->fd.get(), std::span(pending->received).subspan(pending->num_received));
    if (outcome.kind == IoOutcome::Kind::kWouldBlock) break;
    if (outcome.kind != IoOutcome::Kind::kMoved) return Progress::kRefused;
    pending->num_received += outcome.num_bytes;
  }
  const std::span<const std::byte, kHelloFrameBytes> received(pending->received);
  if (pending->num_received < received.size()) {
    // Refuse garbage as soon as the header shows it.
    const bool garbage = pending->num_received >= kHeaderBytes && !parse_header(received.first<kHeaderBytes>()).ok();
    return garbage ? Progress::kRefused : Progress::kWaiting;
  }
  *hello = verify_hello(params_.secret, pending->nonce, received);
  if (hello->ok()) return Progress::kProven;
  if (parse_hello(received.subspan<kHeaderBytes>()).ok()) ++num_wrong_proofs_;
  return Progress::kRefused;
}

Status TcpAcceptor::hand_out(Pending* pending, const Hello& hello, std::vector<AuthenticatedPeer>* peers) {
  const Result<SessionKeys> keys = derive_session_keys(params_.secret, pending->nonce, hello);
  if (!keys.ok()) return keys.status();
  ++num_proven_;
  peers->push_back({Channel(std::move(pending->fd), {.send = keys->root_to_peer, .receive = keys->peer_to_root}), hello,
                    to_string(pending->address)});
  return {};
}

Status TcpAcceptor::accept_some() {
  for (int i = 0; i < kMaxAcceptsPerCall; ++i) {
    Address address;
    address.size = sizeof address.storage;
    UniqueFd fd(accept4(params_.listener.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.size,
                        SOCK_NONBLOCK | SOCK_CLOEXEC));
    const int error = errno;
    if (fd.valid()) {
      if (Status status = send_challenge(std::move(fd), address); !status.ok()) return status;
    } else if (error == EAGAIN || error == EWOULDBLOCK) {
      return {};
    } else if (is_out_of_descriptors(error)) {
      if (pending_.empty()) return out_of_descriptors(error);
      // Younger connections may be ranks, which become members in a moment.
      std::erase_if(pending_, [](const Pending& pending) { return pending.room_maker.expired(); });
      pause();
      return {};
    } else if (is_out_of_memory(error)) {
      drop_oldest();
      pause();
      return {};
    } else if (is_listener_broken(error)) {
      return Status(ErrorCode::kSystem,
                    fmt::format("bootstrap: rank 0 cannot accept connections any more: {}", describe_errno(error)));
    }
  }
  return {};
}

void TcpAcceptor::pause() {
  accepting_ = false;
  accept_again_ = Deadline::after(kAcceptPauseNs);
}

Status TcpAcceptor::out_of_descriptors(int error) {
  // This descriptor lets rank 0 report the error to ranks that connect later.
  spare_.reset();
  const int num_missing = params_.num_ranks - 1 - num_proven_;
  return Status(
      ErrorCode::kSystem,
      fmt::format("create_tcp_bootstrap: rank 0 needs a connection to each of {} other ranks and cannot "
                  "accept any more after {}: {}",
                  params_.num_ranks - 1, num_proven_, describe_descriptor_limit(error, std::max(num_missing, 1))),
      0);
}

Status TcpAcceptor::send_challenge(UniqueFd fd, const Address& address) {
  if (pending_.size() >= max_pending_) drop_oldest();
  tune_connected(fd.get());
  Pending pending{.fd = std::move(fd),
                  .address = address,
                  .nonce = {},
                  .deadline = Deadline::after(params_.handshake_ns),
                  .room_maker = Deadline::after(kHelloPatienceNs),
                  .received = {},
                  .num_received = 0};
  if (Status status = fill_random(pending.nonce); !status.ok()) return status;
  const ChallengeFrame challenge = make_challenge(pending.nonce);
  // The send buffer of a new connection has room for these few bytes. If not, the connection is closed: a retry is not
  // worth its state.
  const IoOutcome outcome = write_some(pending.fd.get(), challenge);
  if (outcome.kind == IoOutcome::Kind::kMoved && outcome.num_bytes == challenge.size()) {
    pending_.push_back(std::move(pending));
  }
  return {};
}

void TcpAcceptor::drop_oldest() {
  if (!pending_.empty()) pending_.erase(pending_.begin());
}

}  // namespace ferry::bootstrap
