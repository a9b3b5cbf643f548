#include "bootstrap/tcp_join.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <variant>

#include "bootstrap/handshake.hpp"
#include "bootstrap/lobby.hpp"
#include "bootstrap/verdict.hpp"

namespace ferry::bootstrap {
namespace {

// Soon at first, as ranks start together; then rarely enough that a thousand ranks do not trouble rank 0.
constexpr std::int64_t kFirstPauseNs = 5'000'000;
constexpr std::int64_t kLongestPauseNs = 250'000'000;

/// How far a try has come. The furthest failure says most: a rank with another secret sees rank 0 hang up after the
/// hello, and perhaps, on its last try, that rank 0 has gone or has no time left to answer.
enum class Stage { kConnect, kChallenge, kHello, kAnswer };

/// Why this try led nowhere; the next may do better.
struct Retry {
  Stage stage = Stage::kConnect;
  std::string reason;
};
template <typename T>
using Try = std::variant<T, Retry, Status>;  // a Status ends all trying

Try<UniqueFd> try_connect(const Address& address, Deadline deadline) {
  UniqueFd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) {
    if (errno == EAFNOSUPPORT) return Retry{Stage::kConnect, "this machine does not speak that address family"};
    return Status(ErrorCode::kSystem,
                  fmt::format("create_tcp_bootstrap: no socket to connect with: {}", describe_errno(errno)));
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
    // Leave without TIME_WAIT: rank 0 wants this very port.
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    (void)setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    return Retry{Stage::kConnect, "nobody listens"};
  }
  return fd;
}

/// Reads exactly `into` and not a byte more. False at the deadline or when the other end closes.
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

/// The first frame on `channel`.
Try<Channel> await_welcome(Channel channel, Deadline deadline) {
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
        return Retry{Stage::kAnswer, std::string(channel.trouble().message())};
      case ReceiveOutcome::kFrame:
        break;
    }
    if (frame.type == FrameType::kWelcome) return channel;
    if (frame.type == FrameType::kFailure) {
      const Result<Failure> failure = parse_failure(frame.payload);
      return failure.ok() ? failure->to_status() : failure.status();
    }
    return Retry{Stage::kAnswer,
                 fmt::format("it answered the hello with a frame of type {}", static_cast<int>(frame.type))};
  }
}

void keep_furthest(Retry* furthest, const Address& address, const Retry& retry) {
  if (retry.stage >= furthest->stage)
    *furthest = {retry.stage, fmt::format("{}: {}", to_string(address), retry.reason)};
}

Try<Channel> shake_hands(UniqueFd fd, const JoinParams& params, const Instance& instance, Deadline deadline) {
  ChallengeFrame challenge{};
  if (!read_exactly(fd.get(), challenge, deadline))
    return Retry{Stage::kChallenge, "something listens there but sends no challenge"};
  const Result<Nonce> root_nonce = parse_challenge(challenge);
  if (!root_nonce.ok()) return Retry{Stage::kChallenge, std::string(root_nonce.status().message())};
  Hello hello{.nonce = {},
              .instance = instance,
              .rank = static_cast<std::uint32_t>(params.rank),
              .num_ranks = static_cast<std::uint32_t>(params.num_ranks),
              .version = params.version,
              .proof = {}};
  if (Status status = fill_random(hello.nonce); !status.ok()) return status;
  const Result<HelloFrame> frame = make_hello(params.secret, *root_nonce, hello);
  if (!frame.ok()) return frame.status();
  const Result<SessionKeys> keys = derive_session_keys(params.secret, *root_nonce, hello);
  if (!keys.ok()) return keys.status();
  const IoOutcome outcome = write_some(fd.get(), *frame);
  if (outcome.kind != IoOutcome::Kind::kMoved || outcome.num_bytes != frame->size()) {
    return Retry{Stage::kChallenge, "it closed the connection before the hello"};
  }
  return await_welcome(Channel(std::move(fd), {.send = keys->peer_to_root, .receive = keys->root_to_peer}), deadline);
}

Try<Channel> try_join(const JoinParams& params, const Instance& instance, Deadline deadline) {
  const Result<std::vector<Address>> addresses = resolve(params.host, params.port);
  if (!addresses.ok()) {
    if (addresses.status().code() == ErrorCode::kTransport)
      return Retry{Stage::kConnect, std::string(addresses.status().message())};
    return addresses.status();
  }
  Retry furthest;
  for (const Address& address : *addresses) {
    // An address that never answers must leave time for the next.
    const Deadline by = earlier(deadline, Deadline::after(std::min(kHandshakeNs, params.timeout_ns / 2)));
    Try<UniqueFd> fd = try_connect(address, by);
    if (Status* status = std::get_if<Status>(&fd)) return *status;
    if (Retry* retry = std::get_if<Retry>(&fd)) {
      keep_furthest(&furthest, address, *retry);
      continue;
    }
    Try<Channel> channel = shake_hands(std::move(std::get<UniqueFd>(fd)), params, instance, by);
    Retry* retry = std::get_if<Retry>(&channel);
    if (retry == nullptr) return channel;
    keep_furthest(&furthest, address, *retry);
  }
  return furthest;
}

/// The channel of a rank that rank 0 has let in.
Result<Channel> connect_until(const JoinParams& params, Deadline deadline) {
  Instance instance{};
  if (Status status = fill_random(instance); !status.ok()) return status;
  std::int64_t pause_ns = kFirstPauseNs;
  Retry furthest;
  for (;;) {
    Try<Channel> channel = try_join(params, instance, deadline);
    if (Status* status = std::get_if<Status>(&channel)) return *status;
    if (Channel* joined = std::get_if<Channel>(&channel)) return std::move(*joined);
    if (Retry& retry = std::get<Retry>(channel); retry.stage >= furthest.stage) furthest = std::move(retry);
    const std::int64_t left_ns = deadline.remaining_ns();
    if (left_ns == 0) {
      return Status(
          ErrorCode::kTimeout,
          fmt::format("create_tcp_bootstrap: rank {} could not reach rank 0 at host '{}' port {} within {}: "
                      "{}. Is rank 0 running, and are host, port and secret the same on both?",
                      params.rank, params.host, params.port, format_seconds(params.timeout_ns), furthest.reason),
          0);
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(pause_ns, left_ns)));
    pause_ns = std::min(pause_ns * 2, kLongestPauseNs);
  }
}

Status await_start(Channel* channel, const JoinParams& params, Deadline deadline) {
  constexpr std::uint64_t kForming = 0;
  bool given_up = false;
  for (;;) {
    Frame frame;
    switch (channel->receive(&frame)) {
      case ReceiveOutcome::kFrame:
        if (frame.type == FrameType::kStart) return {};
        if (frame.type == FrameType::kFailure) {
          const Result<Failure> failure = parse_failure(frame.payload);
          return failure.ok() ? failure->to_status() : failure.status();
        }
        return Status(ErrorCode::kTransport,
                      fmt::format("create_tcp_bootstrap: rank 0 sent a frame of type {} before the group was formed",
                                  static_cast<int>(frame.type)),
                      0);
      case ReceiveOutcome::kClosed:
        return rank_lost("create_tcp_bootstrap", 0);
      case ReceiveOutcome::kBroken:
        return Status(channel->trouble().code(), std::string(channel->trouble().message()), 0);
      case ReceiveOutcome::kWouldBlock:
        break;
    }
    if (deadline.expired()) {
      if (given_up) {
        return Status(ErrorCode::kTimeout,
                      fmt::format("create_tcp_bootstrap: rank 0 let rank {} in and then said nothing within {}; is it "
                                  "stopped?",
                                  params.rank, format_seconds(params.timeout_ns)),
                      0);
      }
      // Rank 0 knows who is missing; it is asked to say so.
      given_up = true;
      if (Status status = channel->queue(FrameType::kGiveUp, encode_give_up(kForming)); !status.ok()) return status;
      deadline = deadline.extended_by(grace_ns(params.timeout_ns));
    }
    (void)channel->flush();
    pollfd entry{channel->fd(), channel->poll_events(), 0};
    if (Status status = wait_until_ready({&entry, 1}, deadline); !status.ok()) return status;
  }
}

}  // namespace

Result<Channel> join_group(const JoinParams& params) {
  const Deadline deadline = Deadline::after(params.timeout_ns);
  Result<Channel> channel = connect_until(params, deadline);
  if (!channel.ok()) return channel;
  if (Status status = await_start(&*channel, params, deadline); !status.ok()) return status;
  return channel;
}

}  // namespace ferry::bootstrap
