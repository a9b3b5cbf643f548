#ifndef FERRY_TESTS_GPU_ONE_SIDED_CASE_HPP
#define FERRY_TESTS_GPU_ONE_SIDED_CASE_HPP

/// Parts shared by tests of the one-sided layer on GPUs.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "ferry/one_sided.hpp"
#include "gpu/gpu_group.hpp"
#include "gpu/on_device.hpp"
#include "support/device_memory.hpp"

namespace ferry::test {

struct OneSidedShape {
  int num_ranks;
  int ranks_per_node;
  RankKind kind = RankKind::kThreads;
  const char* transport = "loopback";
};

inline std::string describe(const OneSidedShape& shape) {
  return fmt::format("{}_ranks_{}_a_node_{}_{}", shape.num_ranks, shape.ranks_per_node, shape.transport,
                     kind_name(shape.kind));
}
inline void PrintTo(const OneSidedShape& shape, std::ostream* out) { *out << describe(shape); }

inline OneSidedOptions options_of(const OneSidedShape& shape) {
  return {.backend = "cuda",
          .heap_bytes = std::size_t{16} << 20,
          .ranks_per_node = shape.ranks_per_node,
          .transport = shape.transport,
          .timeout_ns = 30 * kNsPerSecond};
}

/// Error of the stream's work so far.
inline Status finish(OneSided& shm, Stream stream) {
  synchronize(stream);
  return shm.poll_errors();
}

/// Runs a stream's first kernel before kernels of other ranks on a shared GPU wait for it.
inline void warm_up(RankContext& context, OneSided& shm, Stream stream) {
  context.expect_ok(shm.quiet(stream), "quiet");
  context.expect_ok(finish(shm, stream), "quiet");
  meet(context);
}

/// Counts errors of kernels.
class ErrorCount {
 public:
  int* data() const { return static_cast<int*>(memory_.data()); }
  int read() const {
    std::vector<int> count(1);
    memory_.read(count);
    return count[0];
  }

 private:
  OnDevice<int> memory_{std::vector<int>{0}};
};

/// Runs a body on the ranks of a OneSided on GPUs.
class OneSidedOnGpus : public testing::TestWithParam<OneSidedShape> {
 protected:
  static void run(const std::function<void(RankContext&, OneSided&)>& body) {
    run_gpu_ranks({GetParam().kind, GetParam().num_ranks}, [&](RankContext& context) {
      auto shm = OneSided::create(context.bootstrap(), options_of(GetParam()));
      if (!context.expect_ok(shm.status(), "OneSided::create")) return;
      body(context, **shm);
      context.expect_ok((*shm)->destroy(), "destroy");
    });
  }
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_ONE_SIDED_CASE_HPP
