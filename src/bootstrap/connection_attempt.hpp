#ifndef FERRY_BOOTSTRAP_CONNECTION_ATTEMPT_HPP
#define FERRY_BOOTSTRAP_CONNECTION_ATTEMPT_HPP

/// One attempt to connect to a listening process and to authenticate with it, step by step and without waiting.

#include <optional>
#include <string>
#include <string_view>

#include "bootstrap/channel.hpp"
#include "bootstrap/frame.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/socket.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

class ConnectionAttempt {
 public:
  /// Progress of an attempt. The error message reports the attempt that got furthest, because it is the most specific:
  /// with a wrong secret the listener closes the connection after the hello, but the last attempt may only find it
  /// gone.
  enum class Stage { kConnect, kChallenge, kHello, kAnswer };
  struct Failure {
    Stage stage = Stage::kConnect;
    std::string reason{};
    int error = 0;     ///< errno of connect() or socket(), 0 if another step failed
    Status refusal{};  ///< failure that the listener sent, or that no further attempt can mend
  };
  enum class Outcome { kWaiting, kConnected, kFailed };

  /// `secret` must outlive it. `hello`: its nonce and proof are made here.
  ConnectionAttempt(const Address& address, std::string_view secret, Hello hello);

  /// Goes on as far as it can. `is_over`: a step that would wait fails instead.
  Outcome advance(bool is_over);
  /// Wait for this after kWaiting.
  pollfd entry() const;
  /// Whether a process listens there: it has accepted the connection, or will.
  bool is_heard() const { return step_ != Step::kConnecting; }
  /// Whether that process has sent its challenge, and so is at work.
  bool is_answered() const { return step_ == Step::kHello; }
  /// After kConnected.
  Channel take_channel() { return std::move(*channel_); }
  /// After kFailed.
  const Failure& failure() const { return failure_; }

 private:
  enum class Step { kConnecting, kChallenge, kHello };
  using Verdict = std::optional<Outcome>;

  Verdict connected(bool is_over);
  Verdict read_challenge(bool is_over);
  Verdict send_hello();
  Verdict read_answer(bool is_over);
  Outcome fail(Stage stage, std::string reason, int error = 0);
  Outcome refuse(const Status& status);

  std::string_view secret_;
  Hello hello_;
  Step step_ = Step::kConnecting;
  UniqueFd fd_;
  ChallengeFrame challenge_{};
  std::size_t num_received_ = 0;
  std::optional<Channel> channel_;
  Failure failure_;
};

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_CONNECTION_ATTEMPT_HPP
