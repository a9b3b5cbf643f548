/// Names of the kernels of latency mode. Programs written for deep_ep look in a profile for the one line whose kernel
/// has "dispatch", or "combine", in its name, and in the trace for two kernels of each split call.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/ferry.hpp"
#include "host_calls/counted_cuda.hpp"

namespace ferry::test {
namespace {

constexpr int kHidden = 128;
constexpr int kNumTopk = 2;
constexpr int kNumExperts = 8;

struct NamesCase {
  const char* name;
  int num_tokens;
  Quantization quantize = Quantization::kNone;
  bool counts = false;  ///< adds to counters
  bool masks = false;   ///< GroupOptions::mask_lost_ranks: whole calls are made as halves
};

/// A group of one rank with tensors for its calls. No kernel ever runs, so no call waits for one.
class KernelNames : public testing::TestWithParam<NamesCase> {
 protected:
  void SetUp() override {
    ASSERT_EQ(setenv("FERRY_CUDA_MEMORY", "ipc", 1), 0);
    GroupOptions options;
    options.backend = "cuda";
    options.device = 0;
    options.arena_bytes = std::size_t{64} << 20;
    options.mask_lost_ranks = GetParam().masks;
    LatencyShape shape;
    shape.backend = "cuda";
    shape.num_ranks = 1;
    shape.max_tokens = num_tokens_;
    shape.num_topk = kNumTopk;
    shape.dispatch_row_bytes = shape.combine_row_bytes = kHidden * 2;
    options.latency_bytes = latency_bytes_required(shape).value();
    auto group = Group::create(create_in_process_bootstraps(1).value()[0], options);
    ASSERT_TRUE(group.ok()) << group.status().message();
    group_ = std::move(*group);
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int64_t>(i) % kNumExperts;
  }

  void TearDown() override {
    group_.reset();
    unsetenv("FERRY_CUDA_MEMORY");
  }

  Result<Routing> dispatch(bool split) {
    LatencyDispatchOptions options;
    options.num_experts = kNumExperts;
    options.max_tokens = options.slab_capacity = num_tokens_;
    options.quantize = GetParam().quantize;
    options.split = split;
    if (GetParam().counts) options.counters.received = TensorView(counters_.data(), DType::kInt32, {kNumExperts});
    LatencyDispatchInput in;
    in.x = ConstTensorView(rows_.data(), DType::kBfloat16, {num_tokens_, kHidden});
    in.topk_idx = ConstTensorView(ids_.data(), DType::kInt64, {num_tokens_, kNumTopk});
    LatencyDispatchOutput out{slab()};
    if (options.quantize == Quantization::kFp8) {
      out.x.dtype = DType::kFloat8E4M3;
      out.scales = TensorView(scales_.data(), DType::kFloat32, {kNumExperts, num_tokens_, 1});
    }
    return group_->latency_dispatch(in, out, options, stream_);
  }
  TensorView slab() { return {slab_.data(), DType::kBfloat16, {kNumExperts, num_tokens_, kHidden}}; }

  Status combine(const Routing& routing, CombineOrder order, bool split) {
    LatencyCombineInput in;
    in.x = slab();
    in.topk_weights = ConstTensorView(weights_.data(), DType::kFloat32, {num_tokens_, kNumTopk});
    LatencyCombineOptions options;
    options.order = order;
    options.split = split;
    const TensorView sums(rows_.data(), DType::kBfloat16, {num_tokens_, kHidden});
    return group_->latency_combine(routing, in, {sums}, stream_, options);
  }

  /// Makes a pair of calls.
  void call(CombineOrder order, bool split) {
    const Result<Routing> routing = dispatch(split);
    ASSERT_TRUE(routing.ok()) << routing.status().message();
    if (split) {
      ASSERT_TRUE(group_->latency_receive(*routing, stream_).ok());
    }
    const Status combined = combine(*routing, order, split);
    ASSERT_TRUE(combined.ok()) << combined.message();
    if (split) {
      ASSERT_TRUE(group_->latency_receive(*routing, stream_).ok());
    }
  }

  int num_tokens_ = GetParam().num_tokens;
  std::vector<std::uint16_t> rows_ = std::vector<std::uint16_t>(static_cast<std::size_t>(num_tokens_) * kHidden);
  std::vector<std::uint16_t> slab_ = std::vector<std::uint16_t>(kNumExperts * rows_.size());
  std::vector<float> scales_ = std::vector<float>(static_cast<std::size_t>(kNumExperts * num_tokens_));
  std::vector<std::int64_t> ids_ = std::vector<std::int64_t>(static_cast<std::size_t>(num_tokens_) * kNumTopk);
  std::vector<float> weights_ = std::vector<float>(ids_.size());
  std::vector<std::int32_t> counters_ = std::vector<std::int32_t>(kNumExperts);
  int stream_of_test_ = 0;
  Stream stream_{&stream_of_test_};
  std::shared_ptr<Group> group_;
};

/// Those of `names` that contain `word`.
std::vector<std::string> names_with(std::string_view word, const std::vector<std::string>& names) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name.find(word) != std::string::npos) found.push_back(name);
  }
  return found;
}

TEST_P(KernelNames, AreOnePerCallAndTheSameForBothHalves) {
  for (const bool split : {false, true}) {
    for (const CombineOrder order : {CombineOrder::kExact, CombineOrder::kRankSums}) {
      take_launched_kernels();
      call(order, split);
      const std::vector<std::string> launched = take_launched_kernels();
      for (const char* word : {"dispatch", "combine"}) {
        SCOPED_TRACE(testing::PrintToString(launched) + (split ? " split, " : " whole, ") + word);
        const std::vector<std::string> found = names_with(word, launched);
        ASSERT_EQ(found.size(), split || GetParam().masks ? 2U : 1U);
        EXPECT_EQ(found.front(), found.back());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, KernelNames,
    testing::Values(NamesCase{"few_tokens", 4}, NamesCase{"few_fp8_tokens", 4, Quantization::kFp8},
                    NamesCase{"few_counted_tokens", 4, Quantization::kFp8, true}, NamesCase{"many_tokens", 256},
                    NamesCase{"many_fp8_tokens", 256, Quantization::kFp8},
                    NamesCase{"many_counted_tokens", 256, Quantization::kNone, true},
                    NamesCase{"masked_ranks", 4, Quantization::kNone, false, true},
                    NamesCase{"many_tokens_and_masked_ranks", 256, Quantization::kFp8, true, true}),
    [](const auto& one) { return std::string(one.param.name); });

/// Programs look in the trace for "::dispatch" and "::combine", and in a table that shows the first 97 characters.
TEST(KernelNamesOfTheLibrary, HaveEitherWordOnceAsTheBeginningOfTheFunction) {
  constexpr std::size_t kShownCharacters = 97;
  int num_found = 0;
  for (const std::string& name : all_kernels()) {
    SCOPED_TRACE(name);
    std::size_t end = 0;
    for (const std::string word : {"dispatch", "combine"}) {
      for (std::size_t at = name.find(word); at != std::string::npos; at = name.find(word, at + 1)) {
        EXPECT_EQ(end, 0U) << "a second word";
        end = at + word.size();
        EXPECT_EQ(name.substr(std::max<std::size_t>(at, 2) - 2, 2), "::");
        EXPECT_LE(end, kShownCharacters);
        ++num_found;
      }
    }
  }
  EXPECT_GT(num_found, 0);
}

}  // namespace
}  // namespace ferry::test
