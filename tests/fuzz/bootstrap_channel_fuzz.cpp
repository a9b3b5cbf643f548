/// Receiver of frames over a socket. The input is a script: frames from a sender that knows the key, honest or not, and
/// their modifications on the way. The target computes by itself which frames must arrive and when.

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "bootstrap/channel.hpp"
#include "bootstrap/handshake.hpp"
#include "fuzz_target.hpp"
#include "input_reader.hpp"

namespace ferry::test {
namespace {

using namespace bootstrap;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kMaxEvents = 16;
// A frame may be longer than one read of the receiver, and a script has up to two such frames; more would only be slow.
constexpr std::size_t kMaxLongPayloadBytes = 80'000;
constexpr std::size_t kEnoughBytes = 100'000;
constexpr std::size_t kMaxChunks = 32;

// The receiver's buffer may hold at most twice the bytes that have arrived plus one read (64 KiB), for any length that
// a header announces.
constexpr std::size_t kReadBytes = std::size_t{64} << 10;
std::size_t allowed_bytes(std::size_t num_arrived) { return 2 * (num_arrived + kReadBytes); }

/// Derives keys from the input. With constant keys the fuzzer would learn digests by watching their comparison, and
/// could forge frames without the key.
ChannelKeys keys_of_sender(std::span<const std::byte> input) {
  return {.send = hmac_sha256({}, input).value(), .receive = {}};
}

std::pair<UniqueFd, UniqueFd> connected_pair() {
  int ends[2] = {-1, -1};
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "socketpair works");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

void append(Bytes* bytes, std::span<const std::byte> more) { bytes->insert(bytes->end(), more.begin(), more.end()); }

/// Returns a frame in the format of frame.hpp, with any header.
Bytes signed_frame(const HeaderBytes& header, std::span<const std::byte> payload, std::uint64_t number,
                   const Digest& key) {
  Bytes bytes(header.begin(), header.end());
  append(&bytes, payload);
  Bytes covered = bytes;
  covered.resize(bytes.size() + sizeof number);
  store_little_endian(covered.data() + bytes.size(), number);
  append(&bytes, hmac_sha256(key, covered).value());
  return bytes;
}

/// Frames that were sent, and the bytes that arrive.
struct Script {
  std::vector<Frame> frames;
  std::vector<std::size_t> ends;  ///< end of each frame in `honest`
  Bytes honest;
  Bytes wire;

  std::size_t num_frames_in(std::size_t num_bytes) const {
    return static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), num_bytes) - ends.begin());
  }
  /// Number of frames at the start that arrive unmodified.
  std::size_t num_unmodified() const {
    std::size_t start = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const std::size_t num_bytes = ends[i] - start;
      if (ends[i] > wire.size() || std::memcmp(honest.data() + start, wire.data() + start, num_bytes) != 0) return i;
      start = ends[i];
    }
    return ends.size();
  }
};

class ScriptReader {
 public:
  ScriptReader(InputReader* reader, const ChannelKeys& keys)
      : reader_(reader), key_(keys.send), sender_(make_sender(keys)) {}

  Script read() {
    for (std::size_t i = 0; i < kMaxEvents && !reader_->empty() && num_script_bytes() < kEnoughBytes; ++i) add_event();
    for (const Bytes& piece : pieces_) append(&script_.wire, piece);
    change_wire();
    return std::move(script_);
  }

 private:
  enum class Event { kFrame, kLongFrame, kForgedHeader, kRepeat, kRandomBytes, kDrop, kSwap, kNumEvents };

  std::size_t num_script_bytes() const {
    std::size_t num_bytes = 0;
    for (const Bytes& piece : pieces_) num_bytes += piece.size();
    return num_bytes;
  }

  Channel make_sender(const ChannelKeys& keys) {
    auto [near, far] = connected_pair();
    outlet_ = std::move(far);
    return Channel(std::move(near), keys);
  }

  void add_event() {
    constexpr auto kNumEvents = static_cast<std::uint8_t>(Event::kNumEvents);
    switch (static_cast<Event>(reader_->take<std::uint8_t>() % kNumEvents)) {
      case Event::kFrame: {
        const auto type = static_cast<FrameType>(reader_->take<std::uint8_t>());
        send(type, reader_->take_at_most(reader_->take<std::uint8_t>()));
        break;
      }
      case Event::kLongFrame: {
        const std::size_t num_bytes = std::size_t{2} * reader_->take<std::uint16_t>() % kMaxLongPayloadBytes;
        send(FrameType::kMessage, Bytes(num_bytes, static_cast<std::byte>(reader_->take<std::uint8_t>())));
        break;
      }
      case Event::kForgedHeader: {
        const HeaderBytes header = reader_->take_array<kHeaderBytes>();
        const std::span<const std::byte> payload = reader_->take_at_most(reader_->take<std::uint8_t>());
        forge(header, payload);
        break;
      }
      case Event::kRepeat:
        if (!pieces_.empty()) pieces_.push_back(Bytes(pieces_[reader_->take<std::uint8_t>() % pieces_.size()]));
        break;
      case Event::kRandomBytes: {
        const std::span<const std::byte> bytes = reader_->take_at_most(reader_->take<std::uint8_t>());
        pieces_.emplace_back(bytes.begin(), bytes.end());
        break;
      }
      case Event::kDrop:
        if (!pieces_.empty()) pieces_.pop_back();
        break;
      case Event::kSwap:
        if (pieces_.size() > 1) std::swap(pieces_.back(), pieces_[pieces_.size() - 2]);
        break;
      case Event::kNumEvents:
        break;
    }
  }

  /// Sends a frame through a channel, as ranks do.
  void send(FrameType type, std::span<const std::byte> payload) {
    const HeaderBytes header = encode_header({type, static_cast<std::uint32_t>(payload.size())});
    Bytes bytes = sent_by_channel(type, payload);
    require(same_bytes(bytes, signed_frame(header, payload, num_sent_, key_)),
            "a channel sends frames in the format of frame.hpp");
    note_sent(header, payload, std::move(bytes));
  }

  /// Adds a frame with any header from a sender that has the key. It uses up a frame number like an honest one.
  void forge(const HeaderBytes& header, std::span<const std::byte> payload) {
    (void)sent_by_channel(FrameType::kStart, {});
    note_sent(header, payload, signed_frame(header, payload, num_sent_, key_));
  }

  /// Notes a frame that was sent. From the first invalid frame on, no frame may arrive.
  void note_sent(const HeaderBytes& header, std::span<const std::byte> payload, Bytes bytes) {
    ++num_sent_;
    const Result<FrameHeader> parsed = parse_header(header);
    all_valid_ = all_valid_ && parsed.ok() && parsed->payload_bytes == payload.size();
    if (all_valid_) {
      append(&script_.honest, bytes);
      script_.frames.push_back({parsed->type, Bytes(payload.begin(), payload.end())});
      script_.ends.push_back(script_.honest.size());
    }
    pieces_.push_back(std::move(bytes));
  }

  Bytes sent_by_channel(FrameType type, std::span<const std::byte> payload) {
    require(sender_.queue(type, payload).ok(), "a frame can be queued");
    Bytes bytes;
    while (sender_.num_queued_bytes() > 0) {
      require(sender_.flush(), "the other end accepts the bytes");
      for (;;) {
        const std::size_t num_bytes = read_some(outlet_.get(), scratch_).num_bytes;
        if (num_bytes == 0) break;
        append(&bytes, std::span(scratch_).first(num_bytes));
      }
    }
    return bytes;
  }

  void change_wire() {
    Bytes& wire = script_.wire;
    if (wire.empty()) return;
    wire[reader_->take<std::uint16_t>() % wire.size()] ^= static_cast<std::byte>(reader_->take<std::uint8_t>());
    wire.resize(wire.size() - reader_->take<std::uint16_t>() % wire.size());
  }

  InputReader* reader_;
  Digest key_;
  UniqueFd outlet_;
  Channel sender_;
  std::uint64_t num_sent_ = 0;
  bool all_valid_ = true;
  std::array<std::byte, 4096> scratch_;
  std::vector<Bytes> pieces_;
  Script script_;
};

class Receiver {
 public:
  Receiver(const Script& script, const ChannelKeys& keys_of_sender)
      : script_(script), num_unmodified_(script.num_unmodified()), channel_(make_receiver(keys_of_sender)) {}

  void receive_all(std::size_t chunk_bytes) {
    const std::span<const std::byte> wire(script_.wire);
    while (num_arrived_ < wire.size()) {
      const std::span<const std::byte> rest = wire.subspan(num_arrived_);
      const IoOutcome outcome = write_some(inlet_.get(), rest.first(std::min(chunk_bytes, rest.size())));
      require(outcome.kind == IoOutcome::Kind::kMoved, "the receiver empties the socket");
      num_arrived_ += outcome.num_bytes;
      require(channel_.has_input(), "data that has just arrived is reported");
      if (!take_frames()) return;
    }
    inlet_.reset();
    require(receive() == ReceiveOutcome::kClosed, "the end of the stream is detected");
  }

 private:
  Channel make_receiver(const ChannelKeys& keys_of_sender) {
    auto [near, far] = connected_pair();
    inlet_ = std::move(far);
    return Channel(std::move(near), {.send = keys_of_sender.receive, .receive = keys_of_sender.send});
  }

  ReceiveOutcome receive() {
    const AllocationWatch watch;
    const ReceiveOutcome outcome = channel_.receive(&frame_);
    require(watch.largest_bytes() <= allowed_bytes(num_arrived_), "memory grows only as data arrives");
    return outcome;
  }

  /// Position in `wire` at which the next frame begins.
  std::size_t num_consumed() const { return num_taken_ == 0 ? 0 : script_.ends[num_taken_ - 1]; }

  /// Outcome that the receiver must report for the bytes that have arrived.
  ReceiveOutcome expected() const {
    const std::span<const std::byte> waiting = std::span(script_.wire).first(num_arrived_).subspan(num_consumed());
    if (waiting.size() < kHeaderBytes) return ReceiveOutcome::kWouldBlock;
    const Result<FrameHeader> header = parse_header(waiting.first<kHeaderBytes>());
    if (!header.ok()) return ReceiveOutcome::kBroken;
    if (waiting.size() < kHeaderBytes + header->payload_bytes + kDigestBytes) return ReceiveOutcome::kWouldBlock;
    const std::size_t num_correct = std::min(script_.num_frames_in(num_arrived_), num_unmodified_);
    return num_taken_ < num_correct ? ReceiveOutcome::kFrame : ReceiveOutcome::kBroken;
  }

  /// Returns false once the channel is broken or closed.
  bool take_frames() {
    for (;;) {
      const ReceiveOutcome outcome = receive();
      require(outcome == expected(), "an unmodified frame arrives, and a modified one breaks the channel");
      switch (outcome) {
        case ReceiveOutcome::kFrame: {
          const Frame& sent = script_.frames[num_taken_];
          require(frame_.type == sent.type && same_bytes(frame_.payload, sent.payload),
                  "a frame arrives as it was sent");
          ++num_taken_;
          break;
        }
        case ReceiveOutcome::kWouldBlock:
          require(channel_.has_input() == (num_arrived_ > num_consumed()), "part of a frame counts as input");
          return true;
        case ReceiveOutcome::kBroken:
          require_refusal(channel_.error(), ErrorCode::kTransport);
          require(receive() == ReceiveOutcome::kBroken, "a broken channel stays broken");
          return false;
        case ReceiveOutcome::kClosed:
          return false;
      }
    }
  }

  const Script& script_;
  const std::size_t num_unmodified_;
  UniqueFd inlet_;
  Channel channel_;
  Frame frame_;
  std::size_t num_arrived_ = 0;
  std::size_t num_taken_ = 0;
};

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  const std::size_t wanted_chunk_bytes = reader.take<std::uint16_t>();
  const ChannelKeys keys = keys_of_sender(input);
  const Script script = ScriptReader(&reader, keys).read();
  Receiver(script, keys).receive_all(std::max({wanted_chunk_bytes, script.wire.size() / kMaxChunks, std::size_t{1}}));
}

}  // namespace ferry::test
