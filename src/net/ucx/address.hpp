#ifndef FERRY_NET_UCX_ADDRESS_HPP
#define FERRY_NET_UCX_ADDRESS_HPP

/// The engine's own part of what an end publishes (net/blob.hpp). Little-endian, no padding:
///
///   bytes      field
///   16         name of the end: random
///   32         its X25519 public key
///   8          where its memory begins
///   8, 8       where its GPU memory begins, and bytes of it
///   then for peers of its host, and for peers of other hosts:
///   4, …       length and bytes of its worker's address, as UCX packs it; empty where it expects no such peer
///   4, …       length and bytes of the key to its memory; empty where peers cannot write there
///   4, …       the same of its GPU memory
///   4, …       length and bytes of its receiver's address; empty where it has none

#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/status.hpp"
#include "net/blob.hpp"
#include "net/ucx/seal.hpp"
#include "net/ucx/setup.hpp"

namespace ferry::net::ucx {

/// Views into what was published.
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
  std::array<ScopeAddress, kNumScopes> scopes{};

  const ScopeAddress& at(Scope scope) const { return scopes[static_cast<std::size_t>(scope)]; }
};

Blob encode_address(const EndAddress& address);

/// @errors kTransport
Result<EndAddress> parse_address(std::span<const std::byte> own_part);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_ADDRESS_HPP
