#ifndef FERRY_BOOTSTRAP_CHANNEL_HPP
#define FERRY_BOOTSTRAP_CHANNEL_HPP

/// Authenticated connection that sends and receives frames without blocking.

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bootstrap/deadline.hpp"
#include "bootstrap/frame.hpp"
#include "bootstrap/socket.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

struct ChannelKeys {
  Digest send{};
  Digest receive{};
};

struct Frame {
  FrameType type = FrameType::kFailure;
  std::vector<std::byte> payload;
};

enum class ReceiveOutcome {
  kFrame,       ///< received a frame with a correct digest
  kWouldBlock,  ///< wait for POLLIN
  kClosed,      ///< the other end closed the connection or died
  kBroken,      ///< the received bytes are no frame of the other end: see `error()`
};

class Channel {
 public:
  Channel(UniqueFd fd, const ChannelKeys& keys) : fd_(std::move(fd)), keys_(keys) {}

  int fd() const { return fd_.get(); }

  /// Append a frame to the send buffer.
  Status queue(FrameType type, std::span<const std::byte> payload);
  std::size_t num_queued_bytes() const { return out_.size() - num_sent_; }
  /// Send as much as the socket accepts now. False once the connection accepts no more data; data that the other end
  /// sent earlier can still be received.
  bool flush();
  /// Shut down sending: the other end receives the data sent so far, then the end of the stream.
  void finish_sending();

  /// Next frame. Call it until kWouldBlock before waiting for POLLIN: the buffer may hold several frames.
  ReceiveOutcome receive(Frame* frame);
  const Status& error() const { return error_; }
  /// True if data has arrived that `receive` has not returned yet.
  bool has_input() const;
  /// Read and discard all received data. False at the end of the stream.
  bool discard_input();

  /// Events to poll for.
  short poll_events() const { return static_cast<short>(POLLIN | (num_queued_bytes() > 0 && can_send_ ? POLLOUT : 0)); }

 private:
  /// Removes one frame from the front of the buffer. kWouldBlock: it is not complete yet.
  ReceiveOutcome take_buffered(Frame* frame);
  ReceiveOutcome broken(Status why);

  UniqueFd fd_;
  ChannelKeys keys_;
  std::uint64_t send_idx_ = 0;
  std::uint64_t receive_idx_ = 0;
  bool can_send_ = true;
  std::vector<std::byte> out_;
  std::size_t num_sent_ = 0;
  std::vector<std::byte> in_;
  std::size_t num_taken_ = 0;
  Status error_;
};

/// Send `error` as a failure frame on all channels and stop sending. Waits, until `deadline` at most, until the other
/// ends of those in `wait_for` have closed: closing this end earlier could reset the connection and lose the frame.
void send_failure(std::span<Channel* const> channels, const std::vector<bool>& wait_for, const Status& error,
                  Deadline deadline);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_CHANNEL_HPP
