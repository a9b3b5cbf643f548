/// The parsers of the bootstrap's frames, each on the whole input: they take bytes as strangers send them.

#include <algorithm>

#include "bootstrap/frame.hpp"
#include "fuzz_target.hpp"

namespace ferry::test {
namespace {

using namespace bootstrap;

// Room for a message of refusal with three numbers in it, and not for anything that a length could announce.
constexpr std::size_t kMessageRoomBytes = 512;

void fuzz_header(std::span<const std::byte> input) {
  if (input.size() < kHeaderBytes) return;
  const std::span<const std::byte, kHeaderBytes> bytes = input.first<kHeaderBytes>();
  const AllocationWatch watch;
  const Result<FrameHeader> header = parse_header(bytes);
  require(watch.largest_bytes() <= kMessageRoomBytes, "a header makes nobody allocate");
  if (!header.ok()) {
    require_refusal(header.status(), ErrorCode::kTransport);
    return;
  }
  require(same_bytes(encode_header(*header), bytes), "a header has one spelling");
  require(header->payload_bytes <= std::max(kMaxBootstrapMessageBytes, kFailureFixedBytes + kMaxFailureTextBytes),
          "no frame is longer than the longest message");
}

void fuzz_hello(std::span<const std::byte> input) {
  const AllocationWatch watch;
  const Result<Hello> hello = parse_hello(input);
  require(watch.largest_bytes() <= kMessageRoomBytes, "a hello makes nobody allocate");
  if (!hello.ok()) {
    require_refusal(hello.status(), ErrorCode::kTransport);
    return;
  }
  require(input.size() == kHelloBytes, "a hello has one length");
  require(same_bytes(encode_hello_unproven(*hello), input.first(kHelloUnprovenBytes)), "a hello has one spelling");
  require(same_bytes(hello->proof, input.subspan(kHelloUnprovenBytes)), "the proof is what follows");
  require(!hello->version.empty() && hello->version.size() <= kVersionBytes, "a version has a length");
  require(std::all_of(hello->version.begin(), hello->version.end(), [](char c) { return c >= ' ' && c <= '~'; }),
          "a version can be shown to people");
}

void fuzz_failure(std::span<const std::byte> input) {
  const AllocationWatch watch;
  const Result<Failure> failure = parse_failure(input);
  require(watch.largest_bytes() <= input.size() + kMessageRoomBytes, "a failure takes the memory of its text");
  if (!failure.ok()) {
    require_refusal(failure.status(), ErrorCode::kTransport);
    return;
  }
  const Status status = failure->to_status();
  require(!status.ok(), "a failure is one");
  require(to_string(status.code()) != "unknown", "a failure's code has a name");
  const std::vector<std::byte> encoded = encode_failure(status);
  require(same_bytes(encoded, input.first(std::min(input.size(), kFailureFixedBytes + kMaxFailureTextBytes))),
          "a failure has one spelling, less the text that is too long");

  const Status clipped = clip_text(status);
  const Result<Failure> travelled = parse_failure(encoded);
  require(travelled.ok(), "what was encoded can be parsed");
  require(
      travelled->code == clipped.code() && travelled->peer == clipped.peer() && travelled->text == clipped.message(),
      "all ranks read what clip_text says they will");
}

void fuzz_give_up(std::span<const std::byte> input) {
  if (input.size() < kGiveUpBytes) return;
  const std::span<const std::byte> bytes = input.first(kGiveUpBytes);
  require(same_bytes(encode_give_up(parse_give_up(bytes)), bytes), "a give-up has one spelling");
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  fuzz_header(input);
  fuzz_hello(input);
  fuzz_failure(input);
  fuzz_give_up(input);
}

}  // namespace ferry::test
