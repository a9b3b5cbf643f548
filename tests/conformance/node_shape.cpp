#include "conformance/node_shape.hpp"

#include <fmt/format.h>

#include <cstdlib>

namespace ferry::test {
namespace {

/// Called in a rank's process before it creates its group.
void take_shared_memory_only() {
  setenv("UCX_TLS", "posix,sysv,self", 1);
  setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
  setenv("UCX_SYSV_ERROR_HANDLING", "y", 1);
}

}  // namespace

GroupOptions NodeShape::options() const {
  return {.backend = "cpu",
          .ranks_per_node = ranks_per_node,
          .arena_bytes = std::size_t{1} << 30,
          .timeout_ns = 40 * kNsPerSecond,
          .transport = transport,
          .verify = verify};
}

std::vector<NodeShape> node_shapes() {
  std::vector<NodeShape> all;
  for (const char* transport : {"loopback", "ucx"}) {
    for (const auto& [num_nodes, ranks_per_node] :
         std::initializer_list<std::pair<int, int>>{{1, 1}, {1, 8}, {2, 1}, {2, 2}, {2, 4}, {4, 2}, {3, 3}, {8, 1}}) {
      all.push_back({num_nodes, ranks_per_node, transport});
    }
  }
  return all;
}

void PrintTo(const NodeShape& shape, std::ostream* out) {
  *out << shape.num_nodes << "x" << shape.ranks_per_node << " over " << shape.transport
       << (shape.over_shared_memory ? " with shared memory" : "") << (shape.verify ? ", verified" : "");
}

std::string shape_name(const testing::TestParamInfo<NodeShape>& info) {
  return fmt::format("{}x{}_{}{}_{}{}", info.param.num_nodes, info.param.ranks_per_node, info.param.transport,
                     info.param.over_shared_memory ? "_shared_memory" : "",
                     info.param.kind() == RankKind::kThreads ? "threads" : "processes",
                     info.param.verify ? "_verify" : "");
}

PreparedCase prepare_on(const NodeShape& shape, ExchangeCase spec) {
  spec.world.num_ranks = shape.num_ranks();
  spec.world.ranks_per_node = shape.ranks_per_node;
  return prepare(spec);
}

void run_on_nodes(const NodeShape& shape, const std::function<void(RankContext&, Group&)>& body) {
  run_ranks({shape.kind(), shape.num_ranks()}, [&](RankContext& context) {
    if (shape.over_shared_memory) take_shared_memory_only();
    auto group = Group::create(context.bootstrap(), shape.options());
    if (!context.expect_ok(group.status(), "Group::create")) return;
    for (const RailUsage& rail : (*group)->network_usage().rails) {
      context.expect(!shape.over_shared_memory || rail.route.find("memory") != std::string::npos,
                     "the route is expected over shared memory, got " + rail.route);
    }
    body(context, **group);
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

}  // namespace ferry::test
