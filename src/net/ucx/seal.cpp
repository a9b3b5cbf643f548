#include "net/ucx/seal.hpp"

#include <fmt/format.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <array>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace ferry::net::ucx {
namespace {

constexpr std::string_view kPurpose = "ferry network message to ";

unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

Status openssl_failed(std::string_view what) {
  return Status(
      ErrorCode::kSystem,
      fmt::format("network engine ucx: OpenSSL cannot {}; its libcrypto must offer X25519, HKDF and SipHash", what));
}

struct ContextDeleter {
  void operator()(EVP_PKEY_CTX* context) const { EVP_PKEY_CTX_free(context); }
};
using KeyContext = std::unique_ptr<EVP_PKEY_CTX, ContextDeleter>;

struct MacDeleter {
  void operator()(EVP_MAC* mac) const { EVP_MAC_free(mac); }
};

/// Derives the key of one direction: the receiver's name distinguishes it from the other direction's.
bool derive(std::span<const std::byte> secret, KeyPair::Name receiver, SealKey* key) {
  std::vector<std::byte> info(kPurpose.size() + receiver.size());
  std::memcpy(info.data(), kPurpose.data(), kPurpose.size());
  std::memcpy(info.data() + kPurpose.size(), receiver.data(), receiver.size());
  const KeyContext context(EVP_PKEY_CTX_new_id(EVP_PKEY_HKDF, nullptr));
  std::size_t num_bytes = key->size();
  return context != nullptr && EVP_PKEY_derive_init(context.get()) == 1 &&
         EVP_PKEY_CTX_set_hkdf_md(context.get(), EVP_sha256()) == 1 &&
         EVP_PKEY_CTX_set1_hkdf_key(context.get(), raw(secret.data()), static_cast<int>(secret.size())) == 1 &&
         EVP_PKEY_CTX_add1_hkdf_info(context.get(), raw(info.data()), static_cast<int>(info.size())) == 1 &&
         EVP_PKEY_derive(context.get(), raw(key->data()), &num_bytes) == 1 && num_bytes == key->size();
}

}  // namespace

void OpenSslDeleter::operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
void OpenSslDeleter::operator()(EVP_MAC_CTX* context) const { EVP_MAC_CTX_free(context); }

Result<KeyPair> KeyPair::make() {
  const KeyContext context(EVP_PKEY_CTX_new_id(EVP_PKEY_X25519, nullptr));
  EVP_PKEY* made = nullptr;
  if (context == nullptr || EVP_PKEY_keygen_init(context.get()) != 1 || EVP_PKEY_keygen(context.get(), &made) != 1) {
    return openssl_failed("make a key");
  }
  KeyPair pair;
  pair.key_.reset(made);
  std::size_t num_bytes = pair.public_key_.size();
  if (EVP_PKEY_get_raw_public_key(made, raw(pair.public_key_.data()), &num_bytes) != 1) {
    return openssl_failed("read a key");
  }
  return pair;
}

Result<PairKeys> KeyPair::agree(const PublicKey& peer_key, Name own_name, Name peer_name) const {
  const std::unique_ptr<EVP_PKEY, OpenSslDeleter> theirs(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_X25519, nullptr, raw(peer_key.data()), peer_key.size()));
  const KeyContext context(EVP_PKEY_CTX_new(key_.get(), nullptr));
  if (theirs == nullptr || context == nullptr || EVP_PKEY_derive_init(context.get()) != 1) {
    return openssl_failed("use a key");
  }
  std::array<std::byte, 32> secret{};
  std::size_t num_bytes = secret.size();
  if (EVP_PKEY_derive_set_peer(context.get(), theirs.get()) != 1 ||
      EVP_PKEY_derive(context.get(), raw(secret.data()), &num_bytes) != 1 || num_bytes != secret.size()) {
    return Status(ErrorCode::kTransport,
                  "network engine ucx: a peer published an unusable key; run the same build on every rank");
  }
  PairKeys keys;
  const bool derived = derive(secret, peer_name, &keys.sending) && derive(secret, own_name, &keys.receiving);
  OPENSSL_cleanse(secret.data(), secret.size());
  if (!derived) return openssl_failed("derive a key");
  return keys;
}

Result<Seal> Seal::make(const SealKey& key, TagMaker maker) {
  Seal seal;
  seal.key_ = std::make_unique<HeldKey>();
  seal.key_->bytes = key;
  if (maker == TagMaker::kFastest) seal.sodium_ = sodium_siphash();
  if (seal.sodium_ != nullptr) return seal;
  const std::unique_ptr<EVP_MAC, MacDeleter> mac(EVP_MAC_fetch(nullptr, "SIPHASH", nullptr));
  if (mac != nullptr) seal.context_.reset(EVP_MAC_CTX_new(mac.get()));
  std::size_t tag_bytes = sizeof(Tag);
  const std::array parameters = {OSSL_PARAM_construct_size_t(OSSL_MAC_PARAM_SIZE, &tag_bytes),
                                 OSSL_PARAM_construct_end()};
  if (seal.context_ == nullptr ||
      EVP_MAC_init(seal.context_.get(), raw(key.data()), key.size(), parameters.data()) != 1) {
    return openssl_failed("make tags with SipHash, which is in its default provider");
  }
  return seal;
}

Seal::HeldKey::~HeldKey() { OPENSSL_cleanse(bytes.data(), bytes.size()); }

bool Seal::tag(std::span<const std::byte> bytes, Tag* tag) const noexcept {
  if (sodium_ != nullptr) {
    return sodium_(raw(tag->data()), raw(bytes.data()), bytes.size(), raw(key_->bytes.data())) == 0;
  }
  EVP_MAC_CTX* context = context_.get();
  std::size_t num_bytes = 0;
  // Pass the key each time: without it, OpenSSL before 3.0.3 continues from the end of the last message.
  return EVP_MAC_init(context, raw(key_->bytes.data()), key_->bytes.size(), nullptr) == 1 &&
         EVP_MAC_update(context, raw(bytes.data()), bytes.size()) == 1 &&
         EVP_MAC_final(context, raw(tag->data()), &num_bytes, tag->size()) == 1 && num_bytes == tag->size();
}

bool Seal::matches(std::span<const std::byte> bytes, const Tag& tag) const noexcept {
  Tag expected{};
  return this->tag(bytes, &expected) && CRYPTO_memcmp(expected.data(), tag.data(), tag.size()) == 0;
}

}  // namespace ferry::net::ucx
