#include "bootstrap/auth.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

namespace ferry::bootstrap {

Status fill_random(std::span<std::byte> out) {
  if (RAND_bytes(reinterpret_cast<unsigned char*>(out.data()), static_cast<int>(out.size())) == 1) return {};
  return Status(ErrorCode::kSystem,
                "bootstrap: libcrypto's RAND_bytes gave no random bytes; is /dev/urandom readable?");
}

Result<Digest> hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data) {
  Digest digest{};
  unsigned int digest_bytes = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(data.data()),
           data.size(), reinterpret_cast<unsigned char*>(digest.data()), &digest_bytes);
  if (made == nullptr || digest_bytes != digest.size()) {
    return Status(ErrorCode::kSystem, "bootstrap: libcrypto could not compute HMAC-SHA-256");
  }
  return digest;
}

bool equal_in_constant_time(const Digest& a, const Digest& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace ferry::bootstrap
