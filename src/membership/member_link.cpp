#include "membership/member_link.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "bootstrap/socket.hpp"
#include "ferry/version.hpp"

namespace ferry::membership {
namespace {

/// Pause between attempts: a fraction of the time in which a lost member is to be found, and long enough that a
/// thousand members do not load the one that they call.
constexpr std::int64_t kPauseNs = 5'000'000;

/// Times after which a connection that gets no answer is made anew: the first, and the longest, to which they double. A
/// process that was ending may have left the connection open (seen in 2 of about 110 losses among 64 processes, where
/// only the members' patience ended it); a new attempt finds its port closed. With a first time of 50 ms the agreement
/// was as much later in 5 or more of 100 losses of processes that use a GPU. A stopped process collects seven
/// connections in the first second and one in each later one.
constexpr std::int64_t kFirstUnansweredNs = 10'000'000;
constexpr std::int64_t kLongestUnansweredNs = kNsPerSecond;

}  // namespace

MemberLink::MemberLink(const Member& to, const Caller& caller)
    : to_(to), caller_(caller), retry_(bootstrap::Deadline::after(0)), unanswered_ns_(kFirstUnansweredNs) {}

void MemberLink::advance() {
  if (channel_) {
    channel_->flush();
    read();
    return;
  }
  if (is_dead_ || !refusal_.ok()) return;
  if (!attempt_) {
    if (!retry_.expired()) return;
    Result<std::vector<bootstrap::Address>> addresses = bootstrap::resolve(to_.host, to_.port);
    if (!addresses.ok()) {
      refusal_ = addresses.status();
      return;
    }
    attempt_.emplace(addresses->front(), caller_.secret,
                     bootstrap::Hello{.nonce = {},
                                      .instance = {},
                                      .rank = caller_.id,
                                      .num_ranks = 0,
                                      .version = std::string(version()),
                                      .proof = {}});
    retry_ = bootstrap::Deadline::after(unanswered_ns_);
    unanswered_ns_ = std::min(2 * unanswered_ns_, kLongestUnansweredNs);
  }
  switch (attempt_->advance(retry_.expired() && !attempt_->is_answered())) {
    case bootstrap::ConnectionAttempt::Outcome::kWaiting:
      return;
    case bootstrap::ConnectionAttempt::Outcome::kFailed:
      is_dead_ = attempt_->failure().error == ECONNREFUSED;
      refusal_ = attempt_->failure().refusal;
      reason_ = attempt_->failure().reason;
      close();
      return;
    case bootstrap::ConnectionAttempt::Outcome::kConnected:
      channel_ = attempt_->take_channel();
      attempt_.reset();
      if (channel_->queue(bootstrap::FrameType::kMessage, opening_).ok()) channel_->flush();
      read();
  }
}

void MemberLink::close() {
  attempt_.reset();
  channel_.reset();
  retry_ = bootstrap::Deadline::after(kPauseNs);
}

bootstrap::Deadline MemberLink::next_deadline() const {
  return is_answered() ? bootstrap::Deadline::after(INT64_MAX) : retry_;
}

pollfd MemberLink::entry() const {
  if (channel_) return {channel_->fd(), channel_->poll_events(), 0};
  return attempt_ ? attempt_->entry() : pollfd{-1, POLLIN, 0};
}

void MemberLink::send(const View& view, const Content& content) {
  if (channel_ && channel_->queue(bootstrap::FrameType::kMessage, encode(view, content)).ok()) channel_->flush();
}

void MemberLink::read() {
  for (;;) {
    bootstrap::Frame frame;
    const bootstrap::ReceiveOutcome outcome = channel_->receive(&frame);
    if (outcome == bootstrap::ReceiveOutcome::kWouldBlock) return;
    const bool is_letter = outcome == bootstrap::ReceiveOutcome::kFrame && frame.type == bootstrap::FrameType::kMessage;
    Result<Letter> letter = is_letter ? decode(frame.payload) : Result<Letter>(Status(ErrorCode::kTransport, ""));
    if (!letter.ok()) {
      close();
      return;
    }
    letters_.push_back(std::move(*letter));
  }
}

}  // namespace ferry::membership
