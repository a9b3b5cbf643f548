/// `num_sms` bounds the blocks of every kernel that a call launches, in every kind of call.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>

#include "ferry/launches.hpp"
#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;

/// Size of the largest launch since the last reset, by any thread.
std::atomic<int> most_blocks{0};
std::atomic<int> num_launches{0};

void observe(const KernelLaunch& launch) {
  int seen = most_blocks.load();
  while (seen < launch.num_blocks && !most_blocks.compare_exchange_weak(seen, launch.num_blocks)) {
  }
  ++num_launches;
}

class ObservedLaunches {
 public:
  ObservedLaunches() {
    most_blocks = 0;
    num_launches = 0;
    observe_launches(observe);
  }
  ~ObservedLaunches() { observe_launches(nullptr); }
  ObservedLaunches(const ObservedLaunches&) = delete;
  ObservedLaunches& operator=(const ObservedLaunches&) = delete;
};

/// A case with tokens for more blocks than any bound here, rows without a token to fill, and scales to unpack.
PreparedCase big_case(Layout layout, MemoryKind memory) {
  ExchangeCase one;
  one.name = fmt::format("layout {}, memory {}", static_cast<int>(layout), static_cast<int>(memory));
  one.world = {.num_ranks = kNumRanks, .num_topk = 4, .num_experts = 16, .max_tokens = 2000};
  one.world.layout = layout;
  one.world.expert_alignment = 8;
  one.world.spare_slab_rows = 2;
  one.memory = memory;
  one.dispatches = {{.hidden = 64, .num_scales = 3, .zero_padding = true}};
  one.combines = {{.hidden = 64, .weighted = true, .return_weights = true}};
  return prepare(one);
}

/// Bounds passed to the calls.
struct Bounds {
  int route = 0;
  int kernel = 0;
  std::int64_t max_tokens = 0;  ///< RouteOptions::max_tokens; 0: value of the case
};

void run_calls(RankContext& context, Group& group, const PreparedCase& prepared, const Bounds& bounds) {
  const RouteArguments arguments(context, group, prepared);
  DispatchTensors sent(context, group, prepared, 0);
  CombineTensors returned(context, group, prepared, 0);
  sent.options.kernel.num_sms = returned.options.kernel.num_sms = bounds.kernel;
  RouteOptions options = arguments.options();
  options.num_sms = bounds.route;
  if (bounds.max_tokens > 0) options.max_tokens = bounds.max_tokens;
  const Stream stream = stream_of(group);
  const auto routing = group.route(arguments.input(), options, stream);
  if (!context.expect_ok(routing.status(), "route")) return;
  context.expect_ok(group.dispatch(*routing, sent.in, sent.out, stream, sent.options), "dispatch");
  context.expect_ok(group.combine(*routing, returned.in, returned.out, stream, returned.options), "combine");
  context.expect_ok(group.wait(stream), "wait");
  expect_routing(context, group, *routing, prepared);
  sent.expect_received(context, "dispatch: ");
  returned.expect_received(context, "combine: ");
}

TEST(NumSms, BoundsEveryLaunchOfACall) {
  for (const Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab})
    for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
      const PreparedCase prepared = big_case(layout, memory);
      for (const int num_sms : {2, 5}) {
        SCOPED_TRACE(fmt::format("{}, {} multiprocessors", prepared.spec.name, num_sms));
        const ObservedLaunches launches;
        run_gpu_group(RankKind::kThreads, kNumRanks, [&](RankContext& context, Group& group) {
          run_calls(context, group, prepared, {num_sms, num_sms});
        });
        EXPECT_LE(most_blocks.load(), num_sms);
        EXPECT_GE(num_launches.load(), kNumRanks * 3) << "route, dispatch and combine of each rank";
      }
    }
}

/// Two nodes of one rank each, where calls need at least three multiprocessors. Hosts make the routes, or kernels do if
/// there can be no more rows than the slabs have.
TEST(NumSms, BoundsCallsOverNodesWhoseDefaultIsFew) {
  constexpr int kDefault = 24;
  for (const Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab})
    for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
      ExchangeCase spec = big_case(layout, memory).spec;
      spec.world.ranks_per_node = 1;
      const PreparedCase prepared = prepare(spec);
      for (const int num_sms : {0, 3, 40}) {
        SCOPED_TRACE(fmt::format("{}, {} multiprocessors", spec.name, num_sms));
        const ObservedLaunches launches;
        run_gpu_ranks({RankKind::kThreads, kNumRanks}, [&](RankContext& context) {
          GroupOptions options = gpu_group_options();
          options.ranks_per_node = 1;
          options.transport = "loopback";
          const auto group = Group::create(context.bootstrap(), options);
          if (!context.expect_ok(group.status(), "Group::create")) return;
          const std::int64_t max_tokens = layout == Layout::kSlab ? spec.world.max_tokens : 0;
          run_calls(context, **group, prepared, {num_sms, num_sms, max_tokens});
          context.expect_ok((*group)->destroy(), "destroy");
        });
        EXPECT_LE(most_blocks.load(), num_sms == 0 ? kDefault : num_sms);
        EXPECT_GE(num_launches.load(), kNumRanks * 3) << "route, dispatch and combine of each rank";
      }
    }
}

TEST(NumSms, IsNotBoundedByDefaultOnOneNode) {
  const PreparedCase prepared = big_case(Layout::kExperts, MemoryKind::kPlain);
  const ObservedLaunches launches;
  run_gpu_group(RankKind::kThreads, kNumRanks,
                [&](RankContext& context, Group& group) { run_calls(context, group, prepared, {}); });
  EXPECT_GT(most_blocks.load(), 5);
}

/// Settings for every dispatch and combine of groups of `num_ranks` on GPUs like the first one.
std::string tuning_text(int num_ranks, int num_sms) {
  cudaDeviceProp properties{};
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  std::string entries;
  for (const char* operation : {"dispatch", "combine"})
    for (const char* staged : {"true", "false"}) {
      entries += fmt::format(
          R"({}{{"operation": "{}", "layout": "tokens", "staged": {}, "min_tokens": 0, "max_tokens": 1000000,)"
          R"( "min_row_bytes": 0, "max_row_bytes": 1000000, "num_sms": {}, "num_copy_sms": 0, "chunk_tokens": 0}})",
          entries.empty() ? "" : ", ", operation, staged, num_sms);
    }
  return fmt::format(R"({{"ferry_tuning": 2, "tables": [{{"gpu": "{}", "num_ranks": {}, "entries": [{}]}}]}})",
                     properties.name, num_ranks, entries);
}

TEST(NumSms, ComesFromTheGroupsTuningFileWhereTheCallLeavesItOpen) {
  constexpr int kTuned = 3;
  ExchangeCase one = big_case(Layout::kTokens, MemoryKind::kPlain).spec;
  one.dispatches = {{.hidden = 64, .num_scales = 3, .ask_tables = false}};  // one kernel
  const PreparedCase prepared = prepare(one);
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("ferry-num-sms-{}.json", getpid())).string();
  for (const int num_ranks : {kNumRanks, kNumRanks + 1}) {
    std::ofstream(path) << tuning_text(num_ranks, kTuned);
    const ObservedLaunches launches;
    run_gpu_ranks({RankKind::kThreads, kNumRanks}, [&](RankContext& context) {
      GroupOptions options = gpu_group_options();
      options.tuning_file = path;
      const auto group = Group::create(context.bootstrap(), options);
      if (!context.expect_ok(group.status(), "Group::create")) return;
      run_calls(context, **group, prepared, {.route = kTuned});
      context.expect_ok((*group)->destroy(), "destroy");
    });
    if (num_ranks == kNumRanks) {
      EXPECT_LE(most_blocks.load(), kTuned);
    } else {
      EXPECT_GT(most_blocks.load(), kTuned) << "the file is for more ranks";
    }
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace ferry::test
