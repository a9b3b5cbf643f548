#include "net/ucx/address.hpp"

#include <algorithm>

namespace ferry::net::ucx {

Blob encode_address(const EndAddress& address) {
  BlobWriter writer;
  writer.bytes(address.name);
  writer.bytes(address.public_key);
  writer.u64(address.memory_base);
  writer.u64(address.gpu_base);
  writer.u64(address.gpu_bytes);
  writer.u32(address.read_back_gpu_writes ? 1 : 0);
  for (const ScopeAddress& scope : address.scopes) {
    for (const std::span<const std::byte> part : {scope.worker, scope.memory_key, scope.gpu_key, scope.receiver}) {
      writer.u32(static_cast<std::uint32_t>(part.size()));
      writer.bytes(part);
    }
  }
  return writer.blob();
}

Result<EndAddress> parse_address(std::span<const std::byte> own_part) {
  BlobReader reader(own_part);
  EndAddress address;
  std::ranges::copy(reader.bytes(address.name.size()), address.name.begin());
  std::ranges::copy(reader.bytes(address.public_key.size()), address.public_key.begin());
  address.memory_base = reader.u64();
  address.gpu_base = reader.u64();
  address.gpu_bytes = reader.u64();
  const std::uint32_t read_back = reader.u32();
  address.read_back_gpu_writes = read_back == 1;
  for (ScopeAddress& scope : address.scopes) {
    scope.worker = reader.bytes(reader.u32());
    scope.memory_key = reader.bytes(reader.u32());
    scope.gpu_key = reader.bytes(reader.u32());
    scope.receiver = reader.bytes(reader.u32());
  }
  if (!reader.finished() || read_back > 1) {
    return Status(ErrorCode::kTransport,
                  "network engine ucx: an address of another format; run the same build on every rank");
  }
  return address;
}

}  // namespace ferry::net::ucx
