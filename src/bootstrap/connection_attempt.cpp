#include "bootstrap/connection_attempt.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstddef>
#include <span>
#include <utility>

namespace ferry::bootstrap {

ConnectionAttempt::ConnectionAttempt(const Address& address, std::string_view secret, Hello hello)
    : secret_(secret), hello_(std::move(hello)) {
  fd_ = UniqueFd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd_.valid()) {
    const int error = errno;
    fail(Stage::kConnect,
         error == EAFNOSUPPORT ? "this machine does not support that address family" : describe_errno(error), error);
    return;
  }
  tune_connected(fd_.get());
  if (connect(fd_.get(), address.raw(), address.size) != 0 && errno != EINPROGRESS && errno != EINTR) {
    const int error = errno;
    fail(Stage::kConnect, describe_errno(error), error);
  }
}

ConnectionAttempt::Outcome ConnectionAttempt::advance(bool is_over) {
  if (!failure_.reason.empty()) return Outcome::kFailed;
  Verdict verdict;
  if (step_ == Step::kConnecting) verdict = connected(is_over);
  if (!verdict && step_ == Step::kChallenge) verdict = read_challenge(is_over);
  if (!verdict && step_ == Step::kHello) verdict = read_answer(is_over);
  return *verdict;
}

pollfd ConnectionAttempt::entry() const {
  const int fd = step_ == Step::kHello ? channel_->fd() : fd_.get();
  return {fd, static_cast<short>(step_ == Step::kConnecting ? POLLOUT : POLLIN), 0};
}

ConnectionAttempt::Outcome ConnectionAttempt::fail(Stage stage, std::string reason, int error) {
  failure_ = {.stage = stage, .reason = std::move(reason), .error = error, .refusal = {}};
  fd_.reset();
  channel_.reset();
  return Outcome::kFailed;
}

ConnectionAttempt::Outcome ConnectionAttempt::refuse(const Status& status) {
  fail(Stage::kAnswer, std::string(status.message()));
  failure_.refusal = status;
  return Outcome::kFailed;
}

ConnectionAttempt::Verdict ConnectionAttempt::connected(bool is_over) {
  pollfd entry{fd_.get(), POLLOUT, 0};
  if (Status status = wait_until_ready({&entry, 1}, Deadline::after(0)); !status.ok()) return refuse(status);
  if (entry.revents == 0) return is_over ? fail(Stage::kConnect, "it does not answer") : Outcome::kWaiting;
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return fail(Stage::kConnect, describe_errno(error), error);
  if (is_connected_to_itself(fd_.get())) {
    // Close without TIME_WAIT, because the listener will take this port.
    const linger no_wait{.l_onoff = 1, .l_linger = 0};
    (void)setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &no_wait, sizeof no_wait);
    return fail(Stage::kConnect, "no process listens there", ECONNREFUSED);
  }
  step_ = Step::kChallenge;
  return {};
}

ConnectionAttempt::Verdict ConnectionAttempt::read_challenge(bool is_over) {
  constexpr const char* kNoChallenge = "the process that listens there sends no challenge";
  while (num_received_ < challenge_.size()) {
    const IoOutcome outcome = read_some(fd_.get(), std::span(challenge_).subspan(num_received_));
    if (outcome.kind == IoOutcome::Kind::kWouldBlock) {
      return is_over ? fail(Stage::kChallenge, kNoChallenge) : Outcome::kWaiting;
    }
    if (outcome.kind != IoOutcome::Kind::kMoved) return fail(Stage::kChallenge, kNoChallenge);
    num_received_ += outcome.num_bytes;
  }
  return send_hello();
}

ConnectionAttempt::Verdict ConnectionAttempt::send_hello() {
  const Result<Nonce> root_nonce = parse_challenge(challenge_);
  if (!root_nonce.ok()) return fail(Stage::kChallenge, std::string(root_nonce.status().message()));
  if (Status status = fill_random(hello_.nonce); !status.ok()) return refuse(status);
  const Result<HelloFrame> frame = make_hello(secret_, *root_nonce, hello_);
  if (!frame.ok()) return refuse(frame.status());
  const Result<SessionKeys> keys = derive_session_keys(secret_, *root_nonce, hello_);
  if (!keys.ok()) return refuse(keys.status());
  const IoOutcome outcome = write_some(fd_.get(), *frame);
  if (outcome.kind != IoOutcome::Kind::kMoved || outcome.num_bytes != frame->size()) {
    return fail(Stage::kChallenge, "it closed the connection before the hello");
  }
  channel_.emplace(std::move(fd_), ChannelKeys{.send = keys->peer_to_root, .receive = keys->root_to_peer});
  step_ = Step::kHello;
  return {};
}

ConnectionAttempt::Verdict ConnectionAttempt::read_answer(bool is_over) {
  Frame frame;
  switch (channel_->receive(&frame)) {
    case ReceiveOutcome::kWouldBlock:
      return is_over ? fail(Stage::kHello, "it does not answer the hello") : Outcome::kWaiting;
    case ReceiveOutcome::kClosed:
      return fail(Stage::kAnswer, "it closed the connection after the hello; does it have the same secret?");
    case ReceiveOutcome::kBroken:
      return fail(Stage::kAnswer, std::string(channel_->error().message()));
    case ReceiveOutcome::kFrame:
      break;
  }
  if (frame.type == FrameType::kWelcome) return Outcome::kConnected;
  if (frame.type == FrameType::kFailure) return refuse(status_of_failure(frame.payload));
  return fail(Stage::kAnswer,
              fmt::format("it answered the hello with a frame of type {}", static_cast<int>(frame.type)));
}

}  // namespace ferry::bootstrap
