#include "net/ucx/seal.hpp"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace ferry::net::ucx {
namespace {

constexpr std::string_view kPurpose = "ferry network message to ";
constexpr std::size_t kBlockBytes = 16;  // of AES
/// The first block, and what a message has behind it, without a second round.
constexpr std::size_t kBytesAtOnce = 5 * kBlockBytes;
static_assert(sizeof(Tag) == kBlockBytes);

unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

Status openssl_failed(std::string_view what) {
  return Status(
      ErrorCode::kSystem,
      fmt::format("network engine ucx: OpenSSL cannot {}; its libcrypto must offer X25519, HKDF and AES-128-CBC",
                  what));
}

struct ContextDeleter {
  void operator()(EVP_PKEY_CTX* context) const { EVP_PKEY_CTX_free(context); }
};
using KeyContext = std::unique_ptr<EVP_PKEY_CTX, ContextDeleter>;

/// The key of one direction, which the name of its receiver tells from the other.
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
void OpenSslDeleter::operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }

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
    return Status(ErrorCode::kTransport, "network engine ucx: a peer published a key from which no secret follows");
  }
  PairKeys keys;
  const bool derived = derive(secret, peer_name, &keys.sending) && derive(secret, own_name, &keys.receiving);
  OPENSSL_cleanse(secret.data(), secret.size());
  if (!derived) return openssl_failed("derive a key");
  return keys;
}

Result<Seal> Seal::make(const SealKey& key) {
  Seal seal;
  seal.context_.reset(EVP_CIPHER_CTX_new());
  constexpr Tag kNoBlock{};
  if (seal.context_ == nullptr ||
      EVP_EncryptInit_ex(seal.context_.get(), EVP_aes_128_cbc(), nullptr, raw(key.data()), raw(kNoBlock.data())) != 1 ||
      EVP_CIPHER_CTX_set_padding(seal.context_.get(), 0) != 1) {
    return openssl_failed("use AES");
  }
  return seal;
}

bool Seal::tag(std::uint64_t sequence, std::span<const std::byte> bytes, Tag* tag) const noexcept {
  std::array<std::byte, kBytesAtOnce> in;
  std::array<std::byte, kBytesAtOnce> out;
  const std::uint64_t num_bytes = bytes.size();
  std::memcpy(in.data(), &sequence, sizeof sequence);
  std::memcpy(in.data() + sizeof sequence, &num_bytes, sizeof num_bytes);
  for (std::size_t i = 0; i < kBlockBytes; ++i) in[i] ^= last_block_[i];
  std::size_t filled = kBlockBytes;
  do {
    const std::size_t taken = std::min(bytes.size(), kBytesAtOnce - filled);
    if (taken > 0) std::memcpy(in.data() + filled, bytes.data(), taken);
    bytes = bytes.subspan(taken);
    filled += taken;
    for (; filled % kBlockBytes != 0; ++filled) in[filled] = std::byte{0};
    int made = 0;
    if (EVP_EncryptUpdate(context_.get(), raw(out.data()), &made, raw(in.data()), static_cast<int>(filled)) != 1 ||
        static_cast<std::size_t>(made) != filled) {
      return false;
    }
    std::memcpy(last_block_.data(), out.data() + filled - kBlockBytes, kBlockBytes);
    filled = 0;
  } while (!bytes.empty());
  *tag = last_block_;
  return true;
}

bool Seal::matches(std::uint64_t sequence, std::span<const std::byte> bytes, const Tag& tag) const noexcept {
  Tag expected{};
  return this->tag(sequence, bytes, &expected) && CRYPTO_memcmp(expected.data(), tag.data(), tag.size()) == 0;
}

}  // namespace ferry::net::ucx
