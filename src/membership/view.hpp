#ifndef FERRY_MEMBERSHIP_VIEW_HPP
#define FERRY_MEMBERSHIP_VIEW_HPP

/// Values that members exchange about views, and the messages that carry them.

#include <compare>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace ferry::membership {

/// Number of a member. A member keeps it in all views; its rank in a view is the number of members with smaller ids.
using Id = std::int32_t;

/// A member, and where others reach it.
struct Member {
  Id id = 0;
  std::string host{};
  std::uint16_t port = 0;            ///< where it answers other members
  std::uint16_t bootstrap_port = 0;  ///< where it listens as rank 0 of a view's bootstrap

  /// Whether both are one process: a replacement has the id of the member that it replaces, and another port.
  bool is_same_process(const Member& other) const { return id == other.id && port == other.port && host == other.host; }
  bool operator==(const Member&) const = default;
};

struct View {
  std::uint64_t epoch = 0;
  std::vector<Member> members{};         ///< ascending by id
  std::uint64_t num_complete_steps = 0;  ///< by all members that came from the view before

  const Member* find(Id id) const {
    for (const Member& member : members) {
      if (member.id == id) return &member;
    }
    return nullptr;
  }
  bool operator==(const View&) const = default;
};

/// Number of a proposal. A coordinator takes a round above all that its voters have promised.
struct Ballot {
  std::uint64_t round = 0;  ///< 0: none
  Id coordinator = -1;
  auto operator<=>(const Ballot&) const = default;
};

/// A member presents itself to the coordinator that it follows.
struct Report {
  std::uint64_t num_complete_steps = 0;
  bool leaves = false;
  std::vector<Id> accused{};      ///< members that it waits for no longer
  std::vector<Member> joiners{};  ///< processes that ask it to be let in; id -1: any
};
/// The coordinator asks a voter to take no earlier proposal than its own from now on.
struct Prepare {
  Ballot ballot{};
};
/// Latest proposal that a member has acknowledged.
struct Lock {
  Ballot ballot{};
  View view{};  ///< if there is one
};
/// The voter promises that, or names the later ballot that it has promised already.
struct Promise {
  Ballot ballot{};
  Lock lock{};
};
struct Proposal {
  Ballot ballot{};
  View view{};
};
/// The voter has locked the proposal, or names the later ballot that it has promised.
struct Acknowledgement {
  Ballot ballot{};
};
/// The view is decided.
struct Decision {
  View view{};
};

using Message = std::variant<Report, Prepare, Promise, Proposal, Acknowledgement, Decision>;

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_VIEW_HPP
