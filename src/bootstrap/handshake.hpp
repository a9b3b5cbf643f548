#ifndef FERRY_BOOTSTRAP_HANDSHAKE_HPP
#define FERRY_BOOTSTRAP_HANDSHAKE_HPP

/// Mutual authentication by a shared secret, as pure functions on bytes; the cryptography is libcrypto's.
///
/// 1. The root sends a challenge with a new nonce to every connection.
/// 2. The peer answers with a hello: its own new nonce, rank, num_ranks and version, and as proof
///    HMAC(secret, "peer proof" | root's nonce | all of the hello before the proof).
/// 3. Both derive one session key per direction, HMAC(secret, direction | root's nonce | hello before the proof). The
///    root's next frame, welcome or failure, carries a digest made with its key. The key depends on the peer's nonce,
///    so the digest proves that the root knows the secret now.
///
/// The peer proves itself first, so that a connection without the secret gets nothing against which it could test
/// guesses.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "bootstrap/frame.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// Time from connecting to a verified hello: two messages, with a margin for a slow network and a busy machine, and
/// short compared to any sensible deadline of the group.
inline constexpr std::int64_t kHandshakeNs = 5 * kNsPerSecond;

using ChallengeFrame = std::array<std::byte, kChallengeFrameBytes>;
using HelloFrame = std::array<std::byte, kHelloFrameBytes>;

struct SessionKeys {
  Digest root_to_peer{};
  Digest peer_to_root{};
};

ChallengeFrame make_challenge(const Nonce& root_nonce);

/// @errors kTransport: not a challenge
Result<Nonce> parse_challenge(std::span<const std::byte, kChallengeFrameBytes> frame);

/// `hello` with its proof, as a frame. Ignores the proof inside `hello`.
Result<HelloFrame> make_hello(std::string_view secret, const Nonce& root_nonce, const Hello& hello);

/// Hello in `frame`, if its sender has the secret.
/// @errors kTransport: not a hello, or a wrong proof; kSystem
Result<Hello> verify_hello(std::string_view secret, const Nonce& root_nonce,
                           std::span<const std::byte, kHelloFrameBytes> frame);

Result<SessionKeys> derive_session_keys(std::string_view secret, const Nonce& root_nonce, const Hello& hello);

/// @errors kSystem: the random generator has no entropy
Status fill_random(std::span<std::byte> out);

/// @errors kSystem: libcrypto failed (out of memory, or SHA-256 is disabled)
Result<Digest> hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data);

/// Takes the same time for any two digests, so that the time does not reveal where they differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

inline std::span<const std::byte> as_byte_span(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_HANDSHAKE_HPP
