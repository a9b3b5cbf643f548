#ifndef FERRY_BOOTSTRAP_AUTH_HPP
#define FERRY_BOOTSTRAP_AUTH_HPP

/// The cryptography the bootstrap uses, all of it libcrypto's.

#include <array>
#include <cstddef>
#include <span>

#include "ferry/status.hpp"

namespace ferry::bootstrap {

inline constexpr std::size_t kDigestBytes = 32;  ///< SHA-256
inline constexpr std::size_t kNonceBytes = 32;   ///< as many bits as the digest, so neither is the weaker part

using Digest = std::array<std::byte, kDigestBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;

/// @errors kSystem: the random generator has no entropy
Status fill_random(std::span<std::byte> out);

/// @errors kSystem: libcrypto failed (out of memory, or SHA-256 is disabled)
Result<Digest> hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> data);

/// Takes the same time wherever the two differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_AUTH_HPP
