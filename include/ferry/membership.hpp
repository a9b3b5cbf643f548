#ifndef FERRY_MEMBERSHIP_HPP
#define FERRY_MEMBERSHIP_HPP

/// Membership: the ranks of a program as a set that shrinks when processes are lost, and grows when others take their
/// place. The members that are left agree on who they are, and on the step from which they all go on; then they form
/// new groups from that. docs/membership.md is the guide, docs/inside-lost-ranks.md explains the protocol.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/export.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// The members at one time, as all of them know it.
struct MembershipView {
  std::uint64_t epoch = 0;  ///< 0 for the first view, one more for each later one
  int rank = 0;             ///< this process's index in `ids`; -1: it has left
  /// [R] numbers of the members, ascending. A member keeps its number in all views, a process that takes a lost one's
  /// place has that one's number, and further processes have new ones. The rank in groups of this view is the index
  /// here, but in a group with absent ranks (GroupOptions::present_ranks) the number itself.
  std::vector<int> ids{};
  /// Ranks that members of this view had in the one before, ascending: what `surviving_placement` needs. Empty in the
  /// first view, and for a process that has just joined.
  std::vector<int> kept_ranks{};
  std::vector<int> lost_ids{};    ///< members of the view before that are not in this one; empty as kept_ranks
  std::vector<int> joined_ids{};  ///< members of this view that were not in the one before, as processes; empty as
                                  ///< kept_ranks
  /// Steps that all members that come from the view before have completed: the lowest number that one of them had given
  /// to `complete_steps`. What a member did after that step the others have not, so all go on from there.
  std::uint64_t num_complete_steps = 0;

  int num_ranks() const { return static_cast<int>(ids.size()); }
};

/// Options of Membership::create. The same on every rank, except `host` and `interrupted`.
struct MembershipOptions {
  /// Numeric address of this process's host at which the other members reach it. Empty: Bootstrap::local_address(), or
  /// 127.0.0.1 if it is not known and all ranks are on one host.
  std::string host{};
  /// Known to all members; each proves that it knows it, it is never sent. Empty: one that rank 0 draws at random; then
  /// no other process can join.
  std::string secret{};
  /// Time that `next_view` and `bootstrap` wait for a member whose process lives and which does not come. Longer than
  /// the longest time between two calls of next_view's callers, as when one computes while another's call has failed.
  std::int64_t timeout_ns = kDefaultTimeoutNs;
  /// Called ten times a second or more while `next_view` or `bootstrap` waits, by the thread that called it; true ends
  /// the wait with kPeerLost. Must not throw or call the Membership. Empty: the wait lasts until it succeeds or its
  /// time is over.
  std::function<bool()> interrupted{};
};

/// Options of Membership::join.
struct JoinOptions {
  std::vector<std::string> contacts{};  ///< "host:port" of members (`Membership::address`), tried in turn
  std::string secret{};                 ///< that of the members
  int id = -1;                          ///< number to take: that of a lost member, or a new one; -1: the lowest free
  std::string host{};                   ///< as MembershipOptions::host; empty: the address that leads to the contact
  std::int64_t admission_timeout_ns = kDefaultTimeoutNs;  ///< time until the members let it in
  std::int64_t timeout_ns = kDefaultTimeoutNs;            ///< as MembershipOptions::timeout_ns, once it is a member
  std::function<bool()> interrupted{};                    ///< as MembershipOptions::interrupted
};

/// Options of Membership::next_view.
struct NextViewOptions {
  /// Error of the call that failed, of a group whose ranks are those of the present view. If it is a kTimeout, the rank
  /// that it names counts as lost unless it comes to next_view before the others are complete. Ranks of a group with
  /// absent ones are ids: name them in `silent_ids`. Other errors are evidence of nothing: members find out themselves
  /// which processes have ended.
  Status reason{};
  /// Members that the caller has waited for in vain, such as ranks that Group::suspend returns: they too count as lost
  /// unless they come before the others are complete. Other ids than those of other members are ignored.
  std::vector<int> silent_ids{};
  /// This process leaves: the next view is without it (`rank` is -1), unless one is decided that was proposed before.
  bool leave = false;
};

/// A process's part in a changing set of members. Uses two listening sockets, and connections while a view changes;
/// no thread. Calls of one object run one after the other.
///
/// A forked child holds copies of the sockets: as long as it lives, its parent's death looks like silence.
class FERRY_API Membership {
 public:
  /// Collective over the ranks of `bootstrap`, which is used only during this call. The first view has the ids
  /// 0 .. R-1, the ranks of the bootstrap.
  /// @errors kInvalidArgument: options out of range, more than 8192 ranks, an address that is needed and not known;
  ///         kSystem: no socket, or an address that is not of this host; what the bootstrap reports. The same on every
  ///         rank
  [[nodiscard]] static Result<std::shared_ptr<Membership>> create(std::shared_ptr<Bootstrap> bootstrap,
                                                                  const MembershipOptions& options = {});

  /// Asks members to be let in, and waits until they have made their next view, with this process in it. They let it in
  /// when they all call next_view for any reason.
  /// @errors kInvalidArgument: options out of range, or another version of Ferry; kTimeout: no contact answered, or the
  ///         members did not let it in: none called next_view, or a living member has that id; kSystem
  [[nodiscard]] static Result<std::shared_ptr<Membership>> join(const JoinOptions& options);

  /// Closes the sockets. For the others this process has ended; to leave in good order call next_view with `leave`.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  const MembershipView& view() const;
  /// "host:port" of this process, for JoinOptions::contacts.
  std::string address() const;

  /// This process has completed the steps 0 .. num_steps-1, by the program's own count. Says so in the next view
  /// change; sends nothing now. Answers processes that ask to join, and members that were left out.
  void complete_steps(std::uint64_t num_steps);
  /// Processes that ask this one to be let in. Local, never waits; other members may know of others.
  int num_waiting();
  /// Members that wait for this one in next_view. Local, never waits; a member may first ask another one.
  int num_awaiting();

  /// Collective over the members that live: agree on the next view. Call it when a call of a group has failed with
  /// kPeerLost, kTimeout or kTransport, on every member (their calls fail too), or at any step at which all members
  /// call it, to let others in or to leave. It returns as soon as every member has come, or has been found dead, or has
  /// kept the others waiting for `timeout_ns`.
  ///
  /// All members that return ok have the same view. A member that dies meanwhile may be in it: then forming a group
  /// fails, and the next call of next_view is without it. A process that has ended is known to have, at once. One that
  /// lives and does not come may be cut off and have members of its own, so without such ones only those go on that are
  /// more than half of the view before, or half of it with the lowest id. docs/membership.md says which case is left.
  ///
  /// Whatever the reason for the call, go on from `num_complete_steps` of the new view. A group stays usable if the
  /// processes of its view are all in the new one, and no others.
  /// @errors kTimeout: too few members came; call it again. kPeerLost: this process was left out (`peer` is its rank,
  ///         and every later call returns the same), or `interrupted` said so (`peer` likewise; may be called again).
  ///         kSystem. The view stays as it was
  [[nodiscard]] Result<MembershipView> next_view(const NextViewOptions& options = {});

  /// Collective over the members of the view, once in each: a bootstrap among them, for Group::create and
  /// OneSided::create. Later calls in the same view return the same object, or the same error. After an error call
  /// next_view: every member gets one, soon after a member has ended or has asked for the next view.
  /// @errors kPeerLost: a member has ended or has asked for the next view, or `interrupted` said so; those of
  ///         create_tcp_bootstrap
  [[nodiscard]] Result<std::shared_ptr<Bootstrap>> bootstrap();

 private:
  class State;
  explicit Membership(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ferry

#endif  // FERRY_MEMBERSHIP_HPP
