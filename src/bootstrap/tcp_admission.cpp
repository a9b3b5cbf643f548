#include "bootstrap/tcp_admission.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "bootstrap/errors.hpp"
#include "bootstrap/tcp_acceptor.hpp"

namespace ferry::bootstrap {
namespace {

// Time for which rank 0 stays to report the error to ranks that connect late. Launchers start the ranks of a job within
// seconds of each other; a later rank cannot connect and times out.
constexpr std::int64_t kMaxLatecomerNs = 5 * kNsPerSecond;

class Admission {
 public:
  Admission(const TcpBootstrapOptions& options, UniqueFd listener, const std::string& version, const Vigil& vigil);

  Status wait_for_all();
  Status start_all();
  /// Channels of all ranks, in rank order.
  std::vector<Channel> take_channels();
  /// Sends `error` to all connected ranks and, unless time has run out, to those that connect a little later. Returns
  /// the error as they see it.
  Status reject_all(const Status& error);

 private:
  struct Member {
    std::optional<Channel> channel;
    Instance instance{};
    std::string address;
  };

  std::size_t num_ranks() const { return members_.size(); }
  std::vector<bool> arrived() const;
  Status missing() const;

  /// One round of the poll loop that serves the listener, pending connections and admitted ranks.
  Status poll_once();
  Status read_from(std::size_t rank);
  Status admit(AuthenticatedPeer peer);
  Status find_disagreement(const AuthenticatedPeer& peer) const;

  const TcpBootstrapOptions& options_;
  const std::string& version_;
  const Vigil& vigil_;
  Deadline deadline_;
  TcpAcceptor acceptor_;
  std::vector<Member> members_;  // [num_ranks]; entry 0 is unused
  /// Ranks of the group that have received the error. The process at fault does not count: it may have the number of a
  /// rank that has not connected yet.
  std::set<std::size_t> told_;
  std::size_t largest_group_;      // largest num_ranks of any process that has the secret
  std::vector<Channel> rejected_;  // disagree with the group, claim a rank that is taken, or connected after the error
  Status error_;
};

Admission::Admission(const TcpBootstrapOptions& options, UniqueFd listener, const std::string& version,
                     const Vigil& vigil)
    : options_(options),
      version_(version),
      vigil_(vigil),
      deadline_(Deadline::after(options.timeout_ns)),
      acceptor_({.listener = std::move(listener),
                 .secret = options.secret,
                 .num_ranks = options.num_ranks,
                 // Silent connections must be closed before the group's own deadline.
                 .handshake_ns = std::min(kHandshakeNs, options.timeout_ns / 2)}),
      members_(static_cast<std::size_t>(options.num_ranks)),
      largest_group_(members_.size()) {}

std::vector<bool> Admission::arrived() const {
  std::vector<bool> arrived(num_ranks(), true);
  for (std::size_t rank = 1; rank < num_ranks(); ++rank) arrived[rank] = members_[rank].channel.has_value();
  return arrived;
}

Status Admission::missing() const {
  const Status status = missing_ranks("create_tcp_bootstrap", arrived(), options_.timeout_ns);
  if (acceptor_.num_wrong_proofs() == 0) return status;
  return Status(status.code(),
                fmt::format("{}. {} connections used another secret: give every rank the same secret, unless "
                            "they are of another job",
                            status.message(), acceptor_.num_wrong_proofs()),
                status.peer());
}

Status Admission::wait_for_all() {
  for (;;) {
    const std::vector<bool> here = arrived();
    if (std::find(here.begin(), here.end(), false) == here.end()) return {};
    if (deadline_.expired()) return missing();
    if (Status status = poll_once(); !status.ok()) return status;
  }
}

Status Admission::poll_once() {
  std::vector<pollfd> entries;
  acceptor_.add_poll_entries(&entries);
  const std::size_t num_acceptor_entries = entries.size();
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 1; rank < num_ranks(); ++rank) {
    if (!members_[rank].channel) continue;
    entries.push_back({members_[rank].channel->fd(), members_[rank].channel->poll_events(), 0});
    ranks.push_back(rank);
  }
  if (Status status = wait_until_ready(entries, acceptor_.next_deadline(deadline_), vigil_); !status.ok()) {
    return status;
  }
  // Members first: when a rank reconnects, its old connection must be gone before the new one is admitted.
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (entries[num_acceptor_entries + i].revents == 0) continue;
    if (Status status = read_from(ranks[i]); !status.ok()) return status;
  }
  std::vector<AuthenticatedPeer> peers;
  Status first_error = acceptor_.serve(std::span(entries).first(num_acceptor_entries), &peers);
  for (AuthenticatedPeer& peer : peers) {
    Status status = admit(std::move(peer));
    if (first_error.ok()) first_error = status;
  }
  return first_error;
}

Status Admission::read_from(std::size_t rank) {
  std::optional<Channel>& channel = members_[rank].channel;
  // A rank that dies before the group is complete may be restarted, so its number becomes free.
  if (!channel->flush()) {
    channel.reset();
    return {};
  }
  Frame frame;
  switch (channel->receive(&frame)) {
    case ReceiveOutcome::kWouldBlock:
      return {};
    case ReceiveOutcome::kClosed:
    case ReceiveOutcome::kBroken:
      channel.reset();
      return {};
    case ReceiveOutcome::kFrame:
      break;
  }
  if (frame.type == FrameType::kGiveUp) return missing();
  return Status(ErrorCode::kTransport,
                fmt::format("create_tcp_bootstrap: rank {} sent an unexpected frame of type {} before the group was "
                            "complete",
                            rank, static_cast<int>(frame.type)),
                static_cast<int>(rank));
}

Status Admission::find_disagreement(const AuthenticatedPeer& peer) const {
  const Hello& hello = peer.hello;
  const int rank = static_cast<int>(hello.rank);
  if (hello.version != version_) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: ranks 0 and {} run different versions of the library: rank 0 has "
                              "{}, rank {} has {}; install the same version on both",
                              hello.rank, version_, hello.rank, hello.version),
                  rank);
  }
  if (hello.num_ranks != num_ranks()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: ranks 0 and {} disagree on num_ranks: rank 0 has {}, rank {} has "
                              "{}; start all ranks with the same number",
                              hello.rank, num_ranks(), hello.rank, hello.num_ranks),
                  rank);
  }
  if (hello.rank == 0 || hello.rank >= num_ranks()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: {} connected as rank {}, expected 1 to {}; give each process its "
                              "own rank",
                              peer.address, hello.rank, num_ranks() - 1),
                  rank);
  }
  const Member& member = members_[hello.rank];
  if (member.channel && member.instance != hello.instance) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: two processes claim to be rank {}: {} and {}; give each process "
                              "its own rank",
                              hello.rank, member.address, peer.address),
                  rank);
  }
  return {};
}

Status Admission::admit(AuthenticatedPeer peer) {
  largest_group_ = std::max<std::size_t>(largest_group_, peer.hello.num_ranks);
  Status disagreement = find_disagreement(peer);
  if (!disagreement.ok() || !error_.ok()) {
    if (disagreement.ok()) told_.insert(peer.hello.rank);
    rejected_.push_back(std::move(peer.channel));
    return disagreement;
  }
  if (Status status = peer.channel.queue(FrameType::kWelcome, {}); !status.ok()) return status;
  if (!peer.channel.flush()) return {};
  Member& member = members_[peer.hello.rank];
  member.channel.emplace(std::move(peer.channel));
  member.instance = peer.hello.instance;
  member.address = std::move(peer.address);
  return {};
}

Status Admission::start_all() {
  for (std::size_t rank = 1; rank < num_ranks(); ++rank) {
    Channel& channel = *members_[rank].channel;
    if (Status status = channel.queue(FrameType::kStart, {}); !status.ok()) return status;
    // The connection has carried less than a hundred bytes, so these fit. The first all-gather detects and names a rank
    // that is gone.
    (void)channel.flush();
  }
  return {};
}

std::vector<Channel> Admission::take_channels() {
  std::vector<Channel> channels;
  for (std::size_t rank = 1; rank < num_ranks(); ++rank) channels.push_back(std::move(*members_[rank].channel));
  return channels;
}

Status Admission::reject_all(const Status& error) {
  error_ = clip_text(error);
  // No wait after a timeout: the missing ranks have had their time. Nor with a vigil, since all ranks then keep one.
  const bool wait_for_latecomers = error_.code() != ErrorCode::kTimeout && !vigil_;
  const Deadline members_deadline = Deadline::after(grace_ns(options_.timeout_ns));
  const Deadline latecomers_deadline = Deadline::after(std::min(kMaxLatecomerNs, options_.timeout_ns / 2));

  const auto send_to_rejected = [this](Deadline deadline) {
    std::vector<Channel*> channels;
    for (Channel& channel : rejected_) channels.push_back(&channel);
    send_failure(channels, std::vector<bool>(channels.size(), true), error_, deadline);
    rejected_.clear();
  };
  for (std::size_t rank = 1; rank < num_ranks(); ++rank) {
    std::optional<Channel>& channel = members_[rank].channel;
    if (!channel) continue;
    if (static_cast<int>(rank) != error_.peer()) told_.insert(rank);
    rejected_.push_back(std::move(*channel));
    channel.reset();
  }
  send_to_rejected(members_deadline);

  while (wait_for_latecomers && told_.size() + 1 < largest_group_ && !latecomers_deadline.expired()) {
    std::vector<pollfd> entries;
    acceptor_.add_poll_entries(&entries);
    std::vector<AuthenticatedPeer> peers;
    if (!wait_until_ready(entries, acceptor_.next_deadline(latecomers_deadline)).ok()) break;
    // Its errors do not end the wait: descriptors become free as connections end.
    (void)acceptor_.serve(entries, &peers);
    for (AuthenticatedPeer& peer : peers) (void)admit(std::move(peer));
    send_to_rejected(latecomers_deadline);
  }
  return error_;
}

}  // namespace

Result<std::vector<Channel>> admit_ranks(const TcpBootstrapOptions& options, UniqueFd listener,
                                         const std::string& version, const Vigil& vigil) {
  Admission admission(options, std::move(listener), version, vigil);
  Status status = admission.wait_for_all();
  if (status.ok()) status = admission.start_all();
  if (!status.ok()) return admission.reject_all(status);
  return admission.take_channels();
}

}  // namespace ferry::bootstrap
