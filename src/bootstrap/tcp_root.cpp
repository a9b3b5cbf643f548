/// Rank 0: gathers the messages of all ranks and sends all of them to every rank.

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/channel.hpp"
#include "bootstrap/errors.hpp"
#include "bootstrap/ports.hpp"
#include "bootstrap/socket.hpp"
#include "bootstrap/tcp_admission.hpp"
#include "bootstrap/tcp_bootstrap.hpp"

namespace ferry::bootstrap {
namespace {

// Limit of queued bytes per rank, so that rank 0 holds each message once and not once per rank.
constexpr std::size_t kQueueAheadBytes = std::size_t{256} << 10;

class TcpRoot final : public Bootstrap {
 public:
  /// `channels[i]` is connected to rank i + 1.
  explicit TcpRoot(std::vector<Channel> channels);

  int rank() const override { return 0; }
  int num_ranks() const override { return num_ranks_; }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override;
  std::string local_address() const override { return local_address_; }

 private:
  struct Peer {
    Channel channel;
    int rank = 0;
    bool takes_part = false;  // has sent its message of this all-gather
    bool given_up = false;    // its deadline has passed
    std::optional<std::vector<std::byte>> message;
    std::size_t num_parts_queued = 0;
  };

  Status collect(Deadline deadline, std::int64_t timeout_ns);
  Status read_from(Peer* peer);
  Status handle(Peer* peer, Frame frame);
  std::vector<bool> arrived() const;
  Status distribute(const std::vector<std::vector<std::byte>>& messages, Deadline deadline, std::int64_t timeout_ns);
  Status send_parts(Peer* peer, const std::vector<std::vector<std::byte>>& messages);
  /// Makes `error` the result of this and every later call, on all ranks.
  Status fail(const Status& error, std::int64_t timeout_ns);

  int num_ranks_;
  std::string local_address_;
  std::vector<Peer> peers_;  // empty once the group has failed
  std::uint64_t gather_idx_ = 0;
  Status error_;
};

/// Address at which a rank on another host connected; if there is none, at which any rank did.
std::string address_for_others(const std::vector<Channel>& channels) {
  std::string address;
  for (const Channel& channel : channels) {
    const ConnectionEnds ends = ends_of(channel.fd());
    if (!ends.is_loopback && ends.local != ends.remote) return ends.local;
    if (!ends.is_loopback || address.empty()) address = ends.local;
  }
  return address;
}

TcpRoot::TcpRoot(std::vector<Channel> channels)
    : num_ranks_(static_cast<int>(channels.size()) + 1), local_address_(address_for_others(channels)) {
  for (Channel& channel : channels) {
    const int rank = static_cast<int>(peers_.size()) + 1;
    peers_.push_back({.channel = std::move(channel),
                      .rank = rank,
                      .takes_part = false,
                      .given_up = false,
                      .message = {},
                      .num_parts_queued = 0});
  }
}

Result<std::vector<std::vector<std::byte>>> TcpRoot::all_gather(std::span<const std::byte> mine,
                                                                std::int64_t timeout_ns) try {
  if (!error_.ok()) return error_;
  const Deadline deadline = Deadline::after(timeout_ns);
  ++gather_idx_;
  for (Peer& peer : peers_) {
    peer.takes_part = false;
    peer.given_up = false;
    peer.message.reset();
    peer.num_parts_queued = 0;
  }
  if (Status status = check_all_gather_arguments(rank(), mine.size(), timeout_ns); !status.ok()) {
    return fail(status, timeout_ns);
  }
  if (Status status = collect(deadline, timeout_ns); !status.ok()) return fail(status, timeout_ns);

  std::vector<std::vector<std::byte>> messages;
  messages.reserve(peers_.size() + 1);
  messages.emplace_back(mine.begin(), mine.end());
  for (Peer& peer : peers_) messages.push_back(std::move(*peer.message));
  // All ranks have arrived in time, so ranks that receive the result slowly get a little longer.
  const Deadline send_deadline = deadline.extended_by(grace_ns(timeout_ns));
  if (Status status = distribute(messages, send_deadline, timeout_ns); !status.ok()) return fail(status, timeout_ns);
  return messages;
} catch (const std::bad_alloc&) {
  return fail(out_of_memory("all_gather", rank()), timeout_ns);
}

std::vector<bool> TcpRoot::arrived() const {
  std::vector<bool> arrived(peers_.size() + 1, true);
  for (const Peer& peer : peers_) arrived[static_cast<std::size_t>(peer.rank)] = peer.message.has_value();
  return arrived;
}

Status TcpRoot::collect(Deadline deadline, std::int64_t timeout_ns) {
  std::vector<pollfd> entries;
  for (const Peer& peer : peers_) {
    // The first round reads all channels, ready or not: their buffers may already hold frames.
    entries.push_back({peer.channel.fd(), peer.channel.poll_events(), POLLIN});
  }
  for (;;) {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (entries[i].revents == 0) continue;
      if (Status status = read_from(&peers_[i]); !status.ok()) return status;
    }
    const std::vector<bool> here = arrived();
    if (std::find(here.begin(), here.end(), false) == here.end()) return {};
    // The deadline of a rank that started earlier has passed: the wait ends for all ranks together.
    const bool given_up = std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.given_up; });
    if (given_up || deadline.expired()) return missing_ranks("all_gather", here, timeout_ns);
    for (std::size_t i = 0; i < peers_.size(); ++i) entries[i].events = peers_[i].channel.poll_events();
    if (Status status = wait_until_ready(entries, deadline); !status.ok()) return status;
  }
}

Status TcpRoot::read_from(Peer* peer) {
  if (!peer->channel.flush()) return rank_lost("all_gather", peer->rank);
  for (;;) {
    Frame frame;
    switch (peer->channel.receive(&frame)) {
      case ReceiveOutcome::kWouldBlock:
        return {};
      case ReceiveOutcome::kClosed:
        if (peer->given_up) {
          // The peer waited until its deadline before this rank made the call, so this rank is at fault.
          return Status(
              ErrorCode::kTimeout,
              fmt::format("all_gather: rank 0 made the call after rank {} had timed out; call in time on every "
                          "rank, or increase the timeout",
                          peer->rank),
              0);
        }
        return rank_lost("all_gather", peer->rank);
      case ReceiveOutcome::kBroken:
        return Status(ErrorCode::kTransport,
                      fmt::format("all_gather: received invalid data from rank {}: {}", peer->rank,
                                  peer->channel.error().message()),
                      peer->rank);
      case ReceiveOutcome::kFrame:
        break;
    }
    if (Status status = handle(peer, std::move(frame)); !status.ok()) return status;
  }
}

Status TcpRoot::handle(Peer* peer, Frame frame) {
  if (frame.type == FrameType::kMessage && !peer->message) {
    peer->takes_part = true;
    peer->message = std::move(frame.payload);
    return {};
  }
  if (frame.type == FrameType::kGiveUp) {
    // A give-up of an earlier all-gather is ignored: its sender had not yet received that result.
    if (parse_give_up(frame.payload) == gather_idx_) peer->given_up = true;
    return {};
  }
  if (frame.type == FrameType::kFailure) return status_of_failure(frame.payload);
  return Status(
      ErrorCode::kTransport,
      fmt::format("all_gather: rank {} sent an unexpected frame of type {}", peer->rank, static_cast<int>(frame.type)),
      peer->rank);
}

Status TcpRoot::send_parts(Peer* peer, const std::vector<std::vector<std::byte>>& messages) {
  for (;;) {
    while (peer->num_parts_queued < messages.size() && peer->channel.num_queued_bytes() < kQueueAheadBytes) {
      if (Status status = peer->channel.queue(FrameType::kPart, messages[peer->num_parts_queued]); !status.ok()) {
        return status;
      }
      ++peer->num_parts_queued;
    }
    if (!peer->channel.flush()) return rank_lost("all_gather", peer->rank);
    const bool socket_full = peer->channel.num_queued_bytes() > 0;
    if (socket_full || peer->num_parts_queued == messages.size()) return {};
  }
}

Status TcpRoot::distribute(const std::vector<std::vector<std::byte>>& messages, Deadline deadline,
                           std::int64_t timeout_ns) {
  // All ranks have arrived: if one is lost now, the others still receive the result.
  Status first_error;
  std::vector<Peer*> waiting;
  for (Peer& peer : peers_) waiting.push_back(&peer);
  while (!waiting.empty()) {
    std::vector<Peer*> still_waiting;
    std::vector<pollfd> entries;
    for (Peer* peer : waiting) {
      if (Status status = send_parts(peer, messages); !status.ok()) {
        if (first_error.ok()) first_error = status;
      } else if (peer->channel.num_queued_bytes() > 0) {
        still_waiting.push_back(peer);
        entries.push_back({peer->channel.fd(), POLLOUT, 0});
      }
    }
    waiting = std::move(still_waiting);
    if (waiting.empty()) break;
    if (deadline.expired()) {
      if (!first_error.ok()) return first_error;
      const int rank = waiting.front()->rank;
      return Status(
          ErrorCode::kTimeout,
          fmt::format("all_gather: timed out after {} sending the result to rank {}; is that process stopped?",
                      format_seconds(timeout_ns), rank),
          rank);
    }
    if (Status status = wait_until_ready(entries, deadline); !status.ok()) return status;
  }
  return first_error;
}

Status TcpRoot::fail(const Status& error, std::int64_t timeout_ns) {
  error_ = clip_text(error.code() == ErrorCode::kSystem ? named(error, rank()) : error);
  std::vector<Channel*> channels;
  std::vector<bool> wait_for;
  for (Peer& peer : peers_) {
    channels.push_back(&peer.channel);
    wait_for.push_back(peer.takes_part || peer.channel.has_input());
  }
  send_failure(channels, wait_for, error_, Deadline::after(grace_ns(timeout_ns)));
  peers_.clear();
  return error_;
}

}  // namespace

Result<std::shared_ptr<Bootstrap>> create_tcp_root(const TcpBootstrapOptions& options, UniqueFd listener,
                                                   const std::string& version, const Vigil& vigil) {
  if (listener.valid()) {
    if (Status status = adopt_listener(listener.get()); !status.ok()) return status;
  } else {
    Result<UniqueFd> own = listen_on(options.host, ports_of(options));
    if (!own.ok()) return own.status();
    listener = std::move(*own);
  }
  Result<std::vector<Channel>> channels = admit_ranks(options, std::move(listener), version, vigil);
  if (!channels.ok()) return channels.status();
  return std::shared_ptr<Bootstrap>(std::make_shared<TcpRoot>(std::move(*channels)));
}

}  // namespace ferry::bootstrap
