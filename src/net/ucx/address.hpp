#ifndef FERRY_NET_UCX_ADDRESS_HPP
#define FERRY_NET_UCX_ADDRESS_HPP

/// Part of the published blob that this engine adds (net/blob.hpp). Little-endian, no padding:
///
///   bytes      field
///   16         name of the end: random
///   32         its X25519 public key
///   8          first address of its memory
///   8, 8       first address of its GPU memory, and its size in bytes
///   4          1 if peers read back what they write there (EngineOptions::read_back_gpu_writes), else 0
///   then for peers of its host, and again for peers of other hosts:
///   4, …       length and bytes of its worker's address, as UCX packs it; empty: the end expects no such peer
///   4, …       length and bytes of the key to its memory; empty: peers cannot write there
///   4, …       the same for its GPU memory
///   4, …       length and bytes of its receiver's address; empty: it has no receiver

#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/status.hpp"
#include "net/blob.hpp"
#include "net/ucx/seal.hpp"
#include "net/ucx/setup.hpp"

namespace ferry::net::ucx {

/// Views into the published blob.
struct ScopeAddress {
  std::span<const std::byte> worker;
  std::span<const std::byte> memory_key;
  std::span<const std::byte> gpu_key{};
  std::span<const std::byte> receiver{};
};

struct EndAddress {
  Token name{};
  PublicKey public_key{};
  std::uint64_t memory_base = 0;
  std::uint64_t gpu_base = 0;
  std::uint64_t gpu_bytes = 0;
  bool read_back_gpu_writes = false;
  std::array<ScopeAddress, kNumScopes> scopes{};

  const ScopeAddress& at(Scope scope) const { return scopes[static_cast<std::size_t>(scope)]; }
};

Blob encode_address(const EndAddress& address);

/// @errors kTransport
Result<EndAddress> parse_address(std::span<const std::byte> own_part);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_ADDRESS_HPP
