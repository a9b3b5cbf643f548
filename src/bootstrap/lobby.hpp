#ifndef FERRY_BOOTSTRAP_LOBBY_HPP
#define FERRY_BOOTSTRAP_LOBBY_HPP

/// Rank 0's front door: takes whoever connects, lets through who knows the secret.
///
/// What a stranger can make it spend is fixed beforehand: one small Stranger each, at most `kNumSpareSeats + num_ranks`
/// of them, for at most `kHandshakeNs`. When all places are taken the longest-waiting stranger has to go; a rank that
/// this hits connects again. Nothing here blocks: the caller polls.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/auth.hpp"
#include "bootstrap/channel.hpp"
#include "bootstrap/deadline.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/socket.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// Time from connecting to a verified hello: two messages, with room for a slow network and a busy machine, and short
/// beside any sensible deadline of the group.
inline constexpr std::int64_t kHandshakeNs = 5 * kNsPerSecond;

/// Somebody who knows the secret.
struct Arrival {
  Channel channel;
  Hello hello;
  std::string address;
};

class Lobby {
 public:
  struct Params {
    UniqueFd listener;
    std::string secret;
    int num_ranks = 0;
    std::int64_t handshake_ns = kHandshakeNs;
  };
  explicit Lobby(Params params);

  /// Append what to poll for. Between this and `serve` the lobby must not be touched.
  void add_poll_entries(std::vector<pollfd>* entries) const;
  /// When `serve` is due even if nothing happens; `latest` if never before.
  Deadline next_deadline(Deadline latest) const;
  /// `entries` are those of add_poll_entries, after the poll. Appends who got through.
  /// @errors kSystem: the listening socket or libcrypto failed
  Status serve(std::span<const pollfd> entries, std::vector<Arrival>* arrivals);

  /// Connections that sent a well-formed hello with a wrong proof. Most likely ranks with another secret.
  int num_wrong_proofs() const { return num_wrong_proofs_; }
  /// All that were sent away, whatever the reason.
  int num_refused() const { return num_refused_; }

 private:
  struct Stranger {
    UniqueFd fd;
    Address address;
    Nonce nonce{};
    Deadline deadline;
    HelloFrame received{};
    std::size_t num_received = 0;
  };
  enum class Progress { kWaiting, kRefused, kProven };

  Progress read_from(Stranger* stranger, Result<Hello>* hello);
  Status let_through(Stranger* stranger, const Hello& hello, std::vector<Arrival>* arrivals);
  Status accept_some();
  Status welcome_stranger(UniqueFd fd, const Address& address);
  void drop_oldest();

  Params params_;
  std::size_t max_strangers_;
  std::vector<Stranger> strangers_;  // in order of arrival
  bool listening_ = true;
  Deadline listen_again_;  // when descriptors have run out
  int num_wrong_proofs_ = 0;
  int num_refused_ = 0;
};

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_LOBBY_HPP
