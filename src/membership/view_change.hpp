#ifndef FERRY_MEMBERSHIP_VIEW_CHANGE_HPP
#define FERRY_MEMBERSHIP_VIEW_CHANGE_HPP

/// One change of a member's view: carries the messages of its Agreement over connections, and notices members that
/// have died, have left for another coordinator, or are silent. Runs in the thread that asks for the next view.

#include <cstdint>
#include <functional>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "membership/agreement.hpp"
#include "membership/endpoint.hpp"
#include "membership/member_link.hpp"

namespace ferry::membership {

struct ViewChangeParams {
  Endpoint& endpoint;
  std::string_view secret;
  const View& current;
  Id self = 0;
  int rank = 0;          ///< of `self` in the current view
  Agreement& agreement;  ///< on the view after the current one
  std::int64_t timeout_ns = 0;
  const std::function<bool()>& interrupted;
};

class ViewChange {
 public:
  /// Keeps references to what `params` refers to.
  explicit ViewChange(const ViewChangeParams& params);

  /// The next view, which may be without this member. `arrivals`: letters of other members that came before.
  /// @errors kTimeout: too few members to go on; kPeerLost: interrupted; kSystem; kInvalidArgument: another version of
  ///         Ferry
  Result<View> run(std::vector<Endpoint::Arrival> arrivals);
  /// Letters that came meanwhile and are for later: of processes that ask to be let in, and of members that are a view
  /// ahead.
  std::vector<Endpoint::Arrival> take_later() { return std::exchange(later_, {}); }

 private:
  struct Reporter {
    Endpoint::Key key = 0;
    bool is_closed = false;
  };

  void take(const Endpoint::Arrival& arrival);
  void take_closed(const Endpoint::Arrival& arrival);
  /// Brings links in line with what the agreement waits for.
  void update_links();
  Status drive_links();
  Status check_link(Id id, const MemberLink& link);
  void send_outgoing();
  void check_times();
  bootstrap::Deadline next_time() const;
  Status wait();
  Status check_quorum() const;
  Status interrupt() const;

  Result<View> carry_on();

  ViewChangeParams params_;
  Agreement& agreement_;
  std::map<Id, MemberLink> links_;    // to the coordinator, or of the coordinator to members that it waits for
  std::map<Id, Reporter> reporters_;  // members that have reported to this one
  Id followed_;
  bool followed_is_here_ = false;  // it has answered
  bootstrap::Deadline patience_;   // until members that are waited for count as silent
  int num_ballots_ = 0;            // that patience_ is for
  bootstrap::Deadline grace_;      // until accused members are waited for no longer
  bool grace_is_over_ = false;
  bootstrap::Deadline quorum_time_;  // until a coordinator without a quorum gives up
  bootstrap::Deadline next_beat_;
  std::vector<Endpoint::Arrival> arrived_;
  std::vector<Endpoint::Arrival> later_;
};

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_VIEW_CHANGE_HPP
