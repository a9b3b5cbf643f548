#include "bootstrap/tcp_dial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bootstrap/errors.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/ports.hpp"
#include "bootstrap/socket.hpp"
#include "core/descriptors.hpp"

namespace ferry::bootstrap {
namespace {

// Pauses between attempts: short at first, because ranks start together; then long enough that a thousand ranks do not
// load rank 0.
constexpr std::int64_t kFirstPauseNs = 5'000'000;
constexpr std::int64_t kLongestPauseNs = 250'000'000;

/// Progress of an attempt. The error message reports the attempt that got furthest, because it is the most specific:
/// with a wrong secret rank 0 closes the connection after the hello, but the last attempt may only find rank 0 gone.
enum class Stage { kConnect, kChallenge, kHello, kAnswer };

struct Retry {
  Stage stage = Stage::kConnect;
  std::string reason;
};

/// End of all attempts: the accepted channel, or an error that no further attempt can mend. Empty while they go on.
using Verdict = std::optional<Result<Channel>>;

/// Attempts at one port: the host's addresses one after the other, then again after a pause. Never waits, but for the
/// system's resolver.
class PortCaller {
 public:
  /// @param host  addresses of rank 0's host, which the first caller resolves for all
  PortCaller(const PeerParams& params, std::uint16_t port, Deadline deadline, std::vector<Address>& host, bool is_first)
      : params_(params),
        port_(port),
        is_first_(is_first),
        host_(host),
        deadline_(deadline),
        timer_(Deadline::after(0)) {}

  /// Goes on as far as it can without waiting.
  Verdict advance();
  /// Wait for this, or until the time of next_deadline().
  pollfd entry() const;
  Deadline next_deadline() const { return timer_; }
  const Retry& furthest() const { return furthest_; }

 private:
  enum class State { kPausing, kConnecting, kChallenge, kHello };

  Verdict begin_round();
  Verdict begin_attempt();
  Verdict connected();
  Verdict read_challenge();
  Verdict send_hello();
  Verdict read_answer();
  /// Goes on with the next address.
  Verdict give_up(Stage stage, const std::string& reason);
  void pause();

  const PeerParams& params_;
  std::uint16_t port_;
  bool is_first_;
  std::vector<Address>& host_;
  Deadline deadline_;
  State state_ = State::kPausing;
  Deadline timer_;  // end of the pause or of the attempt
  std::int64_t pause_ns_ = kFirstPauseNs;
  std::vector<Address> addresses_;
  std::size_t address_idx_ = 0;
  UniqueFd fd_;
  ChallengeFrame challenge_{};
  std::size_t num_received_ = 0;
  std::optional<Channel> channel_;
  bool moved_ = false;  // `advance` has more to do
  Retry furthest_;
};

Verdict PortCaller::advance() {
  do {
    moved_ = false;
    Verdict verdict;
    switch (state_) {
      case State::kPausing:
        // An attempt that begins at the deadline could only hide why the earlier ones failed.
        if (timer_.expired() && (!deadline_.expired() || furthest_.reason.empty())) verdict = begin_round();
        break;
      case State::kConnecting:
        verdict = connected();
        break;
      case State::kChallenge:
        verdict = read_challenge();
        break;
      case State::kHello:
        verdict = read_answer();
        break;
    }
    if (verdict) return verdict;
  } while (moved_);
  return {};
}

pollfd PortCaller::entry() const {
  const int fd = state_ == State::kPausing ? -1 : state_ == State::kHello ? channel_->fd() : fd_.get();
  return {fd, static_cast<short>(state_ == State::kConnecting ? POLLOUT : POLLIN), 0};
}

Verdict PortCaller::begin_round() {
  if (is_first_) {
    Result<std::vector<Address>> found = resolve(params_.options.host, port_);
    if (!found.ok() && found.status().code() != ErrorCode::kTransport) return Verdict(found.status());
    if (!found.ok() && furthest_.stage == Stage::kConnect) furthest_.reason = found.status().message();
    host_ = found.ok() ? std::move(*found) : std::vector<Address>();
  }
  addresses_ = host_;
  for (Address& address : addresses_) set_port(&address, port_);
  address_idx_ = 0;
  if (!addresses_.empty()) return begin_attempt();
  pause();
  return {};
}

void PortCaller::pause() {
  state_ = State::kPausing;
  moved_ = false;
  timer_ = earlier(deadline_, Deadline::after(pause_ns_));
  pause_ns_ = std::min(pause_ns_ * 2, kLongestPauseNs);
}

Verdict PortCaller::give_up(Stage stage, const std::string& reason) {
  if (stage >= furthest_.stage) {
    furthest_ = {stage, fmt::format("{}: {}", to_string(addresses_[address_idx_]), reason)};
  }
  fd_.reset();
  channel_.reset();
  if (++address_idx_ < addresses_.size() && !deadline_.expired()) return begin_attempt();
  pause();
  return {};
}

Verdict PortCaller::begin_attempt() {
  // An address that never answers must leave time for the others.
  timer_ = earlier(deadline_, Deadline::after(std::min(kHandshakeNs, params_.options.timeout_ns / 2)));
  num_received_ = 0;
  state_ = State::kConnecting;
  moved_ = true;
  const Address& address = addresses_[address_idx_];
  fd_ = UniqueFd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_.valid()) {
    const int error = errno;
    if (error == EAFNOSUPPORT) return give_up(Stage::kConnect, "this machine does not support that address family");
    const std::string why = is_out_of_descriptors(error) ? describe_descriptor_limit(error, 1) : describe_errno(error);
    if (!is_first_) return give_up(Stage::kConnect, why);
    return Verdict(Status(ErrorCode::kSystem, fmt::format("create_tcp_bootstrap: socket() failed: {}", why)));
  }
  tune_connected(fd_.get());
  if (connect(fd_.get(), address.raw(), address.size) != 0 && errno != EINPROGRESS && errno != EINTR) {
    return give_up(Stage::kConnect, describe_errno(errno));
  }
  return {};
}

Verdict PortCaller::connected() {
  pollfd entry{fd_.get(), POLLOUT, 0};
  if (Status status = wait_until_ready({&entry, 1}, Deadline::after(0)); !status.ok()) return Verdict(status);
  if (entry.revents == 0) {
    return timer_.expired() ? give_up(Stage::kConnect, "it does not answer") : Verdict();
  }
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return give_up(Stage::kConnect, describe_errno(error));
  if (is_connected_to_itself(fd_.get())) {
    // Close without TIME_WAIT, because rank 0 will listen on this port.
    const linger no_wait{.l_onoff = 1, .l_linger = 0};
    (void)setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &no_wait, sizeof no_wait);
    return give_up(Stage::kConnect, "no process listens there");
  }
  state_ = State::kChallenge;
  moved_ = true;
  return {};
}

Verdict PortCaller::read_challenge() {
  constexpr const char* kNoChallenge = "the process that listens there sends no challenge";
  while (num_received_ < challenge_.size()) {
    const IoOutcome outcome = read_some(fd_.get(), std::span(challenge_).subspan(num_received_));
    if (outcome.kind == IoOutcome::Kind::kWouldBlock) {
      return timer_.expired() ? give_up(Stage::kChallenge, kNoChallenge) : Verdict();
    }
    if (outcome.kind != IoOutcome::Kind::kMoved) return give_up(Stage::kChallenge, kNoChallenge);
    num_received_ += outcome.num_bytes;
  }
  return send_hello();
}

Verdict PortCaller::send_hello() {
  const Result<Nonce> root_nonce = parse_challenge(challenge_);
  if (!root_nonce.ok()) return give_up(Stage::kChallenge, std::string(root_nonce.status().message()));
  Hello hello{.nonce = {},
              .instance = params_.instance,
              .rank = static_cast<std::uint32_t>(params_.options.rank),
              .num_ranks = static_cast<std::uint32_t>(params_.options.num_ranks),
              .version = params_.version,
              .proof = {}};
  if (Status status = fill_random(hello.nonce); !status.ok()) return Verdict(status);
  const Result<HelloFrame> frame = make_hello(params_.options.secret, *root_nonce, hello);
  if (!frame.ok()) return Verdict(frame.status());
  const Result<SessionKeys> keys = derive_session_keys(params_.options.secret, *root_nonce, hello);
  if (!keys.ok()) return Verdict(keys.status());
  const IoOutcome outcome = write_some(fd_.get(), *frame);
  if (outcome.kind != IoOutcome::Kind::kMoved || outcome.num_bytes != frame->size()) {
    return give_up(Stage::kChallenge, "it closed the connection before the hello");
  }
  channel_.emplace(std::move(fd_), ChannelKeys{.send = keys->peer_to_root, .receive = keys->root_to_peer});
  state_ = State::kHello;
  moved_ = true;
  return {};
}

Verdict PortCaller::read_answer() {
  Frame frame;
  switch (channel_->receive(&frame)) {
    case ReceiveOutcome::kWouldBlock:
      return timer_.expired() ? give_up(Stage::kHello, "it does not answer the hello") : Verdict();
    case ReceiveOutcome::kClosed:
      return give_up(Stage::kAnswer, "it closed the connection after the hello; does it have the same secret?");
    case ReceiveOutcome::kBroken:
      return give_up(Stage::kAnswer, std::string(channel_->error().message()));
    case ReceiveOutcome::kFrame:
      break;
  }
  if (frame.type == FrameType::kWelcome) return Verdict(std::move(*channel_));
  if (frame.type == FrameType::kFailure) return Verdict(status_of_failure(frame.payload));
  return give_up(Stage::kAnswer,
                 fmt::format("it answered the hello with a frame of type {}", static_cast<int>(frame.type)));
}

Status timed_out(const PeerParams& params, const std::vector<PortCaller>& callers) {
  const auto furthest =
      std::ranges::max_element(callers, {}, [](const PortCaller& caller) { return caller.furthest().stage; });
  const TcpBootstrapOptions& options = params.options;
  return Status(ErrorCode::kTimeout,
                fmt::format("create_tcp_bootstrap: rank {} could not connect to rank 0 at host '{}' {} within {}: {}. "
                            "Check that rank 0 is running, and that host, port and secret are the same on both",
                            options.rank, options.host, describe_ports(options), format_seconds(options.timeout_ns),
                            furthest->furthest().reason),
                0);
}

}  // namespace

Result<Channel> dial_root(const PeerParams& params, Deadline deadline) {
  std::vector<Address> host;
  std::vector<PortCaller> callers;
  for (const std::uint16_t port : ports_of(params.options)) {
    callers.emplace_back(params, port, deadline, host, callers.empty());
  }
  for (;;) {
    std::vector<pollfd> entries;
    Deadline next = deadline;
    const bool is_over = deadline.expired();
    for (PortCaller& caller : callers) {
      if (Verdict verdict = caller.advance()) return std::move(*verdict);
      entries.push_back(caller.entry());
      next = earlier(next, caller.next_deadline());
    }
    if (is_over) return timed_out(params, callers);
    if (Status status = wait_until_ready(entries, next); !status.ok()) return status;
  }
}

}  // namespace ferry::bootstrap
