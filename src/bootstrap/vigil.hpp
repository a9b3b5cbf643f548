#ifndef FERRY_BOOTSTRAP_VIGIL_HPP
#define FERRY_BOOTSTRAP_VIGIL_HPP

#include <functional>
#include <span>

#include "bootstrap/deadline.hpp"
#include "bootstrap/socket.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// Asked every few milliseconds while ranks wait for each other: an error ends the wait of this rank, which returns it.
/// Empty: not asked.
using Vigil = std::function<Status()>;

/// A fraction of the time in which a lost rank is to be found.
inline constexpr std::int64_t kVigilNs = 5'000'000;

/// wait_until_ready for loops that come back: with a vigil it also returns after a short time.
inline Status wait_until_ready(std::span<pollfd> entries, Deadline deadline, const Vigil& vigil) {
  if (!vigil) return wait_until_ready(entries, deadline);
  Status status = wait_until_ready(entries, earlier(deadline, Deadline::after(kVigilNs)));
  return status.ok() ? vigil() : status;
}

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_VIGIL_HPP
