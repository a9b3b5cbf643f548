#include "bootstrap/tcp_peer.hpp"

#include <fmt/format.h>

#include "bootstrap/verdict.hpp"

namespace ferry::bootstrap {

Result<std::vector<std::vector<std::byte>>> TcpPeer::all_gather(std::span<const std::byte> mine,
                                                                std::int64_t timeout_ns) {
  if (!failure_.ok()) return failure_;
  ++gather_idx_;
  if (Status bad = check_all_gather_arguments(rank_, mine.size(), timeout_ns); !bad.ok()) {
    // The others would wait for this rank in vain: rank 0 passes the reason on.
    if (channel_->queue(FrameType::kFailure, encode_failure(bad)).ok()) (void)channel_->flush();
    return fail(bad);
  }
  if (Status status = channel_->queue(FrameType::kMessage, mine); !status.ok()) return fail(status);
  std::vector<std::vector<std::byte>> parts;
  if (Status status = exchange(timeout_ns, &parts); !status.ok()) return fail(status);
  return parts;
}

Status TcpPeer::exchange(std::int64_t timeout_ns, std::vector<std::vector<std::byte>>* parts) {
  Deadline deadline = Deadline::after(timeout_ns);
  bool given_up = false;
  for (;;) {
    // Reading comes first: where rank 0 has closed the connection, its reason is still there to be read.
    if (Status status = receive_parts(parts); !status.ok()) return status;
    if (parts->size() == static_cast<std::size_t>(num_ranks_)) return {};
    if (deadline.expired()) {
      if (given_up) {
        return Status(
            ErrorCode::kTimeout,
            fmt::format("all_gather: rank {} has heard nothing from rank 0 within {}; is it stopped, or has it "
                        "not called all_gather?",
                        rank_, format_seconds(timeout_ns)),
            0);
      }
      // Rank 0 knows who is missing; it is asked to say so.
      given_up = true;
      if (Status status = channel_->queue(FrameType::kGiveUp, encode_give_up(gather_idx_)); !status.ok()) return status;
      deadline = deadline.extended_by(grace_ns(timeout_ns));
    }
    // Where nothing can be sent any more, what rank 0 said last is on its way, or the end of the stream.
    (void)channel_->flush();
    pollfd entry{channel_->fd(), channel_->poll_events(), 0};
    if (Status status = wait_until_ready({&entry, 1}, deadline); !status.ok()) return status;
  }
}

Status TcpPeer::receive_parts(std::vector<std::vector<std::byte>>* parts) {
  while (parts->size() < static_cast<std::size_t>(num_ranks_)) {
    Frame frame;
    switch (channel_->receive(&frame)) {
      case ReceiveOutcome::kWouldBlock:
        return {};
      case ReceiveOutcome::kClosed:
        return rank_lost("all_gather", 0);
      case ReceiveOutcome::kBroken:
        return Status(
            channel_->trouble().code(),
            fmt::format("all_gather: the connection to rank 0 carries nonsense: {}", channel_->trouble().message()), 0);
      case ReceiveOutcome::kFrame:
        break;
    }
    if (frame.type == FrameType::kFailure) {
      const Result<Failure> failure = parse_failure(frame.payload);
      return failure.ok() ? failure->to_status() : failure.status();
    }
    if (frame.type != FrameType::kPart) {
      return Status(ErrorCode::kTransport,
                    fmt::format("all_gather: rank 0 sent a frame of type {} out of turn", static_cast<int>(frame.type)),
                    0);
    }
    parts->push_back(std::move(frame.payload));
  }
  return {};
}

Status TcpPeer::fail(Status verdict) {
  failure_ = std::move(verdict);
  channel_.reset();
  return failure_;
}

}  // namespace ferry::bootstrap
