#ifndef FERRY_MEMBERSHIP_MEMBER_LINK_HPP
#define FERRY_MEMBERSHIP_MEMBER_LINK_HPP

/// Connection that a member makes to another one, again and again until that takes it or is found dead.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/connection_attempt.hpp"
#include "bootstrap/deadline.hpp"
#include "membership/messages.hpp"

namespace ferry::membership {

/// Identity of a process that connects, and the secret that it proves to have. `secret` must outlive its copies.
struct Caller {
  std::uint32_t id = 0;
  std::string_view secret{};
};

class MemberLink {
 public:
  MemberLink(const Member& to, const Caller& caller);

  /// Letter with which every connection begins.
  void open_with(const View& view, const Content& content) { opening_ = encode(view, content); }
  /// Goes on as far as it can without waiting.
  void advance();
  pollfd entry() const;
  bootstrap::Deadline next_deadline() const;

  /// No process listens at the member's address: its process has ended.
  bool is_dead() const { return is_dead_; }
  /// The member's process lives: it has accepted a connection, or will.
  bool is_heard() const { return channel_.has_value() || (attempt_ && attempt_->is_heard()); }
  /// The member has taken this process's presentation.
  bool is_connected() const { return channel_.has_value(); }
  /// The member's process has begun to answer, and goes on at its next call of the Membership.
  bool is_answered() const { return channel_.has_value() || (attempt_ && attempt_->is_answered()); }
  /// The other end has refused this process, or this machine cannot connect: no further attempt can mend that.
  const Status& refusal() const { return refusal_; }
  /// Why the last attempt failed; empty if none has.
  const std::string& reason() const { return reason_; }

  /// On the present connection; lost if there is none.
  void send(const View& view, const Content& content);
  std::vector<Letter> take_letters() { return std::exchange(letters_, {}); }

 private:
  void read();
  void close();

  Member to_;
  Caller caller_;
  std::vector<std::byte> opening_{};
  std::optional<bootstrap::ConnectionAttempt> attempt_{};
  std::optional<bootstrap::Channel> channel_{};
  std::vector<Letter> letters_{};
  bootstrap::Deadline retry_;  // time of the next attempt, or until which the present one waits for an answer
  std::int64_t unanswered_ns_;
  bool is_dead_ = false;
  Status refusal_{};
  std::string reason_{};
};

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_MEMBER_LINK_HPP
