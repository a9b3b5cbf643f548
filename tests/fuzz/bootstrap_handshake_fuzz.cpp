/// Challenge and hello: once with the input as sent by an attacker, and once with a hello that a peer with the secret
/// made and that was modified on the way.

#include <algorithm>

#include "bootstrap/handshake.hpp"
#include "fuzz_target.hpp"
#include "input_reader.hpp"

namespace ferry::test {
namespace {

using namespace bootstrap;

constexpr std::size_t kMessageRoomBytes = 512;
constexpr std::size_t kMaxChanges = 8;

void fuzz_challenge(std::span<const std::byte, kChallengeFrameBytes> frame) {
  const Result<Nonce> nonce = parse_challenge(frame);
  if (!nonce.ok()) {
    require_refusal(nonce.status(), ErrorCode::kTransport);
    return;
  }
  require(same_bytes(make_challenge(*nonce), frame), "a challenge has exactly one encoding");
}

/// A hello verifies if and only if a peer that knows the secret would have sent it.
void fuzz_hello(std::string_view secret, const Nonce& nonce, std::span<const std::byte, kHelloFrameBytes> frame) {
  const AllocationWatch watch;
  const Result<Hello> verified = verify_hello(secret, nonce, frame);
  require(watch.largest_bytes() <= kMessageRoomBytes, "a hello causes no allocation");
  if (!verified.ok()) require_refusal(verified.status(), ErrorCode::kTransport);

  const Result<FrameHeader> header = parse_header(frame.first<kHeaderBytes>());
  const Result<Hello> said = parse_hello(frame.subspan<kHeaderBytes>());
  if (!header.ok() || header->type != FrameType::kHello || !said.ok()) {
    require(!verified.ok(), "a frame that is not a hello does not verify");
    return;
  }
  const Result<HelloFrame> proven = make_hello(secret, nonce, *said);
  require(proven.ok(), "a hello can be made from every parsed hello");
  require(verified.ok() == same_bytes(*proven, frame), "only the hello with the correct proof verifies");
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool is_printable(std::string_view version) {
  return !version.empty() && std::all_of(version.begin(), version.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

/// Flips bits of `bytes` at positions that the input chooses. Returns false if the bytes are unchanged afterwards.
bool change(InputReader* reader, std::span<std::byte> bytes) {
  const std::vector<std::byte> before(bytes.begin(), bytes.end());
  const std::size_t num_changes = 1 + reader->take<std::uint8_t>() % kMaxChanges;
  for (std::size_t i = 0; i < num_changes; ++i) {
    const std::size_t position = reader->take<std::uint8_t>() % bytes.size();
    bytes[position] ^= static_cast<std::byte>(reader->take<std::uint8_t>());
  }
  return !same_bytes(before, bytes);
}

void require_other_keys(const SessionKeys& a, const SessionKeys& b) {
  require(a.root_to_peer != b.root_to_peer && a.peer_to_root != b.peer_to_root, "two sessions have different keys");
}

void fuzz_proven_hello(InputReader reader) {
  std::string secret(text_of(reader.take_at_most(reader.take<std::uint8_t>())));
  Nonce nonce = reader.take_array<kNonceBytes>();
  Hello hello;
  hello.nonce = reader.take_array<kNonceBytes>();
  hello.instance = reader.take_array<kInstanceBytes>();
  hello.rank = reader.take<std::uint32_t>();
  hello.num_ranks = reader.take<std::uint32_t>();
  hello.version = text_of(reader.take_at_most(reader.take<std::uint8_t>()));

  const Result<HelloFrame> made = make_hello(secret, nonce, hello);
  require(made.ok(), "a hello can be made from any values");
  const Result<Hello> verified = verify_hello(secret, nonce, *made);
  const std::string_view sent_version = std::string_view(hello.version).substr(0, kVersionBytes);
  // Zeros at the end cannot be distinguished from padding.
  const std::string_view read_version = sent_version.substr(0, sent_version.find_last_not_of('\0') + 1);
  require(verified.ok() == is_printable(read_version), "a proven hello verifies unless its version is not printable");
  if (verified.ok()) {
    require(verified->nonce == hello.nonce && verified->instance == hello.instance && verified->rank == hello.rank &&
                verified->num_ranks == hello.num_ranks && verified->version == read_version,
            "the root reads the values that the peer sent");
  }

  const SessionKeys keys = derive_session_keys(secret, nonce, hello).value();
  require(keys.root_to_peer != keys.peer_to_root, "a frame cannot be reflected to its sender");

  HelloFrame changed_frame = *made;
  if (change(&reader, changed_frame)) {
    require(!verify_hello(secret, nonce, changed_frame).ok(), "a changed hello never verifies");
  }
  Nonce other_nonce = nonce;
  if (change(&reader, other_nonce)) {
    require(!verify_hello(secret, other_nonce, *made).ok(), "an answer to another challenge never verifies");
    require_other_keys(keys, derive_session_keys(secret, other_nonce, hello).value());
  }
  // Equal lengths: HMAC pads short keys with zeros, so that "s" and "s\0" are the same key.
  std::string other_secret = secret;
  if (!secret.empty() && change(&reader, std::as_writable_bytes(std::span(other_secret)))) {
    require(!verify_hello(other_secret, nonce, *made).ok(), "a hello proven by another secret never verifies");
    require_other_keys(keys, derive_session_keys(other_secret, nonce, hello).value());
  }
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  if (input.size() >= kChallengeFrameBytes) fuzz_challenge(input.first<kChallengeFrameBytes>());
  if (input.size() >= kHelloFrameBytes) fuzz_hello("secret", Nonce{}, input.first<kHelloFrameBytes>());
  fuzz_proven_hello(InputReader(input));
}

}  // namespace ferry::test
