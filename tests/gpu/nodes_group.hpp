#ifndef FERRY_TESTS_GPU_NODES_GROUP_HPP
#define FERRY_TESTS_GPU_NODES_GROUP_HPP

/// Groups of GPU ranks on several nodes, emulated on one host. Ranks are threads, with the loopback engine or UCX as
/// the network between them, or processes, with UCX.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "gpu/gpu_group.hpp"
#include "gpu/latency_group.hpp"

namespace ferry::test {

struct NodesShape {
  int num_nodes;
  int ranks_per_node;
  RankKind kind = RankKind::kThreads;
  const char* transport = "loopback";
  int num_ranks() const { return num_nodes * ranks_per_node; }
};

inline std::string describe(const NodesShape& shape) {
  return fmt::format("{}x{}_{}_{}", shape.num_nodes, shape.ranks_per_node, shape.transport, kind_name(shape.kind));
}
inline void PrintTo(const NodesShape& shape, std::ostream* out) { *out << describe(shape); }

inline GroupOptions options_of(const NodesShape& shape) {
  GroupOptions options = gpu_group_options();
  options.ranks_per_node = shape.ranks_per_node;
  options.transport = shape.transport;
  return options;
}

class GpuNodes : public testing::TestWithParam<NodesShape> {
 protected:
  static PreparedCase prepare_on_nodes(ExchangeCase spec) {
    spec.world.num_ranks = GetParam().num_ranks();
    spec.world.ranks_per_node = GetParam().ranks_per_node;
    return prepare(spec);
  }
  static std::vector<PreparedCase> random_cases(std::uint64_t seed, int count) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(GetParam().num_ranks()));
    std::vector<PreparedCase> cases;
    for (int i = 0; i < count; ++i) cases.push_back(prepare_on_nodes(draw_case(random, GetParam().num_ranks())));
    return cases;
  }
  /// `latency_cases`: cases of latency mode that the group makes.
  static void run(const std::function<void(RankContext&, Group&)>& body,
                  const std::vector<PreparedCase>& latency_cases = {}) {
    run_gpu_ranks({GetParam().kind, GetParam().num_ranks()}, [&](RankContext& context) {
      GroupOptions options = options_of(GetParam());
      if (!latency_cases.empty()) options.latency_bytes = latency_bytes_of("cuda", latency_cases);
      auto group = Group::create(context.bootstrap(), options);
      if (!context.expect_ok(group.status(), "Group::create")) return;
      body(context, **group);
      context.expect_ok((*group)->destroy(), "destroy");
    });
  }
  static void run_cases(const std::vector<PreparedCase>& cases) {
    run([&](RankContext& context, Group& group) {
      for (const PreparedCase& one : cases) check_case(context, group, one);
    });
  }
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_NODES_GROUP_HPP
