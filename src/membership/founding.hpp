#ifndef FERRY_MEMBERSHIP_FOUNDING_HPP
#define FERRY_MEMBERSHIP_FOUNDING_HPP

/// The first view, from a bootstrap.

#include <memory>
#include <string>

#include "ferry/membership.hpp"
#include "membership/endpoint.hpp"

namespace ferry::membership {

/// Sockets, secret and view of a process that is a member.
struct Founded {
  std::unique_ptr<Endpoint> endpoint{};
  /// For views of which this process is rank 0. One for all: a new one for each could get the port of a member that has
  /// just ended, and others would take it for that member.
  UniqueFd bootstrap_listener{};
  std::string secret{};
  View view{};
  Member self{};
};

/// @errors those of Membership::create
Result<Founded> found(Bootstrap* bootstrap, const MembershipOptions& options);

/// "host:port", "[::1]:port".
std::string address_of(const Member& member);

/// Whether a time to wait is in range. `what` begins the message.
Status check_timeout(std::string_view what, std::int64_t timeout_ns);

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_FOUNDING_HPP
