/// Small batches whose counts and bytes are worked out by hand, and what the library says of them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"

namespace ferry {
namespace {

using testing::ElementsAre;

constexpr int kNumRanks = 2;

/// Four tokens with two experts each, of four experts on two ranks. Tokens 1 and 2 have an expert on each rank, token 0
/// has both on rank 0, token 3 both on rank 1; each expert is picked twice.
struct FourTokens {
  std::vector<std::int64_t> ids{0, 1, /**/ 0, 2, /**/ 1, 3, /**/ 2, 3};
  ConstTensorView topk_idx{ids.data(), DType::kInt64, {4, 2}};
};

/// Runs `rank_main` for both ranks of a CPU group, each in a thread.
void run_group(const GroupOptions& options, const std::function<void(int, Group&)>& rank_main) {
  const auto bootstraps = create_in_process_bootstraps(kNumRanks).value();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto group = Group::create(bootstraps[static_cast<std::size_t>(rank)], options);
      ASSERT_TRUE(group.ok()) << group.status().to_string();
      rank_main(rank, **group);
      EXPECT_TRUE((*group)->destroy().ok());
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

GroupOptions cpu_group(int ranks_per_node) {
  GroupOptions options;
  options.backend = "cpu";
  options.ranks_per_node = ranks_per_node;
  options.transport = "loopback";
  options.arena_bytes = std::size_t{64} << 20;
  return options;
}

/// The node has all four tokens: a token counts once for a node, however many of its ranks it goes to, so the node's
/// number is neither that of its busiest rank (3) nor the sum of its ranks (6).
TEST(WorkedSamples, FourTokensWithTwoExpertsOnTwoRanksOfANode) {
  const FourTokens sample;
  std::vector<std::int32_t> per_rank(2);
  std::vector<std::int32_t> per_node(1);
  std::vector<std::int32_t> per_expert(4);
  std::vector<std::uint8_t> in_rank(8);
  const DispatchLayout out{.num_tokens_per_rank = TensorView(per_rank.data(), DType::kInt32, {2}),
                           .num_tokens_per_node = TensorView(per_node.data(), DType::kInt32, {1}),
                           .num_tokens_per_expert = TensorView(per_expert.data(), DType::kInt32, {4}),
                           .is_token_in_rank = TensorView(in_rank.data(), DType::kUint8, {4, 2})};
  const Status status = dispatch_layout(sample.topk_idx, {.num_experts = 4, .num_ranks = 2, .ranks_per_node = 2}, out);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_THAT(per_expert, ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(per_rank, ElementsAre(3, 3));
  EXPECT_THAT(per_node, ElementsAre(4));
  EXPECT_THAT(in_rank, ElementsAre(1, 0, 1, 1, 1, 1, 0, 1));
}

TEST(WorkedSamples, FourTokensOnRanksThatAreNodesCountOnceForEachNode) {
  const FourTokens sample;
  std::vector<std::int32_t> per_node(2);
  const DispatchLayout out{.num_tokens_per_node = TensorView(per_node.data(), DType::kInt32, {2})};
  const Status status = dispatch_layout(sample.topk_idx, {.num_experts = 4, .num_ranks = 2, .ranks_per_node = 1}, out);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_THAT(per_node, ElementsAre(3, 3));
}

/// A route of the same tokens, all of them rank 0's, finds the same counts, on one node and on two.
TEST(WorkedSamples, FourTokensAreRoutedAsTheyAreCounted) {
  for (const int ranks_per_node : {2, 1}) {
    SCOPED_TRACE(ranks_per_node);
    run_group(cpu_group(ranks_per_node), [](int rank, Group& group) {
      const FourTokens sample;
      const ConstTensorView none(sample.ids.data(), DType::kInt64, {0, 2});
      const auto routing = group.route({.topk_idx = rank == 0 ? sample.topk_idx : none}, {.num_experts = 4});
      ASSERT_TRUE(routing.ok()) << routing.status().to_string();
      EXPECT_EQ(routing->num_recv_rows(), 3);
      EXPECT_THAT(routing->num_rows_per_local_expert(), ElementsAre(2, 2));
      EXPECT_THAT(routing->num_rows_from_rank(), ElementsAre(3, 0));
      if (rank == 0) {
        EXPECT_THAT(routing->num_rows_to_rank(), ElementsAre(3, 3));
      } else {
        EXPECT_THAT(routing->num_rows_to_rank(), ElementsAre(0, 0));
      }
    });
  }
}

/// Bytes that rank 0 hands to the network in a dispatch of `num_tokens` FP8 tokens of 7168 channels, scales, ids and
/// weights, each with experts on both of two nodes.
std::uint64_t sent_bytes(std::int64_t num_tokens) {
  constexpr std::int64_t kHidden = 7168;
  constexpr std::int64_t kNumScales = kHidden / 128;
  constexpr std::int64_t kNumTopk = 8;
  constexpr std::int64_t kNumExperts = 16;
  std::uint64_t bytes = 0;
  run_group(cpu_group(1), [&](int rank, Group& group) {
    const auto count = [](std::int64_t number) { return static_cast<std::size_t>(number); };
    std::vector<std::int64_t> ids(count(num_tokens * kNumTopk));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(2 * i) % kNumExperts;
    const std::vector<float> weights(ids.size(), 0.125F);
    const std::vector<std::uint8_t> x(count(num_tokens * kHidden));
    const std::vector<float> scales(count(num_tokens * kNumScales), 1.0F);
    const auto routing =
        group.route({.topk_idx = ConstTensorView(ids.data(), DType::kInt64, {num_tokens, kNumTopk}),
                     .topk_weights = ConstTensorView(weights.data(), DType::kFloat32, {num_tokens, kNumTopk})},
                    {.num_experts = kNumExperts});
    ASSERT_TRUE(routing.ok()) << routing.status().to_string();
    const std::int64_t num_rows = routing->num_recv_rows();
    ASSERT_EQ(num_rows, kNumRanks * num_tokens);
    std::vector<std::uint8_t> out_x(count(num_rows * kHidden));
    std::vector<float> out_scales(count(num_rows * kNumScales));
    std::vector<std::int64_t> out_ids(count(num_rows * kNumTopk));
    std::vector<float> out_weights(out_ids.size());
    const std::uint64_t before = group.network_usage().rails.front().sent_bytes;
    const Status status =
        group.dispatch(*routing,
                       {.x = ConstTensorView(x.data(), DType::kFloat8E4M3, {num_tokens, kHidden}),
                        .scales = ConstTensorView(scales.data(), DType::kFloat32, {num_tokens, kNumScales})},
                       {.x = TensorView(out_x.data(), DType::kFloat8E4M3, {num_rows, kHidden}),
                        .scales = TensorView(out_scales.data(), DType::kFloat32, {num_rows, kNumScales}),
                        .topk_idx = TensorView(out_ids.data(), DType::kInt64, {num_rows, kNumTopk}),
                        .topk_weights = TensorView(out_weights.data(), DType::kFloat32, {num_rows, kNumTopk})});
    ASSERT_TRUE(status.ok()) << status.to_string();
    if (rank == 0) bytes = group.network_usage().rails.front().sent_bytes - before;
  });
  return bytes;
}

/// A token's way to another node: 7168 bytes of payload, 56 scales of 4 bytes, 8 ids and 8 weights of 4 bytes. Where it
/// comes from is known from route and does not travel. Both batches fit into one chunk, so headers are equal.
TEST(WorkedSamples, ATokenOf7168Fp8ChannelsTakes7456BytesToAnotherNode) {
  constexpr std::uint64_t kTokenBytes = 7168 + 56 * 4 + 8 * 4 + 8 * 4;
  static_assert(kTokenBytes == 7456);
  EXPECT_EQ(sent_bytes(16) - sent_bytes(8), 8 * kTokenBytes);
}

}  // namespace
}  // namespace ferry
