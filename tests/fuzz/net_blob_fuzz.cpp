/// Blobs that network ends publish (net/blob.hpp), and an engine's parsing of its own part.
///
/// Input: self, peers, channels, peer (4 x u8), bytes of memory (u16), a change (u16 position, u8 bits), then bytes
/// that are used three times: as a blob, as the contents after a valid checksum, and as an engine's own part.

#include <array>
#include <vector>

#include "fuzz_target.hpp"
#include "input_reader.hpp"
#include "net/blob.hpp"

namespace ferry::test {
namespace {

using namespace net;

constexpr std::string_view kEngine = "ucx";
constexpr std::size_t kMaxPeers = 8;
// Room for an error message with some numbers in it.
constexpr std::size_t kMessageRoomBytes = 512;

std::array<std::byte, 0x10000> memory;

/// Independent of the parser, which must accept checksums computed by other code.
std::vector<std::byte> with_good_checksum(std::span<const std::byte> body) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const std::byte byte : body) {
    hash ^= std::to_integer<std::uint64_t>(byte);
    hash *= 1099511628211ULL;
  }
  std::vector<std::byte> blob;
  for (const char letter : std::string_view("FNB1")) blob.push_back(static_cast<std::byte>(letter));
  for (unsigned shift = 0; shift < 64; shift += 8) blob.push_back(static_cast<std::byte>((hash >> shift) & 0xff));
  blob.insert(blob.end(), body.begin(), body.end());
  return blob;
}

/// Copy in memory of its own, so that the sanitizer detects an access beyond the end.
std::vector<std::byte> copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// Reads an engine's part as the engine does: numbers, and ranges preceded by their lengths.
void fuzz_own_part(std::span<const std::byte> own_part) {
  BlobReader reader(own_part);
  BlobWriter writer;
  Token token{};
  const std::span<const std::byte> token_bytes = reader.bytes(token.size());
  writer.bytes(token_bytes);
  const std::uint64_t base = reader.u64();
  writer.u64(base);
  for (int range = 0; range < 2; ++range) {
    const std::uint32_t announced = reader.u32();
    const bool readable = reader.ok();
    const std::size_t before = reader.rest().size();
    const std::span<const std::byte> taken = reader.bytes(announced);
    require(reader.ok() == (readable && announced <= before), "an announced range exists or is refused");
    require(taken.size() == (reader.ok() ? announced : 0), "a range is whole or empty");
    require(taken.empty() ||
                (taken.data() >= own_part.data() && taken.data() + taken.size() <= own_part.data() + own_part.size()),
            "a range is inside the engine's part");
    writer.u32(announced);
    writer.bytes(taken);
  }
  if (reader.finished()) {
    require(same_bytes(writer.blob(), own_part), "a part read to its end has one encoding");
  }
  if (!reader.ok()) {
    require(reader.u64() == 0 && reader.bytes(0).empty() && !reader.ok(), "a reader that ran out stays not ok");
  }
}

void fuzz_blob(std::span<const std::byte> blob, EngineOptions options, int peer) {
  const AllocationWatch watch;
  const Result<std::span<const std::byte>> own_part = parse_blob(blob, kEngine, options, peer);
  require(watch.largest_bytes() <= kMessageRoomBytes, "parsing a blob does not allocate");
  if (!own_part.ok()) {
    require_refusal(own_part.status(), ErrorCode::kTransport);
    require(own_part.status().peer() == options.rank_of(peer), "a refusal names the rank");
    return;
  }
  require(blob.size() <= kMaxBlobBytes, "a blob has a maximum length");
  require(own_part->data() + own_part->size() == blob.data() + blob.size() && own_part->size() <= blob.size(),
          "the own part is the end of the blob");
  options.self = peer;
  const Result<Blob> again = make_blob(kEngine, options, *own_part);
  require(again.ok() && same_bytes(*again, blob), "an accepted blob has one encoding");
  fuzz_own_part(*own_part);
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  EngineOptions options;
  options.self = reader.take<std::uint8_t>();
  options.num_peers = 1 + static_cast<int>(reader.take<std::uint8_t>() % kMaxPeers);
  options.num_channels = reader.take<std::uint8_t>();
  const int peer = reader.take<std::uint8_t>() % options.num_peers;
  options.memory = std::span(memory).first(reader.take<std::uint16_t>());
  for (int index = 0; index < options.num_peers; ++index) options.ranks.push_back(3 * index + 1);
  const std::size_t position = reader.take<std::uint16_t>();
  const std::byte bits{reader.take<std::uint8_t>()};
  const std::span<const std::byte> bytes = reader.take_at_most(input.size());

  fuzz_blob(copy_of(bytes), options, peer);
  fuzz_blob(with_good_checksum(bytes), options, peer);
  fuzz_own_part(copy_of(bytes));

  EngineOptions theirs = options;
  theirs.self = peer;
  Result<Blob> published = make_blob(kEngine, theirs, bytes);
  if (!published.ok()) {
    require_refusal(published.status(), ErrorCode::kInternal);
    return;
  }
  const Result<std::span<const std::byte>> read = parse_blob(*published, kEngine, options, peer);
  require(read.ok() && same_bytes(*read, bytes), "each end reads the blob that the other publishes");
  require(!parse_blob(*published, "loopback", options, peer).ok(), "an engine does not read another's blob");
  // Every step of the checksum maps different states to different states: one changed byte is always detected.
  (*published)[position % published->size()] ^= bits;
  require(parse_blob(*published, kEngine, options, peer).ok() == (bits == std::byte{0}), "a changed blob never parses");
}

}  // namespace ferry::test
