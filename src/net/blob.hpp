#ifndef FERRY_NET_BLOB_HPP
#define FERRY_NET_BLOB_HPP

/// Prefix of every engine's blob, and the one parser of blobs. Little-endian, no padding:
///
///   bytes  field
///   4      magic "FNB1"
///   8      checksum of everything after it: detects truncation and corruption, not forgery
///   16     engine name, zero-padded
///   8      bytes of memory
///   4 4 4  index of the end, number of peers, number of channels
///   …      the engine's own part

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "ferry/status.hpp"
#include "net/engine.hpp"

namespace ferry::net {

/// Globally unique name of one end of one network.
using Token = std::array<std::byte, 16>;

/// @errors kSystem
Result<Token> make_token();

/// @errors kInternal: longer than kMaxBlobBytes
Result<Blob> make_blob(std::string_view engine, const EngineOptions& options, std::span<const std::byte> own_part);

/// Checks that the blob of `peer` fits this end: same engine, same memory size, same numbers of peers and channels, and
/// the expected index. Returns the engine's own part, a view into `blob`.
/// @errors kTransport, with the peer
Result<std::span<const std::byte>> parse_blob(std::span<const std::byte> blob, std::string_view engine,
                                              const EngineOptions& options, int peer);

/// Reads values from the front of untrusted bytes. After a read past the end, ok() stays false and every read returns
/// zero or an empty view.
class BlobReader {
 public:
  explicit BlobReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  std::uint32_t u32() { return static_cast<std::uint32_t>(integer(4)); }
  std::uint64_t u64() { return integer(8); }
  std::span<const std::byte> bytes(std::size_t count);
  bool ok() const { return ok_; }
  /// True if all bytes were read and no read went past the end.
  bool finished() const { return ok_ && rest_.empty(); }
  std::span<const std::byte> rest() const { return rest_; }

 private:
  std::uint64_t integer(std::size_t num_bytes);

  std::span<const std::byte> rest_;
  bool ok_ = true;
};

class BlobWriter {
 public:
  void u32(std::uint32_t value) { integer(value, 4); }
  void u64(std::uint64_t value) { integer(value, 8); }
  void bytes(std::span<const std::byte> bytes) { blob_.insert(blob_.end(), bytes.begin(), bytes.end()); }
  const Blob& blob() const { return blob_; }

 private:
  void integer(std::uint64_t value, std::size_t num_bytes) {
    for (std::size_t i = 0; i < num_bytes; ++i) blob_.push_back(static_cast<std::byte>((value >> (8 * i)) & 0xff));
  }

  Blob blob_;
};

}  // namespace ferry::net

#endif  // FERRY_NET_BLOB_HPP
