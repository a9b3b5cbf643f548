/// Chunks from a rail peer (rail/chunk_reader.hpp), as a sequence of exchanges: a receiver takes exactly the items that
/// both ends agreed on, in order, whatever the peer writes into earlier and later chunks.
///
/// Input: room of a chunk in units of 16 bytes (u8), then exchanges: items (u8), units of an item (u8), then chunks:
/// kind of the header (u8: correct, with a field changed, any bytes) with its data, then the way the chunk is used.

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "fuzz_target.hpp"
#include "input_reader.hpp"
#include "rail/chunk_reader.hpp"
#include "rail/rail_memory.hpp"

namespace ferry::test {
namespace {

using rail::ChunkHeader;
using rail::ChunkReader;
using rail::kChunkHeaderBytes;

constexpr std::size_t kAlignmentBytes = 16;
constexpr std::size_t kMaxUnits = 16;
constexpr std::int64_t kMaxItems = 63;
constexpr int kMaxExchanges = 4;
constexpr int kMaxRefusals = 8;
// Room for an error message with eight numbers in it.
constexpr std::size_t kMessageRoomBytes = 1024;

enum class Header : std::uint8_t { kGood = 0, kChanged = 1, kAny = 2 };
constexpr std::uint8_t kNumHeaders = 3;

struct Story {
  InputReader reader;
  std::size_t room_bytes;  // room of a chunk, without its header
  std::uint64_t chunk_idx = 0;
};

struct Progress {
  ChunkReader::Agreed agreed;
  std::int64_t num_used = 0;

  std::size_t used_bytes() const { return static_cast<std::size_t>(num_used) * agreed.item_bytes; }
  std::int64_t left() const { return agreed.num_items - num_used; }
};

/// Contents of all exchanges, one item after the other; no two units are equal.
std::span<const std::byte> stream() {
  static const std::vector<std::byte> bytes = [] {
    std::vector<std::byte> all((kMaxItems + kMaxUnits) * kMaxUnits * kAlignmentBytes);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] =
          static_cast<std::byte>(i % kAlignmentBytes < 2 ? i / kAlignmentBytes >> (8 * (i % kAlignmentBytes)) : i * 7);
    }
    return all;
  }();
  return bytes;
}

ChunkHeader draw_header(Story& story, const Progress& progress) {
  const auto kind = static_cast<Header>(story.reader.take<std::uint8_t>() % kNumHeaders);
  ChunkHeader header;
  if (kind == Header::kAny) {
    const auto bytes = story.reader.take_array<sizeof(header)>();
    std::memcpy(&header, bytes.data(), sizeof(header));
    return header;
  }
  const auto room = static_cast<std::int64_t>(story.room_bytes / progress.agreed.item_bytes);
  const std::int64_t most = std::min(progress.left(), room);
  header = {.chunk_idx = story.chunk_idx,
            .exchange_idx = progress.agreed.exchange_idx,
            .num_items = static_cast<std::uint32_t>(most - story.reader.take<std::uint8_t>() % most),
            .item_bytes = static_cast<std::uint32_t>(progress.agreed.item_bytes)};
  if (kind == Header::kGood) return header;
  const std::uint8_t field = story.reader.take<std::uint8_t>() % 4;
  const auto change = story.reader.take<std::uint64_t>();
  if (field == 0) header.chunk_idx += change;
  if (field == 1) header.exchange_idx += change;
  if (field == 2) header.num_items += static_cast<std::uint32_t>(change);
  if (field == 3) header.item_bytes += static_cast<std::uint32_t>(change);
  return header;
}

/// Returns true if the receiver may take the chunk, computed in numbers that cannot overflow.
bool is_agreed(const ChunkHeader& header, const Story& story, const Progress& progress) {
  __extension__ using Wide = unsigned __int128;
  return header.chunk_idx == story.chunk_idx && header.exchange_idx == progress.agreed.exchange_idx &&
         header.item_bytes == progress.agreed.item_bytes && header.num_items > 0 &&
         header.num_items <= static_cast<std::uint64_t>(progress.left()) &&
         Wide{header.num_items} * header.item_bytes <= story.room_bytes;
}

void require_items(std::span<const std::byte> items, const std::vector<std::byte>& chunk, const Progress& progress) {
  require(
      items.data() >= chunk.data() + kChunkHeaderBytes && items.data() + items.size() <= chunk.data() + chunk.size(),
      "items are inside their chunk");
  const std::size_t item_bytes = progress.agreed.item_bytes;
  require(items.size() % item_bytes == 0, "items are whole");
  require(static_cast<std::int64_t>(items.size() / item_bytes) <= progress.left(), "no more items than agreed on");
  require(same_bytes(items, stream().subspan(progress.used_bytes(), items.size())), "items are in order");
}

void use_chunk(Story& story, ChunkReader& in, std::vector<std::byte>& chunk, Progress& progress) {
  const std::size_t item_bytes = progress.agreed.item_bytes;
  // The peer can still write into the chunk.
  const auto scribble = story.reader.take_array<sizeof(ChunkHeader)>();
  std::copy(scribble.begin(), scribble.end(), chunk.begin());
  bool used_up = false;
  while (!used_up) {
    const std::span<const std::byte> items = in.front();
    require(!items.empty(), "a chunk that is not used up has items");
    require_items(items, chunk, progress);
    const auto num_items = static_cast<std::int64_t>(items.size() / item_bytes);
    const std::int64_t count = num_items - story.reader.take<std::uint8_t>() % num_items;
    used_up = in.pop(count);
    require(used_up == (count == num_items), "a chunk is used up with its last item");
    progress.num_used += count;
    require(in.all_used() == (progress.left() == 0), "an exchange ends with its last item");
  }
  require(in.front().empty() && !in.is_open(), "a chunk that is used up has no items");
  ++story.chunk_idx;
}

/// Returns false if the peer sent only chunks that were refused.
bool run_exchange(Story& story, std::uint64_t exchange_idx) {
  Progress progress;
  const std::size_t max_units = story.room_bytes / kAlignmentBytes;
  progress.agreed = {.exchange_idx = exchange_idx,
                     .num_items = story.reader.take<std::uint8_t>() % (kMaxItems + 1),
                     .item_bytes = kAlignmentBytes * (1 + story.reader.take<std::uint8_t>() % max_units)};
  ChunkReader in(progress.agreed);
  require(!in.is_open() && in.front().empty(), "there are no items before the first chunk");
  int num_refusals = 0;
  while (!in.all_used() && num_refusals < kMaxRefusals) {
    const ChunkHeader header = draw_header(story, progress);
    std::vector<std::byte> chunk(kChunkHeaderBytes + story.room_bytes);
    std::memcpy(chunk.data(), &header, sizeof(header));
    const std::span<const std::byte> items = stream().subspan(progress.used_bytes(), story.room_bytes);
    std::copy(items.begin(), items.end(), chunk.begin() + kChunkHeaderBytes);
    const AllocationWatch watch;
    const Status status = in.open(chunk, story.chunk_idx);
    require(watch.largest_bytes() <= kMessageRoomBytes, "reading a chunk does not allocate");
    require(status.ok() == is_agreed(header, story, progress), "exactly the chunks that were agreed on are taken");
    if (status.ok()) {
      require(in.front().size() == header.num_items * progress.agreed.item_bytes, "all of a chunk's items are there");
      use_chunk(story, in, chunk, progress);
      continue;
    }
    require_refusal(status, ErrorCode::kTransport);
    require(!in.is_open() && in.front().empty() && !in.all_used(), "nothing is read from a refused chunk");
    ++num_refusals;
  }
  return in.all_used();
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  const std::size_t room_bytes = kAlignmentBytes * (1 + reader.take<std::uint8_t>() % kMaxUnits);
  Story story{reader, room_bytes};
  for (int exchange = 1; exchange <= kMaxExchanges && !story.reader.empty(); ++exchange) {
    if (!run_exchange(story, static_cast<std::uint64_t>(exchange))) return;
  }
}

}  // namespace ferry::test
