#include "bootstrap/tcp_dial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bootstrap/connection_attempt.hpp"
#include "bootstrap/errors.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/ports.hpp"
#include "bootstrap/socket.hpp"
#include "core/descriptors.hpp"

namespace ferry::bootstrap {
namespace {

// Pauses between attempts: short at first, because ranks start together; then long enough that a thousand ranks do not
// load rank 0.
constexpr std::int64_t kFirstPauseNs = 5'000'000;
constexpr std::int64_t kLongestPauseNs = 250'000'000;

using Stage = ConnectionAttempt::Stage;

struct Retry {
  Stage stage = Stage::kConnect;
  std::string reason;
};

/// End of all attempts: the accepted channel, or an error that no further attempt can mend. Empty while they go on.
using Verdict = std::optional<Result<Channel>>;

/// Attempts at one port: the host's addresses one after the other, then again after a pause. Never waits, but for the
/// system's resolver.
class PortCaller {
 public:
  /// @param host  addresses of rank 0's host, which the first caller resolves for all
  PortCaller(const PeerParams& params, std::uint16_t port, Deadline deadline, std::vector<Address>& host, bool is_first)
      : params_(params),
        port_(port),
        is_first_(is_first),
        host_(host),
        deadline_(deadline),
        timer_(Deadline::after(0)) {}

  /// Goes on as far as it can without waiting.
  Verdict advance();
  /// Wait for this, or until the time of next_deadline().
  pollfd entry() const;
  Deadline next_deadline() const { return timer_; }
  const Retry& furthest() const { return furthest_; }

 private:
  Verdict begin_round();
  void begin_attempt();
  Verdict end_attempt();
  void pause();

  const PeerParams& params_;
  std::uint16_t port_;
  bool is_first_;
  std::vector<Address>& host_;
  Deadline deadline_;
  Deadline timer_;  // end of the pause or of the attempt
  std::int64_t pause_ns_ = kFirstPauseNs;
  std::vector<Address> addresses_;
  std::size_t address_idx_ = 0;
  std::optional<ConnectionAttempt> attempt_;  // empty: pausing
  Retry furthest_;
};

Verdict PortCaller::advance() {
  if (!attempt_) {
    // An attempt that begins at the deadline could only hide why the earlier ones failed.
    if (!timer_.expired() || (deadline_.expired() && !furthest_.reason.empty())) return {};
    if (Verdict verdict = begin_round()) return verdict;
  }
  while (attempt_) {
    switch (attempt_->advance(timer_.expired())) {
      case ConnectionAttempt::Outcome::kWaiting:
        return {};
      case ConnectionAttempt::Outcome::kConnected:
        return Verdict(attempt_->take_channel());
      case ConnectionAttempt::Outcome::kFailed:
        if (Verdict verdict = end_attempt()) return verdict;
    }
  }
  return {};
}

pollfd PortCaller::entry() const { return attempt_ ? attempt_->entry() : pollfd{-1, POLLIN, 0}; }

Verdict PortCaller::begin_round() {
  if (is_first_) {
    Result<std::vector<Address>> found = resolve(params_.options.host, port_);
    if (!found.ok() && found.status().code() != ErrorCode::kTransport) return Verdict(found.status());
    if (!found.ok() && furthest_.stage == Stage::kConnect) furthest_.reason = found.status().message();
    host_ = found.ok() ? std::move(*found) : std::vector<Address>();
  }
  addresses_ = host_;
  for (Address& address : addresses_) set_port(&address, port_);
  address_idx_ = 0;
  if (addresses_.empty()) {
    pause();
  } else {
    begin_attempt();
  }
  return {};
}

void PortCaller::pause() {
  timer_ = earlier(deadline_, Deadline::after(pause_ns_));
  pause_ns_ = std::min(pause_ns_ * 2, kLongestPauseNs);
}

void PortCaller::begin_attempt() {
  // An address that never answers must leave time for the others.
  timer_ = earlier(deadline_, Deadline::after(std::min(kHandshakeNs, params_.options.timeout_ns / 2)));
  attempt_.emplace(addresses_[address_idx_], params_.options.secret,
                   Hello{.nonce = {},
                         .instance = params_.instance,
                         .rank = static_cast<std::uint32_t>(params_.options.rank),
                         .num_ranks = static_cast<std::uint32_t>(params_.options.num_ranks),
                         .version = params_.version,
                         .proof = {}});
}

/// Goes on with the next address.
Verdict PortCaller::end_attempt() {
  const ConnectionAttempt::Failure failure = attempt_->failure();
  attempt_.reset();
  if (!failure.refusal.ok()) return Verdict(failure.refusal);
  const bool lacks_descriptors = is_out_of_descriptors(failure.error);
  const std::string reason = lacks_descriptors ? describe_descriptor_limit(failure.error, 1) : failure.reason;
  if (lacks_descriptors && is_first_) {
    return Verdict(Status(ErrorCode::kSystem, fmt::format("create_tcp_bootstrap: socket() failed: {}", reason)));
  }
  if (failure.stage >= furthest_.stage) {
    furthest_ = {failure.stage, fmt::format("{}: {}", to_string(addresses_[address_idx_]), reason)};
  }
  if (++address_idx_ < addresses_.size() && !deadline_.expired()) {
    begin_attempt();
  } else {
    pause();
  }
  return {};
}

Status timed_out(const PeerParams& params, const std::vector<PortCaller>& callers) {
  const auto furthest =
      std::ranges::max_element(callers, {}, [](const PortCaller& caller) { return caller.furthest().stage; });
  const TcpBootstrapOptions& options = params.options;
  return Status(ErrorCode::kTimeout,
                fmt::format("create_tcp_bootstrap: rank {} could not connect to rank 0 at host '{}' {} within {}: {}. "
                            "Check that rank 0 is running, and that host, port and secret are the same on both",
                            options.rank, options.host, describe_ports(options), format_seconds(options.timeout_ns),
                            furthest->furthest().reason),
                0);
}

}  // namespace

Result<Channel> dial_root(const PeerParams& params, Deadline deadline) {
  std::vector<Address> host;
  std::vector<PortCaller> callers;
  for (const std::uint16_t port : ports_of(params.options)) {
    callers.emplace_back(params, port, deadline, host, callers.empty());
  }
  for (;;) {
    std::vector<pollfd> entries;
    Deadline next = deadline;
    const bool is_over = deadline.expired();
    for (PortCaller& caller : callers) {
      if (Verdict verdict = caller.advance()) return std::move(*verdict);
      entries.push_back(caller.entry());
      next = earlier(next, caller.next_deadline());
    }
    if (is_over) return timed_out(params, callers);
    if (Status status = wait_until_ready(entries, next, params.vigil); !status.ok()) return status;
  }
}

}  // namespace ferry::bootstrap
