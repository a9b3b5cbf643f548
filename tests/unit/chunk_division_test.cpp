#include "cuda/internode/chunk_division.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ferry::cuda {
namespace {

std::vector<ItemChunk> chunks_of(const ChunkDivision::Params& params) {
  const ChunkDivision division(params);
  std::vector<ItemChunk> chunks;
  for (std::int64_t i = 0; i < division.num_chunks(); ++i) chunks.push_back(division.at(i));
  return chunks;
}

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(ChunkDivision, BringsEachByteOfEachItemOnceAndInOrder) {
  for (const std::size_t chunk_bytes : {std::size_t{1024}, kMiB / 8, kMiB}) {
    for (const std::int64_t item_bytes : {16, 7456, 14624, 40000}) {
      for (const std::int64_t num_items : {0, 1, 5, 73, 512, 1500}) {
        for (const int chunk_items : {0, 7, 64, 1 << 20}) {
          SCOPED_TRACE(testing::Message()
                       << chunk_bytes << " " << item_bytes << " " << num_items << " " << chunk_items);
          const auto chunks = chunks_of({num_items, item_bytes, chunk_bytes, chunk_items});
          std::int64_t first = 0;
          std::int64_t begin = 0;
          for (const ItemChunk& chunk : chunks) {
            ASSERT_EQ(chunk.first, first);
            ASSERT_EQ(chunk.begin, begin);
            ASSERT_GT(chunk.num_items, 0);
            ASSERT_LE(static_cast<std::size_t>(chunk.num_items * (chunk.end - chunk.begin)) + rail::kChunkHeaderBytes,
                      chunk_bytes);
            ASSERT_LE(chunk.num_items, chunk_items > 0 ? chunk_items : num_items);
            first += chunk.num_items;
            if (first != num_items) continue;
            first = 0;
            begin = chunk.end;
          }
          ASSERT_EQ(first, 0);
          ASSERT_EQ(begin, num_items == 0 ? 0 : item_bytes);
        }
      }
    }
  }
}

TEST(ChunkDivision, BeginsAndEndsWithSmallChunks) {
  // 4,081 rows of 7,168 bf16 and their records in a ring in GPU memory.
  const auto chunks = chunks_of({.num_items = 4081, .item_bytes = 14400, .ring_chunk_bytes = kMiB});
  EXPECT_EQ(chunks.front().num_items, 72 / 8);
  EXPECT_EQ(chunks.back().num_items, 72 / 8);
  EXPECT_EQ(chunks[4].num_items, 72 / 4);
  EXPECT_EQ(chunks[8].num_items, 72 / 2);
  EXPECT_EQ(chunks[12].num_items, 72);
  const auto is_whole = [](const ItemChunk& chunk) { return chunk.num_items == 72; };
  EXPECT_GT(std::ranges::count_if(chunks, is_whole), 40);
}

TEST(ChunkDivision, IsEvenWhereChunksAreShort) {
  for (const ItemChunk& chunk : chunks_of({.num_items = 64, .item_bytes = 14400, .ring_chunk_bytes = kMiB})) {
    EXPECT_EQ(chunk.num_items, chunk.first == 63 ? 1 : 9);
  }
}

}  // namespace
}  // namespace ferry::cuda
