#ifndef FERRY_NET_UCX_SODIUM_HPP
#define FERRY_NET_UCX_SODIUM_HPP

namespace ferry::net::ucx {

/// SipHash-2-4 of libsodium, with a result of 16 bytes and a key of 16: `crypto_shorthash_siphashx24` (its
/// documentation, "Short-input hashing"). Returns 0.
using SodiumSipHash = int (*)(unsigned char* out, const unsigned char* in, unsigned long long num_bytes,
                              const unsigned char* key);

/// Null if libsodium is not installed. Loaded once; any thread may call this.
SodiumSipHash sodium_siphash() noexcept;

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SODIUM_HPP
