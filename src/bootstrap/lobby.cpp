#include "bootstrap/lobby.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

namespace ferry::bootstrap {
namespace {

// Places beyond one per rank. With them all taken by strangers that say nothing, a rank still has the time in which
// that many more connections are accepted to send its hello.
constexpr std::size_t kNumSpareSeats = 128;

// Between two looks at those who are already in, so that a flood of connections cannot starve them.
constexpr int kMaxAcceptsPerRound = 32;

// Out of descriptors: the listener stays readable, so polling it at once would spin.
constexpr std::int64_t kListenPauseNs = 20'000'000;

bool is_out_of_descriptors(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

// The rest are the new connection's own misfortunes (accept(2), "Error handling"), and not the listener's.
bool is_listener_broken(int error) {
  return error == EBADF || error == EINVAL || error == ENOTSOCK || error == EOPNOTSUPP || error == EFAULT;
}

}  // namespace

Lobby::Lobby(Params params)
    : params_(std::move(params)),
      max_strangers_(kNumSpareSeats + static_cast<std::size_t>(params_.num_ranks)),
      listen_again_(Deadline::after(0)) {}

void Lobby::add_poll_entries(std::vector<pollfd>* entries) const {
  // poll() skips negative descriptors: the entry is kept so that positions stay the same.
  entries->push_back({listening_ ? params_.listener.get() : -1, POLLIN, 0});
  for (const Stranger& stranger : strangers_) entries->push_back({stranger.fd.get(), POLLIN, 0});
}

Deadline Lobby::next_deadline(Deadline latest) const {
  Deadline next = latest;
  if (!listening_) next = earlier(next, listen_again_);
  // All get the same time, so the oldest is the first to run out.
  if (!strangers_.empty()) next = earlier(next, strangers_.front().deadline);
  return next;
}

Status Lobby::serve(std::span<const pollfd> entries, std::vector<Arrival>* arrivals) {
  const bool someone_knocks = entries.front().revents != 0;
  std::vector<Stranger> still;
  for (std::size_t i = 0; i < strangers_.size(); ++i) {
    Stranger& stranger = strangers_[i];
    Result<Hello> hello = Status();
    const Progress progress = entries[i + 1].revents != 0 ? read_from(&stranger, &hello) : Progress::kWaiting;
    if (progress == Progress::kProven) {
      if (Status status = let_through(&stranger, *hello, arrivals); !status.ok()) return status;
    } else if (progress == Progress::kWaiting && !stranger.deadline.expired()) {
      still.push_back(std::move(stranger));
    } else {
      ++num_refused_;
    }
  }
  strangers_ = std::move(still);
  if (listen_again_.expired()) listening_ = true;
  return someone_knocks ? accept_some() : Status();
}

Lobby::Progress Lobby::read_from(Stranger* stranger, Result<Hello>* hello) {
  while (stranger->num_received < stranger->received.size()) {
    const IoOutcome outcome =
        read_some(stranger->fd.get(), std::span(stranger->received).subspan(stranger->num_received));
    if (outcome.kind == IoOutcome::Kind::kWouldBlock) break;
    if (outcome.kind != IoOutcome::Kind::kMoved) return Progress::kRefused;
    stranger->num_received += outcome.num_bytes;
  }
  const std::span<const std::byte, kHelloFrameBytes> received(stranger->received);
  if (stranger->num_received < received.size()) {
    // Garbage goes at once, without waiting for more of it.
    const bool garbage = stranger->num_received >= kHeaderBytes && !parse_header(received.first<kHeaderBytes>()).ok();
    return garbage ? Progress::kRefused : Progress::kWaiting;
  }
  *hello = verify_hello(params_.secret, stranger->nonce, received);
  if (hello->ok()) return Progress::kProven;
  if (parse_hello(received.subspan<kHeaderBytes>()).ok()) ++num_wrong_proofs_;
  return Progress::kRefused;
}

Status Lobby::let_through(Stranger* stranger, const Hello& hello, std::vector<Arrival>* arrivals) {
  const Result<SessionKeys> keys = derive_session_keys(params_.secret, stranger->nonce, hello);
  if (!keys.ok()) return keys.status();
  arrivals->push_back({Channel(std::move(stranger->fd), {.send = keys->root_to_peer, .receive = keys->peer_to_root}),
                       hello, to_string(stranger->address)});
  return {};
}

Status Lobby::accept_some() {
  for (int i = 0; i < kMaxAcceptsPerRound; ++i) {
    Address address;
    address.size = sizeof address.storage;
    UniqueFd fd(accept4(params_.listener.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.size,
                        SOCK_NONBLOCK | SOCK_CLOEXEC));
    const int error = errno;
    if (fd.valid()) {
      if (Status status = welcome_stranger(std::move(fd), address); !status.ok()) return status;
    } else if (error == EAGAIN || error == EWOULDBLOCK) {
      return {};
    } else if (is_out_of_descriptors(error)) {
      // Others in this process may hold them all, so making room may not be enough: pause in any case.
      drop_oldest();
      listening_ = false;
      listen_again_ = Deadline::after(kListenPauseNs);
      return {};
    } else if (is_listener_broken(error)) {
      return Status(ErrorCode::kSystem,
                    fmt::format("bootstrap: rank 0 can accept no more connections: {}", describe_errno(error)));
    }
  }
  return {};
}

Status Lobby::welcome_stranger(UniqueFd fd, const Address& address) {
  if (strangers_.size() >= max_strangers_) drop_oldest();
  tune_connected(fd.get());
  Stranger stranger{.fd = std::move(fd),
                    .address = address,
                    .nonce = {},
                    .deadline = Deadline::after(params_.handshake_ns),
                    .received = {},
                    .num_received = 0};
  if (Status status = fill_random(stranger.nonce); !status.ok()) return status;
  const ChallengeFrame challenge = make_challenge(stranger.nonce);
  // A new connection has room for these few bytes; one that has not is not worth state to try again.
  const IoOutcome outcome = write_some(stranger.fd.get(), challenge);
  if (outcome.kind == IoOutcome::Kind::kMoved && outcome.num_bytes == challenge.size()) {
    strangers_.push_back(std::move(stranger));
  } else {
    ++num_refused_;
  }
  return {};
}

void Lobby::drop_oldest() {
  if (strangers_.empty()) return;
  strangers_.erase(strangers_.begin());
  ++num_refused_;
}

}  // namespace ferry::bootstrap
