#include "bootstrap/frame.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace ferry::bootstrap {
namespace {

// "FRY1" as it appears on the wire.
constexpr std::array<std::byte, 4> kMagic = {std::byte{'F'}, std::byte{'R'}, std::byte{'Y'}, std::byte{'1'}};
constexpr std::size_t kTypeOffset = kMagic.size();
constexpr std::size_t kZeroOffset = kTypeOffset + sizeof(std::uint16_t);
constexpr std::size_t kLengthOffset = kZeroOffset + sizeof(std::uint16_t);
static_assert(kLengthOffset + sizeof(std::uint32_t) == kHeaderBytes);

constexpr std::size_t kInstanceOffset = kNonceBytes;
constexpr std::size_t kRankOffset = kInstanceOffset + kInstanceBytes;
constexpr std::size_t kNumRanksOffset = kRankOffset + sizeof(std::uint32_t);
constexpr std::size_t kVersionOffset = kNumRanksOffset + sizeof(std::uint32_t);
static_assert(kVersionOffset + kVersionBytes == kHelloUnprovenBytes);

struct LengthBound {
  FrameType type;
  std::size_t min_bytes;
  std::size_t max_bytes;
};
constexpr LengthBound kLengthBounds[] = {
    {FrameType::kChallenge, kNonceBytes, kNonceBytes},
    {FrameType::kHello, kHelloBytes, kHelloBytes},
    {FrameType::kWelcome, 0, 0},
    {FrameType::kStart, 0, 0},
    {FrameType::kMessage, 0, kMaxBootstrapMessageBytes},
    {FrameType::kPart, 0, kMaxBootstrapMessageBytes},
    {FrameType::kFailure, kFailureFixedBytes, kFailureFixedBytes + kMaxFailureTextBytes},
    {FrameType::kGiveUp, kGiveUpBytes, kGiveUpBytes},
};

bool is_printable(char c) { return c >= ' ' && c <= '~'; }

}  // namespace

HeaderBytes encode_header(const FrameHeader& header) {
  HeaderBytes bytes{};
  std::copy(kMagic.begin(), kMagic.end(), bytes.begin());
  store_little_endian(bytes.data() + kTypeOffset, static_cast<std::uint16_t>(header.type));
  store_little_endian(bytes.data() + kLengthOffset, header.payload_bytes);
  return bytes;
}

Result<FrameHeader> parse_header(std::span<const std::byte, kHeaderBytes> bytes) {
  if (!std::equal(kMagic.begin(), kMagic.end(), bytes.begin())) {
    return Status(ErrorCode::kTransport,
                  "bootstrap: received a frame that does not begin with \"FRY1\"; the sender is not a Ferry rank");
  }
  const auto type = load_little_endian<std::uint16_t>(bytes.data() + kTypeOffset);
  const auto zero = load_little_endian<std::uint16_t>(bytes.data() + kZeroOffset);
  const auto length = load_little_endian<std::uint32_t>(bytes.data() + kLengthOffset);
  for (const LengthBound& bound : kLengthBounds) {
    if (static_cast<std::uint16_t>(bound.type) != type || zero != 0) continue;
    if (length < bound.min_bytes || length > bound.max_bytes) {
      return Status(ErrorCode::kTransport,
                    fmt::format("bootstrap: received a frame of type {} with length {}, expected {} to {} bytes", type,
                                length, bound.min_bytes, bound.max_bytes));
    }
    return FrameHeader{bound.type, length};
  }
  return Status(
      ErrorCode::kTransport,
      fmt::format("bootstrap: received a frame of unknown type {} (reserved field {}, expected 0)", type, zero));
}

std::array<std::byte, kHelloUnprovenBytes> encode_hello_unproven(const Hello& hello) {
  std::array<std::byte, kHelloUnprovenBytes> bytes{};
  std::copy(hello.nonce.begin(), hello.nonce.end(), bytes.begin());
  std::copy(hello.instance.begin(), hello.instance.end(), bytes.begin() + kInstanceOffset);
  store_little_endian(bytes.data() + kRankOffset, hello.rank);
  store_little_endian(bytes.data() + kNumRanksOffset, hello.num_ranks);
  std::memcpy(bytes.data() + kVersionOffset, hello.version.data(), std::min(hello.version.size(), kVersionBytes));
  return bytes;
}

Result<Hello> parse_hello(std::span<const std::byte> payload) {
  if (payload.size() != kHelloBytes) {
    return Status(ErrorCode::kTransport,
                  fmt::format("bootstrap: received a hello of {} bytes, expected {}", payload.size(), kHelloBytes));
  }
  Hello hello;
  std::copy_n(payload.begin(), kNonceBytes, hello.nonce.begin());
  std::copy_n(payload.begin() + kInstanceOffset, kInstanceBytes, hello.instance.begin());
  hello.rank = load_little_endian<std::uint32_t>(payload.data() + kRankOffset);
  hello.num_ranks = load_little_endian<std::uint32_t>(payload.data() + kNumRanksOffset);
  std::copy_n(payload.begin() + kHelloUnprovenBytes, kDigestBytes, hello.proof.begin());

  const auto* version = reinterpret_cast<const char*>(payload.data() + kVersionOffset);
  const char* end = std::find(version, version + kVersionBytes, '\0');
  // The version appears in error messages, so only printable text is accepted. The padding must be zero: a hello has
  // exactly one encoding.
  const bool padded = std::all_of(end, version + kVersionBytes, [](char c) { return c == '\0'; });
  if (end == version || !padded || !std::all_of(version, end, is_printable)) {
    return Status(ErrorCode::kTransport, "bootstrap: received a hello whose version is not zero-padded printable text");
  }
  hello.version.assign(version, end);
  return hello;
}

Status clip_text(const Status& status) {
  return Status(status.code(), std::string(status.message().substr(0, kMaxFailureTextBytes)), status.peer());
}

std::vector<std::byte> encode_failure(const Status& status) {
  const std::string_view text = status.message().substr(0, kMaxFailureTextBytes);
  std::vector<std::byte> bytes(kFailureFixedBytes + text.size());
  store_little_endian(bytes.data(), static_cast<std::uint32_t>(status.code()));
  store_little_endian(bytes.data() + sizeof(std::uint32_t), static_cast<std::uint32_t>(status.peer()));
  std::memcpy(bytes.data() + kFailureFixedBytes, text.data(), text.size());
  return bytes;
}

Result<Failure> parse_failure(std::span<const std::byte> payload) {
  if (payload.size() < kFailureFixedBytes) {
    return Status(ErrorCode::kTransport,
                  fmt::format("bootstrap: received a failure frame of {} bytes, expected at least {}", payload.size(),
                              kFailureFixedBytes));
  }
  const auto code = load_little_endian<std::uint32_t>(payload.data());
  if (code == static_cast<std::uint32_t>(ErrorCode::kOk) || code > static_cast<std::uint32_t>(ErrorCode::kInternal)) {
    return Status(ErrorCode::kTransport,
                  fmt::format("bootstrap: received a failure frame with unknown error code {}", code));
  }
  const std::span<const std::byte> text = payload.subspan(kFailureFixedBytes);
  return Failure{.code = static_cast<ErrorCode>(code),
                 .peer = static_cast<int>(load_little_endian<std::uint32_t>(payload.data() + sizeof(std::uint32_t))),
                 .text = std::string(reinterpret_cast<const char*>(text.data()), text.size())};
}

Status status_of_failure(std::span<const std::byte> payload) {
  const Result<Failure> failure = parse_failure(payload);
  return failure.ok() ? failure->to_status() : failure.status();
}

std::array<std::byte, kGiveUpBytes> encode_give_up(std::uint64_t gather_idx) {
  std::array<std::byte, kGiveUpBytes> bytes{};
  store_little_endian(bytes.data(), gather_idx);
  return bytes;
}

std::uint64_t parse_give_up(std::span<const std::byte> payload) {
  return load_little_endian<std::uint64_t>(payload.data());
}

}  // namespace ferry::bootstrap
