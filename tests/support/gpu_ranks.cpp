#include "support/gpu_ranks.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>

#include "support/device_memory.hpp"

namespace ferry::test {
namespace {

/// Plain tensors of all ranks in a process. Rank processes share a GPU, so each takes less.
constexpr std::size_t kThreadsPoolBytes = std::size_t{4} << 30;
constexpr std::size_t kProcessPoolBytes = std::size_t{512} << 20;

/// Sets variables that CUDA reads when it starts. Streams that share one of its connections to the GPU wait for each
/// other, and so would ranks. Loading a kernel at its first use may wait for the whole device, which other ranks occupy
/// while they wait for this one.
void set_up_environment() {
  (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

}  // namespace

int device_of_rank(int rank) {
  const int num = num_devices();
  if (num == 0) throw std::runtime_error("CUDA finds no GPU");
  return rank % num;
}

std::vector<std::string> collect_gpu_rank_failures(const RankRun& run, const RankBody& body) {
  set_up_environment();  // before rank threads exist, and for rank processes to inherit
  return collect_rank_failures(run, [&](RankContext& context) {
    enter_device(device_of_rank(context.rank()),
                 run.kind == RankKind::kThreads ? kThreadsPoolBytes : kProcessPoolBytes);
    body(context);
  });
}

void run_gpu_ranks(const RankRun& run, const RankBody& body) {
  for (const std::string& text : collect_gpu_rank_failures(run, body)) ADD_FAILURE() << text;
}

}  // namespace ferry::test
