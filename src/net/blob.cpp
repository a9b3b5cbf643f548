#include "net/blob.hpp"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace ferry::net {
namespace {

constexpr std::uint32_t kMagic = 0x31'42'4e'46;  // "FNB1"
constexpr std::size_t kNameBytes = 16;

/// FNV-1a, 64 bits.
std::uint64_t checksum(std::span<const std::byte> bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::byte byte : bytes) hash = (hash ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001b3;
  return hash;
}

std::array<std::byte, kNameBytes> padded(std::string_view name) {
  std::array<std::byte, kNameBytes> field{};
  std::memcpy(field.data(), name.data(), std::min(name.size(), kNameBytes));
  return field;
}

std::string readable(std::span<const std::byte> name) {
  std::string text;
  for (const std::byte byte : name) {
    const char letter = static_cast<char>(byte);
    if (letter == '\0') break;
    text += letter >= ' ' && letter <= '~' ? letter : '?';
  }
  return text;
}

Status refuse(int rank, std::string_view what) {
  return Status(ErrorCode::kTransport,
                fmt::format("network: rank {} published an unusable address: {}; run the same build with the same "
                            "options on every rank",
                            rank, what),
                rank);
}

}  // namespace

Result<Token> make_token() {
  Token token{};
  std::span<std::byte> room = token;
  while (!room.empty()) {
    const ssize_t got = getrandom(room.data(), room.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return Status(ErrorCode::kSystem, fmt::format("network: getrandom failed: {}", std::strerror(errno)));
    }
    room = room.subspan(static_cast<std::size_t>(got));
  }
  return token;
}

Result<Blob> make_blob(std::string_view engine, const EngineOptions& options, std::span<const std::byte> own_part) {
  BlobWriter body;
  body.bytes(padded(engine));
  body.u64(options.memory.size());
  body.u32(static_cast<std::uint32_t>(options.self));
  body.u32(static_cast<std::uint32_t>(options.num_peers));
  body.u32(static_cast<std::uint32_t>(options.num_channels));
  body.bytes(own_part);
  BlobWriter whole;
  whole.u32(kMagic);
  whole.u64(checksum(body.blob()));
  whole.bytes(body.blob());
  if (whole.blob().size() > kMaxBlobBytes) {
    return Status(ErrorCode::kInternal, fmt::format("network engine {}: its address has {} bytes, expected at most {}; "
                                                    "please report this bug",
                                                    engine, whole.blob().size(), kMaxBlobBytes));
  }
  return whole.blob();
}

Result<std::span<const std::byte>> parse_blob(std::span<const std::byte> blob, std::string_view engine,
                                              const EngineOptions& options, int peer) {
  const int rank = options.rank_of(peer);
  if (blob.size() > kMaxBlobBytes) {
    return refuse(rank, fmt::format("{} bytes, expected at most {}", blob.size(), kMaxBlobBytes));
  }
  BlobReader reader(blob);
  if (reader.u32() != kMagic) return refuse(rank, fmt::format("{} bytes without the magic \"FNB1\"", blob.size()));
  const std::uint64_t expected_checksum = reader.u64();
  if (!reader.ok() || checksum(reader.rest()) != expected_checksum) {
    return refuse(rank, fmt::format("{} bytes that were truncated or corrupted in transit", blob.size()));
  }
  const std::span<const std::byte> name = reader.bytes(kNameBytes);
  const std::uint64_t memory_bytes = reader.u64();
  const std::uint32_t index = reader.u32();
  const std::uint32_t num_peers = reader.u32();
  const std::uint32_t num_channels = reader.u32();
  if (!reader.ok()) return refuse(rank, fmt::format("it is truncated after {} bytes", blob.size()));
  if (!std::ranges::equal(name, padded(engine))) {
    return refuse(rank, fmt::format("it is for the engine \"{}\", expected \"{}\"", readable(name), engine));
  }
  if (memory_bytes != options.memory.size()) {
    return refuse(rank,
                  fmt::format("{} bytes of memory, expected {} as on this rank", memory_bytes, options.memory.size()));
  }
  if (index != static_cast<std::uint32_t>(peer) || num_peers != static_cast<std::uint32_t>(options.num_peers) ||
      num_channels != static_cast<std::uint32_t>(options.num_channels)) {
    return refuse(rank, fmt::format("it is end {} of {} with {} channels, expected end {} of {} with {}", index,
                                    num_peers, num_channels, peer, options.num_peers, options.num_channels));
  }
  return reader.rest();
}

std::span<const std::byte> BlobReader::bytes(std::size_t count) {
  if (!ok_ || count > rest_.size()) {
    ok_ = false;
    return {};
  }
  const std::span<const std::byte> taken = rest_.first(count);
  rest_ = rest_.subspan(count);
  return taken;
}

std::uint64_t BlobReader::integer(std::size_t num_bytes) {
  std::uint64_t value = 0;
  const std::span<const std::byte> taken = bytes(num_bytes);
  for (std::size_t i = 0; i < taken.size(); ++i) value |= std::to_integer<std::uint64_t>(taken[i]) << (8 * i);
  return value;
}

}  // namespace ferry::net
