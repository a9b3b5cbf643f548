#ifndef FERRY_MEMBERSHIP_AGREEMENT_HPP
#define FERRY_MEMBERSHIP_AGREEMENT_HPP

/// Agreement of the members of a view on the next one, as a state machine without clocks or sockets, one for each
/// member. Every member follows a coordinator: the member with the lowest id that it does not hold for gone.
///
///   1. Each member sends the coordinator that it follows a Report.
///   2. The coordinator waits until every member has reported or is gone, and sends those that have reported, the
///      voters, a Proposal. They remember it (their lock) and acknowledge it.
///   3. When all voters have acknowledged, the view is decided, and the coordinator sends them the Decision.
///
/// A coordinator that loses a voter before that starts again from 2. If it is lost itself, its followers report to the
/// next one, with their locks. A view may have been decided only if all voters had locked it, so a new coordinator that
/// finds a lock proposes the locked view again, with the latest ballot if there are several.
///
/// Members may be held for gone that live. So that two parts which cannot reach each other do not both decide, a
/// proposal needs as voters
///   - all members that are not known to be dead, or
///   - more than half of all members, dead ones included, or half of them with the lowest id.
/// Any two such sets, whenever they come together, share a member, or all members of the earlier one are dead. Dead
/// members must count in the second case: of three members, 1 and 2 may decide without 0; if 1 dies then, 0 must not go
/// on as a half of what is left.
///
/// tests/unit/membership_agreement_test.cpp explores all orders of events for three and four members.

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "membership/view.hpp"

namespace ferry::membership {

class Agreement {
 public:
  struct Outgoing {
    Id to = 0;
    Message message{};
  };

  /// `self` is in `current`. `mine`: what this member reports, with the lock of an earlier attempt if there was one.
  Agreement(View current, Id self, Report mine);

  void receive(Id from, const Message& message);
  /// The member's process has ended.
  void note_dead(Id id) { note_gone(id, Gone::kDead); }
  /// The member has not been heard of for too long. Without effect on one that has reported to this rank.
  void note_silent(Id id);
  /// Members that are accused have had their time to come: from now on this member waits for none of them. Followers
  /// of an accused coordinator follow the next one.
  void heed_accusations();
  /// A member that had reported to this rank has closed its connection, and lives: it follows another coordinator.
  void note_departed(Id id);

  /// Messages to send since the last call, in order.
  std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }

  Id followed() const { return followed_; }
  bool coordinates() const { return followed_ == self_; }
  /// The next view, or a later one that others have decided. It may be without this member.
  const std::optional<View>& decided() const { return decided_; }
  /// Members that the coordinator waits for: those that have not reported, or not acknowledged.
  std::vector<Id> awaited() const;
  /// Number of proposals that this coordinator has made.
  std::uint64_t num_proposals() const { return round_; }
  /// Whether this coordinator could propose if more members took part.
  bool lacks_quorum() const { return lacks_quorum_; }
  int num_voters_needed() const;
  /// Members that are not known to be dead.
  std::vector<Id> possibly_alive() const;
  /// Report of this member, with its lock.
  const Report& mine() const { return mine_; }

 private:
  friend struct AgreementState;  // of the test, which compares states
  enum class Gone : std::uint8_t { kNo, kSilent, kDead };

  void take(Id from, const Report& report);
  void take(Id from, const Proposal& proposal);
  void take(Id from, const Acknowledgement& acknowledgement);
  void take(Id from, const Decision& decision);
  void note_gone(Id id, Gone how);
  /// Does what the latest event made possible.
  void advance();
  void follow(Id id);
  void coordinate();
  void propose(std::vector<Id> voters);
  bool is_accused(Id id) const;
  bool has_quorum(const std::vector<Id>& voters) const;
  View next_view(const std::vector<Id>& voters) const;
  void add_joiners(const std::vector<Id>& voters, View& view) const;

  View current_;
  Id self_;
  Report mine_;
  std::map<Id, Gone> gone_;
  bool heeds_accusations_ = false;
  Id followed_ = -1;
  std::map<Id, Report> reports_;
  // State of a coordinator:
  std::uint64_t round_ = 0;
  std::optional<Proposal> proposed_;
  std::map<Id, bool> has_acknowledged_;  // by voter
  bool lacks_quorum_ = false;

  std::optional<View> decided_;
  std::vector<Outgoing> outgoing_;
};

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_AGREEMENT_HPP
