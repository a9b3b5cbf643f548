#ifndef FERRY_MEMBERSHIP_AGREEMENT_HPP
#define FERRY_MEMBERSHIP_AGREEMENT_HPP

/// Agreement of the members of a view on the next one, as a state machine without clocks or sockets, one for each
/// attempt of a member. Every member follows a coordinator: the member with the lowest id that it does not hold for
/// gone.
///
///   1. Each member sends the coordinator that it follows a Report.
///   2. The coordinator waits until every member has reported or is gone. Those that have reported are the voters. It
///      takes a ballot later than all that it has heard of and sends them Prepare; they promise to take no proposal of
///      an earlier one, and say which proposal they have locked.
///   3. It sends them a Proposal: the view that was locked with the latest ballot, since others may have decided it, or
///      else the view that it has made of the reports. They lock and acknowledge it.
///   4. When all voters have acknowledged, the view is decided, and the coordinator sends them the Decision.
///
/// This is Paxos (Lamport, "Paxos Made Simple", 2001) with a coordinator as the proposer and other quorums. A
/// coordinator that loses a voter, or hears of a later ballot, begins again with 2; if it is lost itself, its followers
/// report to the next one.
///
/// Members may be held for gone that live. So that two parts which cannot reach each other do not both decide, a
/// proposal needs as voters
///   - all members that are not known to be dead, or
///   - more than half of all members, dead ones included, or half of them with the lowest id.
/// Any two such sets, whenever they come together, share a member, or all members of the earlier one are dead. Dead
/// members must count in the second case: of three members, 1 and 2 may decide without 0; if 1 dies then, 0 must not go
/// on as a half of what is left.
///
/// tests/unit/membership_agreement_test.cpp explores all orders of events for two to four members.

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "membership/view.hpp"

namespace ferry::membership {

/// Memory of a member that outlives its attempts to agree on one view.
struct AgreementMemory {
  Ballot promised{};
  Lock lock{};
};

class Agreement {
 public:
  struct Outgoing {
    Id to = 0;
    Message message{};
  };

  /// `self` is in `current`. `mine`: report of this member.
  Agreement(View current, Id self, Report mine, AgreementMemory memory);
  const AgreementMemory& memory() const { return memory_; }

  void receive(Id from, const Message& message);
  /// The member's process has ended.
  void note_dead(Id id) { note_gone(id, Gone::kDead); }
  /// The member has not been heard of for too long. Without effect on one that has reported to this rank.
  void note_silent(Id id);
  /// Members that are accused have had their time to come: from now on this member waits for none of them. Followers
  /// of an accused coordinator follow the next one, unless it has answered them (`followed_is_here`).
  void heed_accusations(bool followed_is_here);
  /// A member that had reported to this rank has closed its connection, and lives: it follows another coordinator.
  void note_departed(Id id);

  /// Messages to send since the last call, in order.
  std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }

  Id followed() const { return followed_; }
  bool coordinates() const { return followed_ == self_; }
  /// The next view, or a later one that others have decided. It may be without this member.
  const std::optional<View>& decided() const { return decided_; }
  /// Members that the coordinator waits for: those that have not reported, promised or acknowledged.
  std::vector<Id> awaited() const;
  /// Number of times that this coordinator has asked voters.
  int num_ballots() const { return num_ballots_; }
  /// Whether this coordinator could propose if more members took part.
  bool lacks_quorum() const { return lacks_quorum_; }
  int num_voters_needed() const;
  /// Members that are not known to be dead.
  std::vector<Id> possibly_alive() const;
  const Report& mine() const { return mine_; }

 private:
  friend struct AgreementState;  // of the test, which compares states
  enum class Gone : std::uint8_t { kNo, kSilent, kDead };

  void take(Id from, const Report& report);
  void take(Id from, const Prepare& prepare);
  void take(Id from, const Promise& promise);
  void take(Id from, const Proposal& proposal);
  void take(Id from, const Acknowledgement& acknowledgement);
  void take(Id from, const Decision& decision);
  void note_gone(Id id, Gone how);
  /// Does what the latest event made possible.
  void advance();
  void follow(Id id);
  void coordinate();
  void prepare(const std::vector<Id>& voters);
  void propose();
  /// Whether `answer` is to the coordinator's present ballot. One that names a later ballot makes it begin again.
  bool is_current(const Ballot& answer);
  void send_to_voters(const Message& message);
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
  AgreementMemory memory_;
  // State of a coordinator:
  enum class Phase : std::uint8_t { kReports, kPromises, kAcknowledgements };
  struct Voter {
    bool has_answered = false;
    Lock lock{};
  };
  Phase phase_ = Phase::kReports;
  std::map<Id, Voter> voters_;
  Ballot ballot_;
  std::uint64_t latest_round_ = 0;  // that it has heard of
  View proposed_;
  int num_ballots_ = 0;
  bool lacks_quorum_ = false;

  std::optional<View> decided_;
  std::vector<Outgoing> outgoing_;
};

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_AGREEMENT_HPP
