#include "bootstrap/handshake.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>

namespace ferry::bootstrap {
namespace {

// Every digest covers the label of its purpose, so that it cannot be used for another purpose. All labels have one
// length, so that no label can continue into the nonce after it.
constexpr std::size_t kLabelBytes = 32;
using Label = std::array<std::byte, kLabelBytes>;

Label make_label(std::string_view text) {
  Label label{};
  std::copy_n(as_byte_span(text).begin(), std::min(text.size(), kLabelBytes), label.begin());
  return label;
}

Result<Digest> keyed_digest(std::string_view secret, std::string_view label_text, const Nonce& root_nonce,
                            const Hello& hello) {
  const Label label = make_label(label_text);
  const auto unproven = encode_hello_unproven(hello);
  std::array<std::byte, kLabelBytes + kNonceBytes + kHelloUnprovenBytes> covered{};
  auto end = std::copy(label.begin(), label.end(), covered.begin());
  end = std::copy(root_nonce.begin(), root_nonce.end(), end);
  std::copy(unproven.begin(), unproven.end(), end);
  return hmac_sha256(as_byte_span(secret), covered);
}

Result<Digest> peer_proof(std::string_view secret, const Nonce& root_nonce, const Hello& hello) {
  return keyed_digest(secret, "ferry bootstrap peer proof", root_nonce, hello);
}

Status wrong_type(std::string_view expected) {
  return Status(ErrorCode::kTransport,
                std::string("bootstrap: expected the first frame of a connection to be a ").append(expected));
}

}  // namespace

ChallengeFrame make_challenge(const Nonce& root_nonce) {
  ChallengeFrame frame{};
  const HeaderBytes header = encode_header({FrameType::kChallenge, kNonceBytes});
  std::copy(root_nonce.begin(), root_nonce.end(), std::copy(header.begin(), header.end(), frame.begin()));
  return frame;
}

Result<Nonce> parse_challenge(std::span<const std::byte, kChallengeFrameBytes> frame) {
  const Result<FrameHeader> header = parse_header(frame.first<kHeaderBytes>());
  if (!header.ok()) return header.status();
  if (header->type != FrameType::kChallenge) return wrong_type("challenge");
  Nonce nonce{};
  std::copy_n(frame.begin() + kHeaderBytes, kNonceBytes, nonce.begin());
  return nonce;
}

Result<HelloFrame> make_hello(std::string_view secret, const Nonce& root_nonce, const Hello& hello) {
  const Result<Digest> proof = peer_proof(secret, root_nonce, hello);
  if (!proof.ok()) return proof.status();
  HelloFrame frame{};
  const HeaderBytes header = encode_header({FrameType::kHello, kHelloBytes});
  const auto unproven = encode_hello_unproven(hello);
  auto end = std::copy(header.begin(), header.end(), frame.begin());
  end = std::copy(unproven.begin(), unproven.end(), end);
  std::copy(proof->begin(), proof->end(), end);
  return frame;
}

Result<Hello> verify_hello(std::string_view secret, const Nonce& root_nonce,
                           std::span<const std::byte, kHelloFrameBytes> frame) {
  const Result<FrameHeader> header = parse_header(frame.first<kHeaderBytes>());
  if (!header.ok()) return header.status();
  if (header->type != FrameType::kHello) return wrong_type("hello");
  Result<Hello> hello = parse_hello(frame.subspan<kHeaderBytes>());
  if (!hello.ok()) return hello.status();
  const Result<Digest> expected = peer_proof(secret, root_nonce, *hello);
  if (!expected.ok()) return expected.status();
  if (!equal_in_constant_time(*expected, hello->proof)) {
    return Status(ErrorCode::kTransport, "bootstrap: received a hello with a wrong proof: the peer has another secret");
  }
  return hello;
}

Result<SessionKeys> derive_session_keys(std::string_view secret, const Nonce& root_nonce, const Hello& hello) {
  const Result<Digest> root_to_peer = keyed_digest(secret, "ferry bootstrap root to peer", root_nonce, hello);
  const Result<Digest> peer_to_root = keyed_digest(secret, "ferry bootstrap peer to root", root_nonce, hello);
  if (!root_to_peer.ok()) return root_to_peer.status();
  if (!peer_to_root.ok()) return peer_to_root.status();
  return SessionKeys{*root_to_peer, *peer_to_root};
}

Status fill_random(std::span<std::byte> out) {
  if (RAND_bytes(reinterpret_cast<unsigned char*>(out.data()), static_cast<int>(out.size())) == 1) return {};
  return Status(ErrorCode::kSystem,
                "bootstrap: libcrypto's RAND_bytes returned no random bytes; is /dev/urandom readable?");
}

Result<Digest> hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) {
  Digest digest{};
  unsigned int digest_bytes = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(data.data()),
           data.size(), reinterpret_cast<unsigned char*>(digest.data()), &digest_bytes);
  if (made == nullptr || digest_bytes != digest.size()) {
    return Status(
        ErrorCode::kSystem,
        "bootstrap: libcrypto's HMAC-SHA-256 failed; check that SHA-256 is not disabled in its configuration");
  }
  return digest;
}

bool equal_in_constant_time(const Digest& a, const Digest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace ferry::bootstrap
