#ifndef FERRY_BOOTSTRAP_TCP_ACCEPTOR_HPP
#define FERRY_BOOTSTRAP_TCP_ACCEPTOR_HPP

/// Rank 0's listening socket: accepts connections and authenticates them.
///
/// Unauthenticated connections can consume only bounded resources: one small Pending each, at most `kNumSparePending +
/// num_ranks` of them, for at most `handshake_ns`. When all are in use, the oldest is closed; if that was a rank, it
/// connects again. When file descriptors run out, connections that have not sent their hello within a short time are
/// closed. Nothing here blocks: the caller polls.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/channel.hpp"
#include "bootstrap/deadline.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/socket.hpp"
#include "core/unique_fd.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// Connection whose other end has the secret.
struct AuthenticatedPeer {
  Channel channel;
  Hello hello;
  std::string address;
};

class TcpAcceptor {
 public:
  struct Params {
    UniqueFd listener;
    std::string secret;
    int num_ranks = 0;
    std::int64_t handshake_ns = kHandshakeNs;
  };
  explicit TcpAcceptor(Params params);

  /// Appends the entries to poll. Pass the same entries to `serve`, with no other call in between.
  void add_poll_entries(std::vector<pollfd>* entries) const;
  /// Time at which to call `serve` even if no entry is ready, no later than `latest`.
  Deadline next_deadline(Deadline latest) const;
  /// `entries` are those of add_poll_entries after the poll. Appends the peers that completed the handshake, also when
  /// it fails.
  /// @errors kSystem: the listening socket or libcrypto failed, or file descriptors ran out although no unauthenticated
  ///         connection holds any; later calls then serve one connection at a time, to report the error to ranks
  Status serve(std::span<const pollfd> entries, std::vector<AuthenticatedPeer>* peers);

  /// Connections that sent a well-formed hello with a wrong proof: most likely ranks with another secret.
  int num_wrong_proofs() const { return num_wrong_proofs_; }

 private:
  /// Connection before its hello is verified.
  struct Pending {
    UniqueFd fd;
    Address address;
    Nonce nonce{};
    Deadline deadline;
    Deadline room_maker;  // from then on it may be closed if descriptors are short
    HelloFrame received{};
    std::size_t num_received = 0;
  };
  enum class Progress { kWaiting, kRefused, kProven };

  Progress read_from(Pending* pending, Result<Hello>* hello);
  Status hand_out(Pending* pending, const Hello& hello, std::vector<AuthenticatedPeer>* peers);
  Status accept_some();
  Status send_challenge(UniqueFd fd, const Address& address);
  void drop_oldest();
  void pause();
  Status out_of_descriptors(int error);

  Params params_;
  std::size_t max_pending_;
  std::vector<Pending> pending_;  // in order of arrival
  bool accepting_ = true;
  Deadline accept_again_;  // after running out of file descriptors
  int num_wrong_proofs_ = 0;
  int num_proven_ = 0;
  UniqueFd spare_;  // freed to report to the ranks that descriptors ran out
};

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_ACCEPTOR_HPP
