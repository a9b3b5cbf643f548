#ifndef FERRY_BOOTSTRAP_HANDSHAKE_HPP
#define FERRY_BOOTSTRAP_HANDSHAKE_HPP

/// How two ends convince each other that they know the secret. No sockets here: bytes in, bytes out.
///
/// 1. The root sends a challenge with a fresh nonce to whoever connects.
/// 2. The peer answers with a hello: its own fresh nonce, rank, num_ranks and version, and as proof
///    HMAC(secret, "peer proof" | root's nonce | all of the hello before the proof).
/// 3. Both derive one session key per direction, HMAC(secret, direction | root's nonce | hello before the proof). The
///    root's next frame, welcome or failure, carries a digest by its key. That depends on the peer's nonce, so it
///    proves that the root knows the secret now.
///
/// The peer proves itself first, so that a stranger who merely connects gets nothing to test guesses of the secret on.

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include "bootstrap/auth.hpp"
#include "bootstrap/frame.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

using ChallengeFrame = std::array<std::byte, kChallengeFrameBytes>;
using HelloFrame = std::array<std::byte, kHelloFrameBytes>;

struct SessionKeys {
  Digest root_to_peer{};
  Digest peer_to_root{};
};

ChallengeFrame make_challenge(const Nonce& root_nonce);

/// @errors kTransport: not a challenge
Result<Nonce> parse_challenge(std::span<const std::byte, kChallengeFrameBytes> frame);

/// `hello` with its proof, as a frame. The proof inside `hello` is not read.
Result<HelloFrame> make_hello(std::string_view secret, const Nonce& root_nonce, const Hello& hello);

/// The hello in `frame`, where its sender knows the secret.
/// @errors kTransport: not a hello, or a wrong proof; kSystem
Result<Hello> verify_hello(std::string_view secret, const Nonce& root_nonce,
                           std::span<const std::byte, kHelloFrameBytes> frame);

Result<SessionKeys> derive_session_keys(std::string_view secret, const Nonce& root_nonce, const Hello& hello);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_HANDSHAKE_HPP
