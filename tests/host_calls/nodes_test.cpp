/// Share of a GPU that calls over several nodes take: the blocks of every kernel that they launch.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/internode/steps.hpp"
#include "ferry/ferry.hpp"
#include "host_calls/counted_cuda.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;
/// Enough for more blocks than any bound here.
constexpr int kNumTokens = 2000;
constexpr int kHidden = 256;
constexpr int kNumTopk = 4;
constexpr int kNumExperts = 16;
constexpr int kSlabRows = 1024;
constexpr int kNumScales = kHidden / 128;
/// Default share of a call but those of latency mode. The GPU of these tests has more for each of the ranks that
/// share it.
constexpr int kMostSms = 24;

std::atomic<int> most_blocks{0};

void observe(const KernelLaunch& launch) {
  int seen = most_blocks.load();
  while (seen < launch.num_blocks && !most_blocks.compare_exchange_weak(seen, launch.num_blocks)) {
  }
}

/// A group of two nodes of one rank each, or of one node. No kernel ever runs, so one thread can make the calls of one
/// rank.
class NodesCalls : public testing::Test {
 protected:
  void SetUp() override { create_groups(2, ""); }

  void create_groups(int num_nodes, const std::string& tuning_file) {
    ASSERT_EQ(setenv("FERRY_CUDA_MEMORY", "ipc", 1), 0);
    const auto bootstraps = create_in_process_bootstraps(kNumRanks).value();
    std::array<Status, kNumRanks> made;
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
      threads.emplace_back([&, rank] {
        GroupOptions options;
        options.backend = "cuda";
        options.device = 0;
        options.ranks_per_node = kNumRanks / num_nodes;
        options.transport = "loopback";
        options.tuning_file = tuning_file;
        if (num_nodes == 1) options.latency_bytes = latency_bytes();
        options.arena_bytes = std::size_t{256} << 20;
        LatencyShape shape;
        shape.backend = "cuda";
        shape.num_ranks = kNumRanks;
        shape.max_tokens = kNumTokens;
        shape.num_topk = kNumTopk;
        shape.dispatch_row_bytes = shape.combine_row_bytes = kHidden * 2;
        options.latency_bytes = latency_bytes_required(shape).value();
        auto group = Group::create(bootstraps[rank], options);
        made[rank] = group.status();
        if (group.ok()) groups_[rank] = std::move(*group);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Status& status : made) ASSERT_TRUE(status.ok()) << status.message();
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int64_t>(i) % kNumExperts;
    observe_launches(observe);
  }

  void TearDown() override {
    observe_launches(nullptr);
    for (auto& group : groups_) group.reset();
    unsetenv("FERRY_CUDA_MEMORY");
  }

  static std::size_t latency_bytes() {
    LatencyShape shape;
    shape.backend = "cuda";
    shape.num_ranks = kNumRanks;
    shape.max_tokens = kNumTokens;
    shape.num_topk = kNumTopk;
    shape.dispatch_row_bytes = kHidden + kNumScales * 4;
    shape.combine_row_bytes = kHidden * 2;
    return latency_bytes_required(shape).value();
  }

  Group& group() { return *groups_[0]; }
  ConstTensorView x() const { return {x_.data(), DType::kBfloat16, {kNumTokens, kHidden}}; }
  TensorView sums() { return {sums_.data(), DType::kBfloat16, {kNumTokens, kHidden}}; }
  ConstTensorView topk_idx() const { return {ids_.data(), DType::kInt64, {kNumTokens, kNumTopk}}; }
  ConstTensorView topk_weights() const { return {weights_.data(), DType::kFloat32, {kNumTokens, kNumTopk}}; }

  /// Blocks of the largest launch of a call, which must launch a kernel.
  template <typename Call>
  static int blocks_of(const Call& call) {
    most_blocks = 0;
    const Status status = call();
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_GT(most_blocks.load(), 0);
    return most_blocks;
  }

  /// Calls of every layout, with rows without a token, and with plain and quantised rows, on tensors outside the group.
  int blocks_of_calls(Layout layout, Quantization quantize, int num_sms) {
    const int of_route = blocks_of_route(layout, num_sms);
    return std::max(of_route, blocks_of_rows(quantize, num_sms));
  }

  int blocks_of_dispatch_and_combine(Layout layout) {
    blocks_of_route(layout, 0);
    return blocks_of_rows(Quantization::kNone, 0);
  }

  int blocks_of_route(Layout layout, int num_sms) {
    RouteOptions options;
    options.num_experts = kNumExperts;
    options.layout = layout;
    options.max_tokens = kNumTokens;
    options.num_sms = num_sms;
    num_rows_ =
        layout == Layout::kSlab ? kSlabRows * kNumExperts / kNumRanks : std::int64_t{kNumRanks} * kNumTokens * kNumTopk;
    if (layout == Layout::kSlab) {
      options.slab_capacity = kSlabRows;
    } else {
      options.max_recv_rows = num_rows_;
    }
    return blocks_of([&] {
      Result<Routing> made = group().route({topk_idx(), topk_weights()}, options, stream_);
      if (made.ok()) routing_ = *made;
      return made.status();
    });
  }

  /// Blocks of a dispatch and a combine on the last route.
  int blocks_of_rows(Quantization quantize, int num_sms) {
    const std::int64_t num_rows = num_rows_;
    rows_.resize(static_cast<std::size_t>(num_rows * kHidden));
    scales_.resize(static_cast<std::size_t>(num_rows * kNumScales));
    DispatchInput in;
    in.x = x();
    DispatchOutput out;
    const bool plain = quantize == Quantization::kNone;
    out.x = TensorView(rows_.data(), plain ? DType::kBfloat16 : DType::kFloat8E4M3, {num_rows, kHidden});
    if (!plain) out.scales = TensorView(scales_.data(), DType::kFloat32, {num_rows, kNumScales});
    DispatchOptions dispatch;
    dispatch.zero_padding = true;
    dispatch.quantize = quantize;
    dispatch.kernel.num_sms = num_sms;
    const int of_dispatch = blocks_of([&] { return group().dispatch(routing_, in, out, stream_, dispatch); });
    CombineInput returned;
    returned.x = ConstTensorView(rows_.data(), DType::kBfloat16, {num_rows, kHidden});
    CombineOptions combine;
    combine.kernel.num_sms = num_sms;
    return std::max(of_dispatch,
                    blocks_of([&] { return group().combine(routing_, returned, {sums()}, stream_, combine); }));
  }

  int blocks_of_latency_calls(int num_sms) {
    constexpr std::int64_t kLocalExperts = kNumExperts / kNumRanks;
    constexpr std::int64_t kRows = std::int64_t{kNumRanks} * kNumTokens;
    rows_.resize(static_cast<std::size_t>(kLocalExperts * kRows * kHidden));
    scales_.resize(static_cast<std::size_t>(kLocalExperts * kRows * kNumScales));
    LatencyDispatchOptions options;
    options.num_experts = kNumExperts;
    options.max_tokens = kNumTokens;
    options.slab_capacity = kRows;
    options.quantize = Quantization::kFp8;
    options.kernel.num_sms = num_sms;
    LatencyDispatchInput in;
    in.x = x();
    in.topk_idx = topk_idx();
    LatencyDispatchOutput out;
    out.x = TensorView(rows_.data(), DType::kFloat8E4M3, {kLocalExperts, kRows, kHidden});
    out.scales = TensorView(scales_.data(), DType::kFloat32, {kLocalExperts, kRows, kNumScales});
    Routing routing;
    const int of_dispatch = blocks_of([&] {
      Result<Routing> made = group().latency_dispatch(in, out, options, stream_);
      if (made.ok()) routing = *made;
      return made.status();
    });
    LatencyCombineInput returned;
    returned.x = ConstTensorView(rows_.data(), DType::kBfloat16, {kLocalExperts, kRows, kHidden});
    returned.topk_weights = topk_weights();
    LatencyCombineOptions combine;
    combine.kernel.num_sms = num_sms;
    return std::max(of_dispatch,
                    blocks_of([&] { return group().latency_combine(routing, returned, {sums()}, stream_, combine); }));
  }

  std::vector<std::uint16_t> x_ = std::vector<std::uint16_t>(kNumTokens * kHidden);
  std::vector<std::uint16_t> sums_ = x_;
  std::vector<std::uint16_t> rows_;
  std::vector<float> scales_;
  std::vector<std::int64_t> ids_ = std::vector<std::int64_t>(kNumTokens * kNumTopk);
  std::vector<float> weights_ = std::vector<float>(kNumTokens * kNumTopk);
  Routing routing_;
  std::int64_t num_rows_ = 0;
  int stream_of_test_ = 0;
  Stream stream_{&stream_of_test_};
  std::array<std::shared_ptr<Group>, kNumRanks> groups_;
};

TEST_F(NodesCalls, TakeFewMultiprocessorsByDefault) {
  for (const Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab})
    for (const Quantization quantize : {Quantization::kNone, Quantization::kFp8}) {
      SCOPED_TRACE(fmt::format("layout {}, quantize {}", static_cast<int>(layout), static_cast<int>(quantize)));
      EXPECT_LE(blocks_of_calls(layout, quantize, 0), kMostSms);
    }
}

TEST_F(NodesCalls, TakeAsManyAsTheyAreGiven) {
  for (const int num_sms : {3, 8, 40}) {  // the minimum is two for each rail peer and one more
    SCOPED_TRACE(fmt::format("{} multiprocessors", num_sms));
    EXPECT_EQ(blocks_of_calls(Layout::kExperts, Quantization::kFp8, num_sms), num_sms);
    EXPECT_EQ(blocks_of_latency_calls(num_sms), num_sms);
  }
}

/// Files of settings for all calls of GPUs as these tests have.
class TunedCalls : public NodesCalls {
 protected:
  static constexpr int kTuned = 5;

  void SetUp() override {}
  void TearDown() override {
    NodesCalls::TearDown();
    std::filesystem::remove(path_);
  }

  /// Creates the groups with a file for as many nodes, of which latency mode has other settings than the other calls.
  void create_tuned(int num_nodes, int num_nodes_of_file) {
    std::string entries;
    for (const char* operation : {"dispatch", "combine", "latency_dispatch", "latency_combine"})
      for (const bool staged : {false, true}) {
        const std::string_view name = operation;
        const bool latency = name.starts_with("latency");
        const bool may_stage = name == "combine" || (name == "latency_combine" && num_nodes_of_file > 1);
        if (staged && !may_stage) continue;
        entries += fmt::format(
            R"({}{{"operation": "{}", "layout": "slab", "staged": {}, "min_tokens": 0, "max_tokens": 100000,)"
            R"( "min_row_bytes": 0, "max_row_bytes": 100000, "num_sms": {}, "num_copy_sms": 0, "chunk_tokens": 0}})",
            entries.empty() ? "" : ", ", operation, staged, latency ? kTuned + 1 : kTuned);
      }
    cudaDeviceProp properties{};
    ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    std::ofstream(path_) << fmt::format(
        R"({{"ferry_tuning": 2, "tables": [{{"gpu": "{}", "num_nodes": {}, "num_ranks": {}, "entries": [{}]}}]}})",
        properties.name, num_nodes_of_file, kNumRanks / num_nodes_of_file, entries);
    create_groups(num_nodes, path_);
  }

 private:
  const std::string path_ =
      (std::filesystem::temp_directory_path() / fmt::format("ferry-tuned-calls-{}.json", getpid())).string();
};

TEST_F(TunedCalls, OverNodesTakeWhatTheFileSaysWhereTheyLeaveItOpen) {
  create_tuned(2, 2);
  EXPECT_EQ(blocks_of_latency_calls(0), kTuned + 1);
  EXPECT_EQ(blocks_of_latency_calls(9), 9) << "what a call gives counts more";
  EXPECT_EQ(blocks_of_dispatch_and_combine(Layout::kSlab), kTuned);
  EXPECT_EQ(blocks_of_dispatch_and_combine(Layout::kExperts), kMostSms) << "the file is for another layout";
}

TEST_F(TunedCalls, OfLatencyModeInANodeTakeWhatTheFileSaysWhereTheyLeaveItOpen) {
  create_tuned(1, 1);
  EXPECT_EQ(blocks_of_latency_calls(0), kTuned + 1);
  EXPECT_EQ(blocks_of_latency_calls(9), 9) << "what a call gives counts more";
}

TEST_F(TunedCalls, IgnoreAFileForAnotherNumberOfNodes) {
  create_tuned(1, 2);
  EXPECT_GT(blocks_of_latency_calls(0), kTuned + 1);
}

/// Concurrent kernels: those of an exchange, for rings and for items that stay in the node, and those of a combine that
/// makes sums beside them.
TEST(NodesBlocks, TogetherAreAsManyAsTheCallMayHave) {
  for (int num_nodes = 2; num_nodes <= 32; ++num_nodes) {
    const int num_rings = 2 * (num_nodes - 1);
    for (const int asked : {0, 1, 5, 24, 100}) {
      for (const bool wide_rings : {false, true}) {
        const int num_sms = cuda::call_sms(asked, 132);
        const cuda::StepBlocks blocks =
            cuda::StepBlocks::of({.num_nodes = num_nodes, .num_sms = num_sms, .wide_rings = wide_rings});
        const int most = std::max(asked == 0 ? static_cast<int>(kMostSms) : asked, num_rings + 1);
        SCOPED_TRACE(fmt::format("{} nodes, {} asked for, wide rings: {}", num_nodes, asked, wide_rings));
        const int num_ring_blocks = blocks.per_ring * num_rings;
        EXPECT_GE(blocks.per_ring, 1);
        EXPECT_LE(num_ring_blocks + blocks.num_own, most);
        EXPECT_LE(num_ring_blocks + blocks.num_sums, most);
        EXPECT_LE(std::max(blocks.num_other, blocks.num_all), most);
      }
    }
  }
  EXPECT_EQ(cuda::call_sms(0, 7), 7) << "a GPU that many ranks share";
}

}  // namespace
}  // namespace ferry::test
