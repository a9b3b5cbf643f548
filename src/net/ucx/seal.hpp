#ifndef FERRY_NET_UCX_SEAL_HPP
#define FERRY_NET_UCX_SEAL_HPP

/// Keys that only the two ends of a connection have, and the tag that proves that a message was made with one.
///
/// Each end publishes an X25519 key. Both ends of a pair compute the same secret from their own private key and the
/// other's public one, and from it one key for each direction (HKDF with SHA-256). The bootstrap must keep what is
/// published authentic, not secret.
///
/// A tag is SipHash-2-4 with 128 bits: a MAC for short messages. One of OpenSSL's AEADs takes three times as long as
/// its SipHash to set its nonce and to read its tag, twice on the way of each message.

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

/// Both directions between this end and a peer.
struct PairKeys {
  SealKey sending{};
  SealKey receiving{};
};

struct OpenSslDeleter {
  void operator()(EVP_PKEY* key) const;
  void operator()(EVP_MAC_CTX* context) const;
};

/// An end's own key. Made anew for each engine, so that no key ever covers two networks.
class KeyPair {
 public:
  /// @errors kSystem
  static Result<KeyPair> make();

  const PublicKey& public_key() const { return public_key_; }

  /// Something that an end published and that differs between ends.
  using Name = std::span<const std::byte>;
  /// @errors kTransport: no secret follows from `peer_key`, which is not one that an honest end publishes; kSystem
  Result<PairKeys> agree(const PublicKey& peer_key, Name own_name, Name peer_name) const;

 private:
  std::unique_ptr<EVP_PKEY, OpenSslDeleter> key_;
  PublicKey public_key_{};
};

/// Whose SipHash makes tags: those of both are the same, so two ends need not have the same.
enum class TagMaker {
  kFastest,  ///< libsodium's where that is installed, else OpenSSL's
  kOpenSsl,  ///< takes four times as long, as it looks the size of a tag up by name each time
};

/// Makes the tags of one direction. One thread at a time.
class Seal {
 public:
  /// @errors kSystem
  static Result<Seal> make(const SealKey& key, TagMaker maker = TagMaker::kFastest);

  /// False where OpenSSL fails: no tag then. `bytes` have a number in them that no other message of the key has.
  bool tag(std::span<const std::byte> bytes, Tag* tag) const noexcept;
  /// Whether `tag` is that of these bytes, in a time that does not depend on where it differs.
  bool matches(std::span<const std::byte> bytes, const Tag& tag) const noexcept;

 private:
  /// Forgets its key.
  struct HeldKey {
    SealKey bytes{};
    HeldKey() = default;
    HeldKey(const HeldKey&) = delete;
    HeldKey& operator=(const HeldKey&) = delete;
    ~HeldKey();
  };
  std::unique_ptr<HeldKey> key_;
  SodiumSipHash sodium_ = nullptr;
  std::unique_ptr<EVP_MAC_CTX, OpenSslDeleter> context_;  // where that is null
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SEAL_HPP
