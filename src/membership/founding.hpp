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
  UniqueFd bootstrap_listener{};  ///< of the present view, if this process is its rank 0
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
