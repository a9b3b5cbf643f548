/// In which chunks a rank reports the rows that it stages for a combine.

#include "cuda/intranode/stage_chunks.hpp"

#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/intranode/tuning.hpp"

namespace ferry::cuda {
namespace {

TEST(StageChunks, CoverAnyNumberOfRowsInChunksUpToTheLimit) {
  for (const int most_rows : {1, 2, 7, 256, 1 << 30}) {
    for (int first_rows = 1; first_rows <= most_rows; first_rows = first_rows * 3 + 1) {
      const StageChunks chunks{first_rows, most_rows};
      for (const int num_rows : {0, 1, 2, 13, 132, 4096, 100'000}) {
        const int num_chunks = chunks.num_chunks(num_rows);
        std::int64_t before = 0;
        for (int chunk = 0; chunk < num_chunks && chunk < 200; ++chunk) {
          const std::int64_t end = chunks.end_row(chunk);
          EXPECT_GT(end, before);
          EXPECT_LE(end - before, most_rows);
          EXPECT_EQ(chunk + 1 == num_chunks, end >= num_rows) << first_rows << " " << most_rows << " " << num_rows;
          before = end;
        }
        EXPECT_LE(num_chunks, num_rows / most_rows + kMaxShortChunks);
      }
    }
  }
}

TEST(CombinePlan, TheFirstChunkIsWhatStagingBlocksCopyAtOnce) {
  for (const int num_ranks : {2, 4, 8}) {
    const CombinePlan plan = plan_combine({}, {.num_sms = 132, .num_ranks = num_ranks}, {.staged = true});
    EXPECT_GE(plan.first_chunk_rows * (num_ranks - 1), 8 * plan.num_stage_blocks);
    EXPECT_LE(plan.first_chunk_rows * (num_ranks - 1), 16 * plan.num_stage_blocks);
  }
}

}  // namespace
}  // namespace ferry::cuda
