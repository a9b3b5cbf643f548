#include "bootstrap/tcp_root.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "bootstrap/verdict.hpp"

namespace ferry::bootstrap {
namespace {

// Parts are queued a few at a time, so that rank 0 holds each message once and not once per rank.
constexpr std::size_t kQueueAheadBytes = std::size_t{256} << 10;

}  // namespace

TcpRoot::TcpRoot(std::vector<Channel> channels) : num_ranks_(static_cast<int>(channels.size()) + 1) {
  for (Channel& channel : channels) {
    const std::size_t rank = peers_.size() + 1;
    peers_.push_back({.channel = std::move(channel),
                      .rank = rank,
                      .takes_part = false,
                      .given_up = false,
                      .message = {},
                      .num_parts_queued = 0});
  }
}

Result<std::vector<std::vector<std::byte>>> TcpRoot::all_gather(std::span<const std::byte> mine,
                                                                std::int64_t timeout_ns) {
  if (!failure_.ok()) return failure_;
  const Deadline deadline = Deadline::after(timeout_ns);
  ++gather_idx_;
  for (Peer& peer : peers_) {
    peer.takes_part = false;
    peer.given_up = false;
    peer.message.reset();
    peer.num_parts_queued = 0;
  }
  if (Status bad = check_all_gather_arguments(rank(), mine.size(), timeout_ns); !bad.ok()) return fail(bad, timeout_ns);
  if (Status status = collect(deadline, timeout_ns); !status.ok()) return fail(status, timeout_ns);

  std::vector<std::vector<std::byte>> messages;
  messages.reserve(peers_.size() + 1);
  messages.emplace_back(mine.begin(), mine.end());
  for (Peer& peer : peers_) messages.push_back(std::move(*peer.message));
  // Everybody has arrived in time, so ranks that take the result slowly are given a little longer.
  const Deadline delivered_by = deadline.extended_by(grace_ns(timeout_ns));
  if (Status status = distribute(messages, delivered_by, timeout_ns); !status.ok()) return fail(status, timeout_ns);
  return messages;
}

std::vector<bool> TcpRoot::arrived() const {
  std::vector<bool> arrived(peers_.size() + 1, true);
  for (const Peer& peer : peers_) arrived[peer.rank] = peer.message.has_value();
  return arrived;
}

Status TcpRoot::collect(Deadline deadline, std::int64_t timeout_ns) {
  std::vector<pollfd> entries;
  for (const Peer& peer : peers_) {
    // First all of them, ready or not: frames may already wait in a channel's buffer.
    entries.push_back({peer.channel.fd(), peer.channel.poll_events(), POLLIN});
  }
  for (;;) {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (entries[i].revents == 0) continue;
      if (Status status = read_from(&peers_[i]); !status.ok()) return status;
    }
    const std::vector<bool> here = arrived();
    if (std::find(here.begin(), here.end(), false) == here.end()) return {};
    // A rank that began before this one has reached its own deadline: the wait ends for all together.
    const bool given_up = std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.given_up; });
    if (given_up || deadline.expired()) return missing_ranks("all_gather", here, timeout_ns);
    for (std::size_t i = 0; i < peers_.size(); ++i) entries[i].events = peers_[i].channel.poll_events();
    if (Status status = wait_until_ready(entries, deadline); !status.ok()) return status;
  }
}

Status TcpRoot::read_from(Peer* peer) {
  if (!peer->channel.flush()) return rank_lost("all_gather", static_cast<int>(peer->rank));
  for (;;) {
    Frame frame;
    switch (peer->channel.receive(&frame)) {
      case ReceiveOutcome::kWouldBlock:
        return {};
      case ReceiveOutcome::kClosed:
        if (peer->given_up) {
          // It waited its whole deadline before this rank came: not that rank is to blame, this one is.
          return Status(ErrorCode::kTimeout,
                        fmt::format("all_gather: rank 0 came after rank {} had reached its deadline; call in time on "
                                    "every rank, or allow more time",
                                    peer->rank),
                        0);
        }
        return rank_lost("all_gather", static_cast<int>(peer->rank));
      case ReceiveOutcome::kBroken:
        return Status(ErrorCode::kTransport,
                      fmt::format("all_gather: the connection to rank {} carries nonsense: {}", peer->rank,
                                  peer->channel.trouble().message()),
                      static_cast<int>(peer->rank));
      case ReceiveOutcome::kFrame:
        break;
    }
    if (Status status = take(peer, std::move(frame)); !status.ok()) return status;
  }
}

Status TcpRoot::take(Peer* peer, Frame frame) {
  if (frame.type == FrameType::kMessage && !peer->message) {
    peer->takes_part = true;
    peer->message = std::move(frame.payload);
    return {};
  }
  if (frame.type == FrameType::kGiveUp) {
    // One that crossed the result of an earlier all-gather on its way is settled by that result.
    if (parse_give_up(frame.payload) == gather_idx_) peer->given_up = true;
    return {};
  }
  if (frame.type == FrameType::kFailure) {
    const Result<Failure> failure = parse_failure(frame.payload);
    return failure.ok() ? failure->to_status() : failure.status();
  }
  return Status(
      ErrorCode::kTransport,
      fmt::format("all_gather: rank {} sent a frame of type {} out of turn", peer->rank, static_cast<int>(frame.type)),
      static_cast<int>(peer->rank));
}

Status TcpRoot::feed(Peer* peer, const std::vector<std::vector<std::byte>>& messages) {
  for (;;) {
    while (peer->num_parts_queued < messages.size() && peer->channel.num_queued_bytes() < kQueueAheadBytes) {
      if (Status status = peer->channel.queue(FrameType::kPart, messages[peer->num_parts_queued]); !status.ok()) {
        return status;
      }
      ++peer->num_parts_queued;
    }
    if (!peer->channel.flush()) return rank_lost("all_gather", static_cast<int>(peer->rank));
    const bool socket_full = peer->channel.num_queued_bytes() > 0;
    if (socket_full || peer->num_parts_queued == messages.size()) return {};
  }
}

Status TcpRoot::distribute(const std::vector<std::vector<std::byte>>& messages, Deadline deadline,
                           std::int64_t timeout_ns) {
  // All ranks have arrived: one that is lost now must not keep the result from the others.
  Status first_problem;
  std::vector<Peer*> hungry;
  for (Peer& peer : peers_) hungry.push_back(&peer);
  while (!hungry.empty()) {
    std::vector<Peer*> still;
    std::vector<pollfd> entries;
    for (Peer* peer : hungry) {
      if (Status status = feed(peer, messages); !status.ok()) {
        if (first_problem.ok()) first_problem = status;
      } else if (peer->channel.num_queued_bytes() > 0) {
        still.push_back(peer);
        entries.push_back({peer->channel.fd(), POLLOUT, 0});
      }
    }
    hungry = std::move(still);
    if (hungry.empty()) break;
    if (deadline.expired()) {
      if (!first_problem.ok()) return first_problem;
      const std::size_t rank = hungry.front()->rank;
      return Status(ErrorCode::kTimeout,
                    fmt::format("all_gather: rank {} has not taken the result within {}; is it stopped?", rank,
                                format_seconds(timeout_ns)),
                    static_cast<int>(rank));
    }
    if (Status status = wait_until_ready(entries, deadline); !status.ok()) return status;
  }
  return first_problem;
}

Status TcpRoot::fail(const Status& verdict, std::int64_t timeout_ns) {
  failure_ = clip_text(verdict);
  std::vector<Channel*> channels;
  std::vector<bool> listening;
  for (Peer& peer : peers_) {
    channels.push_back(&peer.channel);
    listening.push_back(peer.takes_part || peer.channel.has_input());
  }
  part_with(channels, listening, failure_, Deadline::after(grace_ns(timeout_ns)));
  peers_.clear();
  return failure_;
}

}  // namespace ferry::bootstrap
