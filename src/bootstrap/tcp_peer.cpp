/// Ranks other than 0: the wait for the group, and the gather through rank 0.

#include <fmt/format.h>

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
#include "bootstrap/handshake.hpp"
#include "bootstrap/socket.hpp"
#include "bootstrap/tcp_bootstrap.hpp"
#include "bootstrap/tcp_dial.hpp"

namespace ferry::bootstrap {
namespace {

/// Waits until rank 0 reports that all ranks have arrived.
Status await_start(Channel* channel, const PeerParams& params, Deadline deadline) {
  constexpr std::uint64_t kForming = 0;
  bool given_up = false;
  for (;;) {
    Frame frame;
    switch (channel->receive(&frame)) {
      case ReceiveOutcome::kFrame:
        if (frame.type == FrameType::kStart) return {};
        if (frame.type == FrameType::kFailure) return status_of_failure(frame.payload);
        return Status(
            ErrorCode::kTransport,
            fmt::format(
                "create_tcp_bootstrap: rank 0 sent an unexpected frame of type {} before the group was complete",
                static_cast<int>(frame.type)),
            0);
      case ReceiveOutcome::kClosed:
        return rank_lost("create_tcp_bootstrap", 0);
      case ReceiveOutcome::kBroken:
        return Status(channel->error().code(), std::string(channel->error().message()), 0);
      case ReceiveOutcome::kWouldBlock:
        break;
    }
    if (deadline.expired()) {
      if (given_up) {
        return Status(
            ErrorCode::kTimeout,
            fmt::format("create_tcp_bootstrap: timed out after {} waiting for rank 0, which has accepted rank {}; "
                        "is rank 0 stopped?",
                        format_seconds(params.options.timeout_ns), params.options.rank),
            0);
      }
      // Ask rank 0 to report which ranks are missing.
      given_up = true;
      if (Status status = channel->queue(FrameType::kGiveUp, encode_give_up(kForming)); !status.ok()) return status;
      deadline = deadline.extended_by(grace_ns(params.options.timeout_ns));
    }
    (void)channel->flush();
    pollfd entry{channel->fd(), channel->poll_events(), 0};
    if (Status status = wait_until_ready({&entry, 1}, deadline, params.vigil); !status.ok()) return status;
  }
}

class TcpPeer final : public Bootstrap {
 public:
  TcpPeer(Channel channel, int rank, int num_ranks)
      : local_address_(ends_of(channel.fd()).local), channel_(std::move(channel)), rank_(rank), num_ranks_(num_ranks) {}

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override;
  std::string local_address() const override { return local_address_; }

 private:
  Status exchange(std::int64_t timeout_ns, std::vector<std::vector<std::byte>>* parts);
  Status receive_parts(std::vector<std::vector<std::byte>>* parts);
  Status fail_on_all(const Status& error);
  Status fail(Status error);

  std::string local_address_;
  std::optional<Channel> channel_;  // empty once the group has failed
  int rank_;
  int num_ranks_;
  std::uint64_t gather_idx_ = 0;
  Status error_;
};

Result<std::vector<std::vector<std::byte>>> TcpPeer::all_gather(std::span<const std::byte> mine,
                                                                std::int64_t timeout_ns) try {
  if (!error_.ok()) return error_;
  ++gather_idx_;
  if (Status status = check_all_gather_arguments(rank_, mine.size(), timeout_ns); !status.ok()) {
    return fail_on_all(status);
  }
  if (Status status = channel_->queue(FrameType::kMessage, mine); !status.ok()) return fail_on_all(status);
  std::vector<std::vector<std::byte>> parts;
  if (Status status = exchange(timeout_ns, &parts); !status.ok()) {
    return status.code() == ErrorCode::kSystem && status.peer() < 0 ? fail_on_all(status) : fail(status);
  }
  return parts;
} catch (const std::bad_alloc&) {
  return fail_on_all(out_of_memory("all_gather", rank_));
}

/// Fails with an error of this rank. Rank 0 passes it on to the others, which would otherwise wait for this rank.
Status TcpPeer::fail_on_all(const Status& error) {
  const Status mine = named(error, rank_);
  if (channel_->queue(FrameType::kFailure, encode_failure(mine)).ok()) (void)channel_->flush();
  return fail(mine);
}

Status TcpPeer::exchange(std::int64_t timeout_ns, std::vector<std::vector<std::byte>>* parts) {
  Deadline deadline = Deadline::after(timeout_ns);
  bool given_up = false;
  for (;;) {
    // Read first: if rank 0 has closed the connection, its failure frame can still be received.
    if (Status status = receive_parts(parts); !status.ok()) return status;
    if (parts->size() == static_cast<std::size_t>(num_ranks_)) return {};
    if (deadline.expired()) {
      if (given_up) {
        return Status(
            ErrorCode::kTimeout,
            fmt::format("all_gather: rank {} timed out after {} waiting for rank 0; is rank 0 stopped, or has it not "
                        "called all_gather?",
                        rank_, format_seconds(timeout_ns)),
            0);
      }
      // Ask rank 0 to report which ranks are missing.
      given_up = true;
      if (Status status = channel_->queue(FrameType::kGiveUp, encode_give_up(gather_idx_)); !status.ok()) return status;
      deadline = deadline.extended_by(grace_ns(timeout_ns));
    }
    // If this fails, the failure frame of rank 0 or the end of the stream is about to arrive.
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
        return Status(channel_->error().code(),
                      fmt::format("all_gather: received invalid data from rank 0: {}", channel_->error().message()), 0);
      case ReceiveOutcome::kFrame:
        break;
    }
    if (frame.type == FrameType::kFailure) return status_of_failure(frame.payload);
    if (frame.type != FrameType::kPart) {
      return Status(ErrorCode::kTransport,
                    fmt::format("all_gather: rank 0 sent an unexpected frame of type {}", static_cast<int>(frame.type)),
                    0);
    }
    parts->push_back(std::move(frame.payload));
  }
  return {};
}

Status TcpPeer::fail(Status error) {
  error_ = std::move(error);
  channel_.reset();
  return error_;
}

}  // namespace

Result<std::shared_ptr<Bootstrap>> create_tcp_peer(const TcpBootstrapOptions& options, const std::string& version,
                                                   const Vigil& vigil) {
  const Deadline deadline = Deadline::after(options.timeout_ns);
  PeerParams params{.options = options, .version = version, .instance = {}, .vigil = vigil};
  if (Status status = fill_random(params.instance); !status.ok()) return status;
  Result<Channel> channel = dial_root(params, deadline);
  if (!channel.ok()) return channel.status();
  if (Status status = await_start(&*channel, params, deadline); !status.ok()) return status;
  return std::shared_ptr<Bootstrap>(std::make_shared<TcpPeer>(std::move(*channel), options.rank, options.num_ranks));
}

}  // namespace ferry::bootstrap
