#include "bootstrap/channel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "bootstrap/handshake.hpp"

namespace ferry::bootstrap {
namespace {

// Growth of the receive buffer as data arrives, whatever length a header announces.
constexpr std::size_t kReadChunkBytes = std::size_t{64} << 10;

using FrameNumber = std::array<std::byte, sizeof(std::uint64_t)>;
static_assert(sizeof(FrameNumber) <= kDigestBytes, "the number is written where the digest goes");

FrameNumber encode_number(std::uint64_t number) {
  FrameNumber bytes{};
  store_little_endian(bytes.data(), number);
  return bytes;
}

}  // namespace

Status Channel::queue(FrameType type, std::span<const std::byte> payload) {
  if (num_sent_ >= num_queued_bytes()) {
    out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(num_sent_));
    num_sent_ = 0;
  }
  const std::size_t start = out_.size();
  const HeaderBytes header = encode_header({type, static_cast<std::uint32_t>(payload.size())});
  const FrameNumber number = encode_number(send_idx_);
  out_.reserve(start + kHeaderBytes + payload.size() + kDigestBytes);
  out_.insert(out_.end(), header.begin(), header.end());
  out_.insert(out_.end(), payload.begin(), payload.end());
  out_.insert(out_.end(), number.begin(), number.end());
  const Result<Digest> digest = hmac_sha256(keys_.send, std::span(out_).subspan(start));
  out_.resize(out_.size() - number.size());
  if (!digest.ok()) {
    out_.resize(start);
    return digest.status();
  }
  out_.insert(out_.end(), digest->begin(), digest->end());
  ++send_idx_;
  return {};
}

bool Channel::flush() {
  while (can_send_ && num_queued_bytes() > 0) {
    const IoOutcome outcome = write_some(fd(), std::span(out_).subspan(num_sent_));
    if (outcome.kind == IoOutcome::Kind::kWouldBlock) return true;
    if (outcome.kind == IoOutcome::Kind::kMoved) {
      num_sent_ += outcome.num_bytes;
    } else {
      can_send_ = false;
    }
  }
  return can_send_;
}

void Channel::finish_sending() {
  can_send_ = false;
  (void)shutdown(fd(), SHUT_WR);
}

ReceiveOutcome Channel::broken(Status why) {
  error_ = std::move(why);
  return ReceiveOutcome::kBroken;
}

ReceiveOutcome Channel::take_buffered(Frame* frame) {
  const std::span<std::byte> waiting = std::span(in_).subspan(num_taken_);
  if (waiting.size() < kHeaderBytes) return ReceiveOutcome::kWouldBlock;
  const Result<FrameHeader> header = parse_header(waiting.first<kHeaderBytes>());
  if (!header.ok()) return broken(header.status());
  const std::size_t covered_bytes = kHeaderBytes + header->payload_bytes;
  if (waiting.size() < covered_bytes + kDigestBytes) return ReceiveOutcome::kWouldBlock;

  Digest received{};
  std::copy_n(waiting.begin() + static_cast<std::ptrdiff_t>(covered_bytes), kDigestBytes, received.begin());
  const FrameNumber number = encode_number(receive_idx_);
  std::copy(number.begin(), number.end(), waiting.begin() + static_cast<std::ptrdiff_t>(covered_bytes));
  const Result<Digest> expected = hmac_sha256(keys_.receive, waiting.first(covered_bytes + number.size()));
  if (!expected.ok()) return broken(expected.status());
  if (!equal_in_constant_time(*expected, received)) {
    return broken(Status(ErrorCode::kTransport, fmt::format("bootstrap: frame {} has a wrong digest: it was modified "
                                                            "on the way, or the sender has another secret",
                                                            receive_idx_)));
  }
  ++receive_idx_;
  frame->type = header->type;
  const std::span<const std::byte> payload = waiting.subspan(kHeaderBytes, header->payload_bytes);
  frame->payload.assign(payload.begin(), payload.end());
  num_taken_ += covered_bytes + kDigestBytes;
  return ReceiveOutcome::kFrame;
}

ReceiveOutcome Channel::receive(Frame* frame) {
  for (;;) {
    if (const ReceiveOutcome outcome = take_buffered(frame); outcome != ReceiveOutcome::kWouldBlock) return outcome;
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(num_taken_));
    num_taken_ = 0;
    const std::size_t have = in_.size();
    in_.resize(have + kReadChunkBytes);
    const IoOutcome outcome = read_some(fd(), std::span(in_).subspan(have));
    in_.resize(have + outcome.num_bytes);
    switch (outcome.kind) {
      case IoOutcome::Kind::kMoved:
        break;
      case IoOutcome::Kind::kWouldBlock:
        return ReceiveOutcome::kWouldBlock;
      case IoOutcome::Kind::kClosed:
      case IoOutcome::Kind::kFailed:
        return ReceiveOutcome::kClosed;
    }
  }
}

bool Channel::has_input() const {
  std::byte peeked{};
  return in_.size() > num_taken_ || recv(fd(), &peeked, sizeof peeked, MSG_PEEK | MSG_DONTWAIT) > 0;
}

bool Channel::discard_input() {
  std::array<std::byte, kReadChunkBytes> scratch;
  for (;;) {
    const IoOutcome outcome = read_some(fd(), scratch);
    if (outcome.kind == IoOutcome::Kind::kWouldBlock) return true;
    if (outcome.kind != IoOutcome::Kind::kMoved) return false;
  }
}

void send_failure(std::span<Channel* const> channels, const std::vector<bool>& wait_for, const Status& error,
                  Deadline deadline) {
  const std::vector<std::byte> failure = encode_failure(error);
  struct Open {
    Channel* channel;
    bool all_sent;
  };
  std::vector<Open> open;
  for (std::size_t i = 0; i < channels.size(); ++i) {
    Channel* channel = channels[i];
    if (!channel->queue(FrameType::kFailure, failure).ok() || !channel->flush()) continue;
    const bool all_sent = channel->num_queued_bytes() == 0;
    if (all_sent) channel->finish_sending();
    if (wait_for[i]) open.push_back({channel, all_sent});
  }
  while (!open.empty() && !deadline.expired()) {
    std::vector<pollfd> entries;
    for (const Open& one : open) entries.push_back({one.channel->fd(), one.channel->poll_events(), 0});
    if (!wait_until_ready(entries, deadline).ok()) return;
    std::vector<Open> still_open;
    for (Open& one : open) {
      if (!one.all_sent && !one.channel->flush()) continue;
      if (!one.all_sent && one.channel->num_queued_bytes() == 0) {
        one.channel->finish_sending();
        one.all_sent = true;
      }
      if (one.channel->discard_input()) still_open.push_back(one);
    }
    open = std::move(still_open);
  }
}

}  // namespace ferry::bootstrap
