/// Parsers of the bootstrap's frames, each on the whole input.

#include <algorithm>

#include "bootstrap/frame.hpp"
#include "fuzz_target.hpp"

namespace ferry::test {
namespace {

using namespace bootstrap;

// Enough for an error message with three numbers, and less than a length in the input could request.
constexpr std::size_t kMessageRoomBytes = 512;

void fuzz_header(std::span<const std::byte> input) {
  if (input.size() < kHeaderBytes) return;
  const std::span<const std::byte, kHeaderBytes> bytes = input.first<kHeaderBytes>();
  const AllocationWatch watch;
  const Result<FrameHeader> header = parse_header(bytes);
  require(watch.largest_bytes() <= kMessageRoomBytes, "a header causes no allocation");
  if (!header.ok()) {
    require_refusal(header.status(), ErrorCode::kTransport);
    return;
  }
  require(same_bytes(encode_header(*header), bytes), "a header has exactly one encoding");
  require(header->payload_bytes <= std::max(kMaxBootstrapMessageBytes, kFailureFixedBytes + kMaxFailureTextBytes),
          "no frame is longer than the longest message");
}

void fuzz_hello(std::span<const std::byte> input) {
  const AllocationWatch watch;
  const Result<Hello> hello = parse_hello(input);
  require(watch.largest_bytes() <= kMessageRoomBytes, "a hello causes no allocation");
  if (!hello.ok()) {
    require_refusal(hello.status(), ErrorCode::kTransport);
    return;
  }
  require(input.size() == kHelloBytes, "a hello has a fixed length");
  require(same_bytes(encode_hello_unproven(*hello), input.first(kHelloUnprovenBytes)),
          "a hello has exactly one encoding");
  require(same_bytes(hello->proof, input.subspan(kHelloUnprovenBytes)), "the proof is the end of the hello");
  require(!hello->version.empty() && hello->version.size() <= kVersionBytes, "a version is not empty and not too long");
  require(std::all_of(hello->version.begin(), hello->version.end(), [](char c) { return c >= ' ' && c <= '~'; }),
          "a version is printable");
}

void fuzz_failure(std::span<const std::byte> input) {
  const AllocationWatch watch;
  const Result<Failure> failure = parse_failure(input);
  require(watch.largest_bytes() <= input.size() + kMessageRoomBytes, "a failure allocates no more than its text");
  if (!failure.ok()) {
    require_refusal(failure.status(), ErrorCode::kTransport);
    return;
  }
  const Status status = failure->to_status();
  require(!status.ok(), "a failure is not ok");
  require(to_string(status.code()) != "unknown", "a failure's code has a name");
  const std::vector<std::byte> encoded = encode_failure(status);
  require(same_bytes(encoded, input.first(std::min(input.size(), kFailureFixedBytes + kMaxFailureTextBytes))),
          "a failure has exactly one encoding, up to the longest text");

  const Status clipped = clip_text(status);
  const Result<Failure> received = parse_failure(encoded);
  require(received.ok(), "an encoded failure can be parsed");
  require(received->code == clipped.code() && received->peer == clipped.peer() && received->text == clipped.message(),
          "the receiver reads the clipped text");
}

void fuzz_give_up(std::span<const std::byte> input) {
  if (input.size() < kGiveUpBytes) return;
  const std::span<const std::byte> bytes = input.first(kGiveUpBytes);
  require(same_bytes(encode_give_up(parse_give_up(bytes)), bytes), "a give-up has exactly one encoding");
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  fuzz_header(input);
  fuzz_hello(input);
  fuzz_failure(input);
  fuzz_give_up(input);
}

}  // namespace ferry::test
