/// Ranks other than 0: connection to rank 0, and the gather through it.

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "bootstrap/channel.hpp"
#include "bootstrap/errors.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/socket.hpp"
#include "bootstrap/tcp_bootstrap.hpp"
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

/// Reason why an attempt failed; the next may succeed.
struct Retry {
  Stage stage = Stage::kConnect;
  std::string reason;
};
template <typename T>
using Attempt = std::variant<T, Retry, Status>;  // a Status ends all attempts

/// Identity that a rank presents to rank 0.
struct PeerParams {
  const TcpBootstrapOptions& options;
  const std::string& version;
  Instance instance{};
};

Attempt<UniqueFd> try_connect(const Address& address, Deadline deadline) {
  UniqueFd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) {
    if (errno == EAFNOSUPPORT) return Retry{Stage::kConnect, "this machine does not support that address family"};
    const int error = errno;
    return Status(ErrorCode::kSystem, fmt::format("create_tcp_bootstrap: socket() failed: {}",
                                                  is_out_of_descriptors(error) ? describe_descriptor_limit(error, 1)
                                                                               : describe_errno(error)));
  }
  tune_connected(fd.get());
  int error = connect(fd.get(), address.raw(), address.size) == 0 ? 0 : errno;
  if (error == EINPROGRESS || error == EINTR) {
    pollfd entry{fd.get(), POLLOUT, 0};
    if (Status status = wait_until_ready({&entry, 1}, deadline); !status.ok()) return status;
    if (entry.revents == 0) return Retry{Stage::kConnect, "it does not answer"};
    socklen_t size = sizeof error;
    if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  }
  if (error != 0) return Retry{Stage::kConnect, describe_errno(error)};
  if (is_connected_to_itself(fd.get())) {
    // Close without TIME_WAIT, because rank 0 will listen on this port.
    const linger no_wait{.l_onoff = 1, .l_linger = 0};
    (void)setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &no_wait, sizeof no_wait);
    return Retry{Stage::kConnect, "no process listens there"};
  }
  return fd;
}

/// Fills `into` and reads nothing beyond it. False at the deadline or when the other end closes.
bool read_exactly(int fd, std::span<std::byte> into, Deadline deadline) {
  while (!into.empty()) {
    const IoOutcome outcome = read_some(fd, into);
    if (outcome.kind == IoOutcome::Kind::kWouldBlock) {
      pollfd entry{fd, POLLIN, 0};
      if (!wait_until_ready({&entry, 1}, deadline).ok() || entry.revents == 0) return false;
    } else if (outcome.kind != IoOutcome::Kind::kMoved) {
      return false;
    }
    into = into.subspan(outcome.num_bytes);
  }
  return true;
}

/// Waits for the first frame on `channel`.
Attempt<Channel> await_welcome(Channel channel, Deadline deadline) {
  for (;;) {
    Frame frame;
    switch (channel.receive(&frame)) {
      case ReceiveOutcome::kWouldBlock: {
        if (deadline.expired()) return Retry{Stage::kHello, "it does not answer the hello"};
        pollfd entry{channel.fd(), POLLIN, 0};
        if (Status status = wait_until_ready({&entry, 1}, deadline); !status.ok()) return status;
        continue;
      }
      case ReceiveOutcome::kClosed:
        return Retry{Stage::kAnswer, "it closed the connection after the hello; does it have the same secret?"};
      case ReceiveOutcome::kBroken:
        return Retry{Stage::kAnswer, std::string(channel.error().message())};
      case ReceiveOutcome::kFrame:
        break;
    }
    if (frame.type == FrameType::kWelcome) return channel;
    if (frame.type == FrameType::kFailure) return status_of_failure(frame.payload);
    return Retry{Stage::kAnswer,
                 fmt::format("it answered the hello with a frame of type {}", static_cast<int>(frame.type))};
  }
}

void keep_furthest(Retry* furthest, const Address& address, const Retry& retry) {
  if (retry.stage < furthest->stage) return;
  *furthest = {retry.stage, fmt::format("{}: {}", to_string(address), retry.reason)};
}

Attempt<Channel> shake_hands(UniqueFd fd, const PeerParams& params, Deadline deadline) {
  ChallengeFrame challenge{};
  if (!read_exactly(fd.get(), challenge, deadline)) {
    return Retry{Stage::kChallenge, "the process that listens there sends no challenge"};
  }
  const Result<Nonce> root_nonce = parse_challenge(challenge);
  if (!root_nonce.ok()) return Retry{Stage::kChallenge, std::string(root_nonce.status().message())};
  Hello hello{.nonce = {},
              .instance = params.instance,
              .rank = static_cast<std::uint32_t>(params.options.rank),
              .num_ranks = static_cast<std::uint32_t>(params.options.num_ranks),
              .version = params.version,
              .proof = {}};
  if (Status status = fill_random(hello.nonce); !status.ok()) return status;
  const Result<HelloFrame> frame = make_hello(params.options.secret, *root_nonce, hello);
  if (!frame.ok()) return frame.status();
  const Result<SessionKeys> keys = derive_session_keys(params.options.secret, *root_nonce, hello);
  if (!keys.ok()) return keys.status();
  const IoOutcome outcome = write_some(fd.get(), *frame);
  if (outcome.kind != IoOutcome::Kind::kMoved || outcome.num_bytes != frame->size()) {
    return Retry{Stage::kChallenge, "it closed the connection before the hello"};
  }
  return await_welcome(Channel(std::move(fd), {.send = keys->peer_to_root, .receive = keys->root_to_peer}), deadline);
}

Attempt<Channel> try_once(const PeerParams& params, Deadline deadline) {
  const Result<std::vector<Address>> addresses = resolve(params.options.host, params.options.port);
  if (!addresses.ok()) {
    if (addresses.status().code() != ErrorCode::kTransport) return addresses.status();
    return Retry{Stage::kConnect, std::string(addresses.status().message())};
  }
  Retry furthest;
  for (const Address& address : *addresses) {
    // An address that never answers must leave time for the others.
    const Deadline attempt_deadline =
        earlier(deadline, Deadline::after(std::min(kHandshakeNs, params.options.timeout_ns / 2)));
    Attempt<UniqueFd> fd = try_connect(address, attempt_deadline);
    if (Status* status = std::get_if<Status>(&fd)) return *status;
    if (Retry* retry = std::get_if<Retry>(&fd)) {
      keep_furthest(&furthest, address, *retry);
      continue;
    }
    Attempt<Channel> channel = shake_hands(std::move(std::get<UniqueFd>(fd)), params, attempt_deadline);
    Retry* retry = std::get_if<Retry>(&channel);
    if (retry == nullptr) return channel;
    keep_furthest(&furthest, address, *retry);
  }
  return furthest;
}

/// Connects until rank 0 has accepted this rank. Does not wait for the other ranks.
Result<Channel> connect_until(const PeerParams& params, Deadline deadline) {
  std::int64_t pause_ns = kFirstPauseNs;
  Retry furthest;
  for (;;) {
    Attempt<Channel> channel = try_once(params, deadline);
    if (Status* status = std::get_if<Status>(&channel)) return *status;
    if (Channel* accepted = std::get_if<Channel>(&channel)) return std::move(*accepted);
    if (Retry& retry = std::get<Retry>(channel); retry.stage >= furthest.stage) furthest = std::move(retry);
    const std::int64_t left_ns = deadline.remaining_ns();
    if (left_ns == 0) {
      return Status(
          ErrorCode::kTimeout,
          fmt::format(
              "create_tcp_bootstrap: rank {} could not connect to rank 0 at host '{}' port {} within {}: {}. Check "
              "that rank 0 is running, and that host, port and secret are the same on both",
              params.options.rank, params.options.host, params.options.port, format_seconds(params.options.timeout_ns),
              furthest.reason),
          0);
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(pause_ns, left_ns)));
    pause_ns = std::min(pause_ns * 2, kLongestPauseNs);
  }
}

/// Waits until rank 0 reports that all ranks have arrived.
Status await_start(Channel* channel, const PeerParams& params, Deadline deadline) {
  constexpr std::uint64_t kForming = 0;
  bool given_up = false;
  for (;;) {
    Frame frame;
    switch (channel->receive(&frame)) {
      case ReceiveOutcome::kFrame:
        if (frame.type == FrameType::kStart) return {};
        if (frame.type == FrameType::kFailure) return status_of_failure(frame.payload);
        return Status(
            ErrorCode::kTransport,
            fmt::format(
                "create_tcp_bootstrap: rank 0 sent an unexpected frame of type {} before the group was complete",
                static_cast<int>(frame.type)),
            0);
      case ReceiveOutcome::kClosed:
        return rank_lost("create_tcp_bootstrap", 0);
      case ReceiveOutcome::kBroken:
        return Status(channel->error().code(), std::string(channel->error().message()), 0);
      case ReceiveOutcome::kWouldBlock:
        break;
    }
    if (deadline.expired()) {
      if (given_up) {
        return Status(
            ErrorCode::kTimeout,
            fmt::format("create_tcp_bootstrap: timed out after {} waiting for rank 0, which has accepted rank {}; "
                        "is rank 0 stopped?",
                        format_seconds(params.options.timeout_ns), params.options.rank),
            0);
      }
      // Ask rank 0 to report which ranks are missing.
      given_up = true;
      if (Status status = channel->queue(FrameType::kGiveUp, encode_give_up(kForming)); !status.ok()) return status;
      deadline = deadline.extended_by(grace_ns(params.options.timeout_ns));
    }
    (void)channel->flush();
    pollfd entry{channel->fd(), channel->poll_events(), 0};
    if (Status status = wait_until_ready({&entry, 1}, deadline); !status.ok()) return status;
  }
}

class TcpPeer final : public Bootstrap {
 public:
  TcpPeer(Channel channel, int rank, int num_ranks)
      : local_address_(ends_of(channel.fd()).local), channel_(std::move(channel)), rank_(rank), num_ranks_(num_ranks) {}

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override;
  std::string local_address() const override { return local_address_; }

 private:
  Status exchange(std::int64_t timeout_ns, std::vector<std::vector<std::byte>>* parts);
  Status receive_parts(std::vector<std::vector<std::byte>>* parts);
  Status fail(Status error);

  std::string local_address_;
  std::optional<Channel> channel_;  // empty once the group has failed
  int rank_;
  int num_ranks_;
  std::uint64_t gather_idx_ = 0;
  Status error_;
};

Result<std::vector<std::vector<std::byte>>> TcpPeer::all_gather(std::span<const std::byte> mine,
                                                                std::int64_t timeout_ns) {
  if (!error_.ok()) return error_;
  ++gather_idx_;
  if (Status status = check_all_gather_arguments(rank_, mine.size(), timeout_ns); !status.ok()) {
    // Rank 0 passes the error on to the others, which would otherwise wait for this rank.
    if (channel_->queue(FrameType::kFailure, encode_failure(status)).ok()) (void)channel_->flush();
    return fail(status);
  }
  if (Status status = channel_->queue(FrameType::kMessage, mine); !status.ok()) return fail(status);
  std::vector<std::vector<std::byte>> parts;
  if (Status status = exchange(timeout_ns, &parts); !status.ok()) return fail(status);
  return parts;
}

Status TcpPeer::exchange(std::int64_t timeout_ns, std::vector<std::vector<std::byte>>* parts) {
  Deadline deadline = Deadline::after(timeout_ns);
  bool given_up = false;
  for (;;) {
    // Read first: if rank 0 has closed the connection, its failure frame can still be received.
    if (Status status = receive_parts(parts); !status.ok()) return status;
    if (parts->size() == static_cast<std::size_t>(num_ranks_)) return {};
    if (deadline.expired()) {
      if (given_up) {
        return Status(
            ErrorCode::kTimeout,
            fmt::format("all_gather: rank {} timed out after {} waiting for rank 0; is rank 0 stopped, or has it not "
                        "called all_gather?",
                        rank_, format_seconds(timeout_ns)),
            0);
      }
      // Ask rank 0 to report which ranks are missing.
      given_up = true;
      if (Status status = channel_->queue(FrameType::kGiveUp, encode_give_up(gather_idx_)); !status.ok()) return status;
      deadline = deadline.extended_by(grace_ns(timeout_ns));
    }
    // If this fails, the failure frame of rank 0 or the end of the stream is about to arrive.
    (void)channel_->flush();
    pollfd entry{channel_->fd(), channel_->poll_events(), 0};
    if (Status status = wait_until_ready({&entry, 1}, deadline); !status.ok()) return status;
  }
}

Status TcpPeer::receive_parts(std::vector<std::vector<std::byte>>* parts) {
  while (parts->size() < static_cast<std::size_t>(num_ranks_)) {
    Frame frame;
    switch (channel_->receive(&frame)) {
      case ReceiveOutcome::kWouldBlock:
        return {};
      case ReceiveOutcome::kClosed:
        return rank_lost("all_gather", 0);
      case ReceiveOutcome::kBroken:
        return Status(channel_->error().code(),
                      fmt::format("all_gather: received invalid data from rank 0: {}", channel_->error().message()), 0);
      case ReceiveOutcome::kFrame:
        break;
    }
    if (frame.type == FrameType::kFailure) return status_of_failure(frame.payload);
    if (frame.type != FrameType::kPart) {
      return Status(ErrorCode::kTransport,
                    fmt::format("all_gather: rank 0 sent an unexpected frame of type {}", static_cast<int>(frame.type)),
                    0);
    }
    parts->push_back(std::move(frame.payload));
  }
  return {};
}

Status TcpPeer::fail(Status error) {
  error_ = std::move(error);
  channel_.reset();
  return error_;
}

}  // namespace

Result<std::shared_ptr<Bootstrap>> create_tcp_peer(const TcpBootstrapOptions& options, const std::string& version) {
  const Deadline deadline = Deadline::after(options.timeout_ns);
  PeerParams params{.options = options, .version = version, .instance = {}};
  if (Status status = fill_random(params.instance); !status.ok()) return status;
  Result<Channel> channel = connect_until(params, deadline);
  if (!channel.ok()) return channel.status();
  if (Status status = await_start(&*channel, params, deadline); !status.ok()) return status;
  return std::shared_ptr<Bootstrap>(std::make_shared<TcpPeer>(std::move(*channel), options.rank, options.num_ranks));
}

}  // namespace ferry::bootstrap
