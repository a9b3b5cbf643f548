#ifndef FERRY_BOOTSTRAP_TCP_DIAL_HPP
#define FERRY_BOOTSTRAP_TCP_DIAL_HPP

/// Connection of a rank to rank 0, whichever of its possible ports rank 0 has taken.

#include <string>

#include "bootstrap/channel.hpp"
#include "bootstrap/deadline.hpp"
#include "bootstrap/frame.hpp"
#include "bootstrap/vigil.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// Identity that a rank presents to rank 0.
struct PeerParams {
  const TcpBootstrapOptions& options;
  const std::string& version;
  Instance instance{};
  const Vigil& vigil;
};

/// Connects until rank 0 has accepted this rank. Does not wait for the other ranks. Calls all ports at once, each again
/// and again, so that another program that listens on one of them does not hold up the others.
/// @errors kTimeout: with the reason why the attempt failed that came furthest; kSystem; or rank 0's refusal
Result<Channel> dial_root(const PeerParams& params, Deadline deadline);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_DIAL_HPP
