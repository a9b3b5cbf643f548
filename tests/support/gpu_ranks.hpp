#ifndef FERRY_TESTS_GPU_RANKS_HPP
#define FERRY_TESTS_GPU_RANKS_HPP

/// Ranks that work on GPUs, several on each GPU if there are more ranks than GPUs. Rank processes start CUDA after the
/// fork; rank threads start it in this process. A test program can therefore fork ranks only before its first rank
/// threads, and tests of the two kinds run in separate calls (--gtest_filter).

#include "support/rank_runner.hpp"

namespace ferry::test {

/// GPU of a rank. Call it only inside ranks.
int device_of_rank(int rank);

/// Same as collect_rank_failures and run_ranks; every rank has entered its GPU when `body` begins.
std::vector<std::string> collect_gpu_rank_failures(const RankRun& run, const RankBody& body);
void run_gpu_ranks(const RankRun& run, const RankBody& body);

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_RANKS_HPP
