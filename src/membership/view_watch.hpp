#ifndef FERRY_MEMBERSHIP_VIEW_WATCH_HPP
#define FERRY_MEMBERSHIP_VIEW_WATCH_HPP

/// Looks after the members of a view while they form its bootstrap: whether those that this process needs there live.

#include <map>

#include "membership/member_link.hpp"

namespace ferry::membership {

class ViewWatch {
 public:
  /// Rank 0 needs all members, and the others need rank 0. Keeps a reference to `view`.
  ViewWatch(const View& view, const Member& self, const Caller& caller);

  /// Goes on as far as it can without waiting.
  /// @errors kPeerLost: a member has ended, or is in a later view; names its rank
  Status check();

 private:
  const View& view_;
  Member self_;
  Caller caller_;
  bootstrap::Deadline begin_;
  std::map<int, MemberLink> links_;  // by rank
};

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_VIEW_WATCH_HPP
