#ifndef FERRY_BOOTSTRAP_CHANNEL_HPP
#define FERRY_BOOTSTRAP_CHANNEL_HPP

/// An authenticated connection: frames in, frames out, never blocking.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bootstrap/auth.hpp"
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
  kFrame,       ///< there is one, and its digest is right
  kWouldBlock,  ///< wait for POLLIN
  kClosed,      ///< the other end is gone, or closed its side
  kBroken,      ///< what came is not a frame of that end: `trouble()` says why
};

class Channel {
 public:
  Channel(UniqueFd fd, const ChannelKeys& keys) : fd_(std::move(fd)), keys_(keys) {}

  int fd() const { return fd_.get(); }

  /// Append a frame to what is to be sent.
  Status queue(FrameType type, std::span<const std::byte> payload);
  std::size_t num_queued_bytes() const { return out_.size() - num_sent_; }
  /// Send what fits now. False when the other end takes nothing any more; what it sent before can still be read.
  bool flush();
  /// No more will be sent: the other end reads what was and then the end of the stream.
  void finish_sending();

  /// The next frame. Must be called until kWouldBlock before waiting for POLLIN: frames may be waiting in the buffer.
  ReceiveOutcome receive(Frame* frame);
  const Status& trouble() const { return trouble_; }
  /// Something has come that `receive` has not handed out yet.
  bool has_input() const;
  /// Read and drop what has come. False at the end of the stream.
  bool discard_input();

  /// What to wait for.
  short poll_events() const { return static_cast<short>(POLLIN | (num_queued_bytes() > 0 && can_send_ ? POLLOUT : 0)); }

 private:
  /// Takes a whole frame from the front of the buffer. kWouldBlock: there is none yet.
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
  Status trouble_;
};

/// Tell every one of `channels` why the group ends. Waits, until `deadline` at most, for those in `listening` to have
/// read it: closing earlier could reset the connection and take the text with it.
void part_with(std::span<Channel* const> channels, const std::vector<bool>& listening, const Status& verdict,
               Deadline deadline);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_CHANNEL_HPP
