/// Rows of a large model, uneven ranks, every layout and kind of memory, every way to use the GPU.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kHidden = 7168;
constexpr std::array<Layout, 3> kLayouts = {Layout::kTokens, Layout::kExperts, Layout::kSlab};
constexpr std::array<MemoryKind, 2> kMemories = {MemoryKind::kSymmetric, MemoryKind::kPlain};

PreparedCase model_case(int num_ranks, Layout layout, std::int64_t max_tokens) {
  ExchangeCase one;
  one.name = fmt::format("layout {}", static_cast<int>(layout));
  one.world = {.num_ranks = num_ranks, .num_topk = 8, .num_experts = 64, .max_tokens = max_tokens};
  one.world.counts = TokenCounts::kUneven;
  one.world.layout = layout;
  one.world.expert_alignment = 8;
  one.world.spare_slab_rows = 2;
  one.world.spare_recv_rows = layout == Layout::kExperts ? 5 : -1;
  one.world.seed = static_cast<std::uint64_t>(500 + num_ranks);
  one.dispatches = {{.hidden = kHidden},
                    {.dtype = DType::kFloat8E4M3,
                     .hidden = kHidden,
                     .num_scales = 56,
                     .scale_strides = ScaleStrides::kColumnMajor,
                     .zero_padding = true}};
  one.combines = {{.hidden = kHidden, .weighted = true, .num_biases = 1}};
  return prepare(one);
}

class ModelShapes : public testing::TestWithParam<int> {};

TEST_P(ModelShapes, EveryLayoutAndMemory) {
  const int num_ranks = GetParam();
  for (Layout layout : kLayouts) {
    // The layout with one row per rank of a token serves large batches; the other two multiply rows by K.
    PreparedCase prepared = model_case(num_ranks, layout, layout == Layout::kTokens ? 600 : 80);
    for (MemoryKind memory : kMemories) {
      prepared.spec.memory = memory;
      run_gpu_group(RankKind::kThreads, num_ranks,
                    [&](RankContext& context, Group& group) { check_case(context, group, prepared); });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ModelShapes, testing::Values(1, 2, 3, 4, 5, 7, 8),
                         [](const auto& test) { return fmt::format("{}_threads", test.param); });

TEST(ModelShapesProcesses, EveryLayoutAndMemory) {
  for (Layout layout : kLayouts) {
    PreparedCase prepared = model_case(3, layout, 80);
    for (MemoryKind memory : kMemories) {
      prepared.spec.memory = memory;
      run_gpu_group(RankKind::kProcesses, 3,
                    [&](RankContext& context, Group& group) { check_case(context, group, prepared); });
    }
  }
}

std::vector<KernelOptions> every_kernel() {
  std::vector<KernelOptions> all;
  for (CopyPath path : {CopyPath::kBulk, CopyPath::kLoadStore})
    for (int num_sms : {1, 2, 20})
      for (int chunk_tokens : {1, 64})
        all.push_back({.num_sms = num_sms, .chunk_tokens = chunk_tokens, .copy_path = path});
  all.push_back({.num_sms = 6, .num_copy_sms = 2});
  all.push_back({.num_sms = 6, .num_copy_sms = 5, .copy_path = CopyPath::kLoadStore});
  return all;
}

class KernelChoices : public testing::TestWithParam<std::size_t> {};

TEST_P(KernelChoices, ChangeNoResult) {
  constexpr int kNumRanks = 4;
  const std::vector<KernelOptions> kernels = every_kernel();
  PreparedCase prepared = model_case(kNumRanks, kLayouts[GetParam()], 48);
  for (MemoryKind memory : kMemories) {
    prepared.spec.memory = memory;
    run_gpu_group(RankKind::kThreads, kNumRanks, [&](RankContext& context, Group& group) {
      for (std::size_t i = 0; i < kernels.size(); ++i) {
        check_case(context, group, prepared, kernels[i]);
        if (!context.failures().empty()) {
          context.fail(fmt::format("failed with kernel choice {}, memory {}", i, static_cast<int>(memory)));
          return;
        }
      }
      // Each rank chooses its own options.
      check_case(context, group, prepared, kernels[static_cast<std::size_t>(context.rank() * 3)]);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, KernelChoices, testing::Range(std::size_t{0}, kLayouts.size()));

}  // namespace
}  // namespace ferry::test
