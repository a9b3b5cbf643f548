#ifndef FERRY_BOOTSTRAP_FRAME_HPP
#define FERRY_BOOTSTRAP_FRAME_HPP

/// Wire format of the TCP bootstrap: frames, their encoders and their parsers. The parsers accept any bytes and
/// allocate nothing until a length has been checked.
///
/// A frame is a header of 12 bytes, then a payload, then, on an authenticated connection, a digest of 32 bytes.
/// Integers are little-endian.
///
///   header     magic "FRY1" (4), type (u16), zero (u16), payload length (u32)
///   digest     HMAC-SHA-256 with the session key of the direction over header, payload and frame number (u64). The
///              number counts the frames of that direction from 0 and is not sent, so a frame that is replayed,
///              dropped, reordered or reflected does not verify.
///
/// | frame     | from | payload                                                                     | digest |
/// |-----------|------|-----------------------------------------------------------------------------|--------|
/// | challenge | root | root's nonce (32)                                                           | no     |
/// | hello     | peer | peer's nonce (32), instance (16), rank (u32), num_ranks (u32), version (32), proof (32) | no |
/// | welcome   | root | none; its digest proves that the root knows the secret                      | yes    |
/// | start     | root | none; all ranks have arrived                                                | yes    |
/// | message   | peer | the rank's contribution to an all-gather                                    | yes    |
/// | part      | root | one rank's contribution; num_ranks of them in rank order are the result     | yes    |
/// | failure   | both | error code (i32), rank at fault (i32), text; the last frame of its sender   | yes    |
/// | give_up   | peer | number of the all-gather (u64, 0 = forming the group) whose deadline passed | yes    |
///
/// The layout of challenge, hello, welcome and failure must never change: two versions of the library need it to report
/// to each other that they differ.

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

inline constexpr std::size_t kDigestBytes = 32;  ///< SHA-256
inline constexpr std::size_t kNonceBytes = 32;   ///< as many bits as the digest, so that neither is the weaker part

using Digest = std::array<std::byte, kDigestBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

enum class FrameType : std::uint16_t {
  kChallenge = 1,
  kHello = 2,
  kWelcome = 3,
  kStart = 4,
  kMessage = 5,
  kPart = 6,
  kFailure = 7,
  kGiveUp = 8,
};

inline constexpr std::size_t kHeaderBytes = 12;
inline constexpr std::size_t kInstanceBytes = 16;
inline constexpr std::size_t kVersionBytes = 32;  ///< zero-padded MAJOR.MINOR.PATCH-suffix
inline constexpr std::size_t kHelloUnprovenBytes =
    kNonceBytes + kInstanceBytes + sizeof(std::uint32_t) + sizeof(std::uint32_t) + kVersionBytes;
inline constexpr std::size_t kHelloBytes = kHelloUnprovenBytes + kDigestBytes;
inline constexpr std::size_t kFailureFixedBytes = sizeof(std::uint32_t) + sizeof(std::uint32_t);
/// Enough for the longest error, which names two addresses and two versions. Longer text is cut, the same on all ranks.
inline constexpr std::size_t kMaxFailureTextBytes = 1024;
inline constexpr std::size_t kGiveUpBytes = sizeof(std::uint64_t);

inline constexpr std::size_t kChallengeFrameBytes = kHeaderBytes + kNonceBytes;
inline constexpr std::size_t kHelloFrameBytes = kHeaderBytes + kHelloBytes;
static_assert(kHelloBytes == 120, "two versions must be able to read each other's hello");
static_assert(kMaxBootstrapMessageBytes <= UINT32_MAX, "a header's length field has 32 bits");

using HeaderBytes = std::array<std::byte, kHeaderBytes>;
/// Random, one per process: distinguishes a rank that reconnects from a second process that claims the same rank.
using Instance = std::array<std::byte, kInstanceBytes>;

struct FrameHeader {
  FrameType type = FrameType::kChallenge;
  std::uint32_t payload_bytes = 0;
};

HeaderBytes encode_header(const FrameHeader& header);

/// @errors kTransport: wrong magic, unknown type, or a length that is invalid for the type
Result<FrameHeader> parse_header(std::span<const std::byte, kHeaderBytes> bytes);

/// Introduction of a peer.
struct Hello {
  Nonce nonce{};
  Instance instance{};
  std::uint32_t rank = 0;
  std::uint32_t num_ranks = 0;
  std::string version;
  Digest proof{};
};

/// Payload without the proof, which is also the text that the proof covers.
std::array<std::byte, kHelloUnprovenBytes> encode_hello_unproven(const Hello& hello);

/// @errors kTransport: not kHelloBytes long, or a version that is empty or not printable
Result<Hello> parse_hello(std::span<const std::byte> payload);

/// Content of a failure frame: a Status whose text is cut to kMaxFailureTextBytes.
struct Failure {
  ErrorCode code = ErrorCode::kInternal;
  int peer = -1;
  std::string text;

  Status to_status() const { return Status(code, text, peer); }
};

/// `status` as the receiver of its failure frame sees it.
Status clip_text(const Status& status);

std::vector<std::byte> encode_failure(const Status& status);

/// @errors kTransport: too short, or an unknown error code
Result<Failure> parse_failure(std::span<const std::byte> payload);

/// Status in a failure frame, or the error of parse_failure.
Status status_of_failure(std::span<const std::byte> payload);

std::array<std::byte, kGiveUpBytes> encode_give_up(std::uint64_t gather_idx);

/// The payload must be kGiveUpBytes long; parse_header has checked that.
std::uint64_t parse_give_up(std::span<const std::byte> payload);

/// Integers are little-endian on the wire on every machine, at any alignment.
template <std::unsigned_integral Integer>
void store_little_endian(std::byte* to, Integer value) {
  for (std::size_t i = 0; i < sizeof(Integer); ++i) to[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}

template <std::unsigned_integral Integer>
Integer load_little_endian(const std::byte* from) {
  Integer value = 0;
  for (std::size_t i = 0; i < sizeof(Integer); ++i) {
    value = static_cast<Integer>(value | (std::to_integer<Integer>(from[i]) << (8 * i)));
  }
  return value;
}

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_FRAME_HPP
