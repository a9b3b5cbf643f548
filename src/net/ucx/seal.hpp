#ifndef FERRY_NET_UCX_SEAL_HPP
#define FERRY_NET_UCX_SEAL_HPP

/// Keys that only the two ends of a connection have, and the tag that proves that one of them made a message.
///
/// Each end publishes an X25519 key. Both ends of a pair compute the same secret from their own private key and the
/// other end's public key, and derive one key per direction from it (HKDF with SHA-256). The bootstrap must keep
/// published keys authentic, not secret.
///
/// A tag is a SipHash-2-4 of 128 bits: a MAC for short messages. An AEAD of OpenSSL takes three times as long as its
/// SipHash to set the nonce and read the tag, twice per message.

#include <openssl/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ferry/status.hpp"
#include "net/ucx/sodium.hpp"

namespace ferry::net::ucx {

using PublicKey = std::array<std::byte, 32>;
using SealKey = std::array<std::byte, 16>;
using Tag = std::array<std::byte, 16>;

/// Keys of both directions between this end and a peer.
struct PairKeys {
  SealKey sending{};
  SealKey receiving{};
};

struct OpenSslDeleter {
  void operator()(EVP_PKEY* key) const;
  void operator()(EVP_MAC_CTX* context) const;
};

/// Key pair of an end. Created anew for each engine, so that no key ever covers two networks.
class KeyPair {
 public:
  /// @errors kSystem
  static Result<KeyPair> make();

  const PublicKey& public_key() const { return public_key_; }

  /// Published bytes that differ between ends.
  using Name = std::span<const std::byte>;
  /// @errors kTransport: no secret follows from `peer_key`, which no honest end publishes; kSystem
  Result<PairKeys> agree(const PublicKey& peer_key, Name own_name, Name peer_name) const;

 private:
  std::unique_ptr<EVP_PKEY, OpenSslDeleter> key_;
  PublicKey public_key_{};
};

/// SipHash implementation that makes tags. Both make the same tags, so the two ends may use different ones.
enum class TagMaker {
  kFastest,  ///< libsodium's if it is installed, else OpenSSL's
  kOpenSsl,  ///< takes four times as long, because it looks the tag size up by name for each tag
};

/// Makes the tags of one direction. One thread at a time.
class Seal {
 public:
  /// @errors kSystem
  static Result<Seal> make(const SealKey& key, TagMaker maker = TagMaker::kFastest);

  /// False if OpenSSL fails: no tag then. `bytes` must contain a number that no other message of the key has.
  bool tag(std::span<const std::byte> bytes, Tag* tag) const noexcept;
  /// True if `tag` belongs to these bytes. Takes the same time wherever the tags differ.
  bool matches(std::span<const std::byte> bytes, const Tag& tag) const noexcept;

 private:
  /// Erases its key when destroyed.
  struct HeldKey {
    SealKey bytes{};
    HeldKey() = default;
    HeldKey(const HeldKey&) = delete;
    HeldKey& operator=(const HeldKey&) = delete;
    ~HeldKey();
  };
  std::unique_ptr<HeldKey> key_;
  SodiumSipHash sodium_ = nullptr;
  std::unique_ptr<EVP_MAC_CTX, OpenSslDeleter> context_;  // used if `sodium` is null
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SEAL_HPP
