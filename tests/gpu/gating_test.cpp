/// Tests of the gating kernels, bit by bit against the same call on the host.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <vector>

#include "ferry/gating.hpp"
#include "gpu/on_device.hpp"
#include "support/gating_case.hpp"
#include "support/gpu_ranks.hpp"

namespace ferry::test {
namespace {

using Bytes = std::vector<std::byte>;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// Returns the ids and the weights.
std::vector<Bytes> choose(RankContext& context, const GatingCase& one, bool on_gpu) {
  const std::int64_t num_topk = one.options.num_topk;
  const auto num_entries = static_cast<std::size_t>(one.num_tokens * num_topk);
  const DType logits_dtype = one.is_bfloat16 ? DType::kBfloat16 : DType::kFloat32;
  const DType ids_dtype = one.wide_ids ? DType::kInt64 : DType::kInt32;
  Bytes logits = one.is_bfloat16 ? bytes_of(one.narrow) : bytes_of(one.logits);
  Bytes bias = bytes_of(one.bias);
  Bytes ids(num_entries * size_bytes(ids_dtype), std::byte{0xA5});
  Bytes weights(num_entries * sizeof(float), std::byte{0xA5});
  const auto call = [&](void* logits_at, void* bias_at, void* ids_at, void* weights_at, Stream stream) {
    const ConstTensorView bias_view =
        one.bias.empty() ? ConstTensorView() : ConstTensorView(bias_at, DType::kFloat32, {one.num_experts});
    context.expect_ok(select_experts(ConstTensorView(logits_at, logits_dtype, {one.num_tokens, one.num_experts}),
                                     bias_view, one.options, TensorView(ids_at, ids_dtype, {one.num_tokens, num_topk}),
                                     TensorView(weights_at, DType::kFloat32, {one.num_tokens, num_topk}),
                                     {.backend = on_gpu ? "cuda" : "cpu"}, stream),
                      one.name());
  };
  if (!on_gpu) {
    call(logits.data(), bias.data(), ids.data(), weights.data(), {});
    return {ids, weights};
  }
  const OnDevice<std::byte> logits_on_gpu(logits);
  const OnDevice<std::byte> bias_on_gpu(bias);
  const OnDevice<std::byte> ids_on_gpu(ids);
  const OnDevice<std::byte> weights_on_gpu(weights);
  call(logits_on_gpu.data(), bias_on_gpu.data(), ids_on_gpu.data(), weights_on_gpu.data(), thread_stream());
  ids_on_gpu.read(ids);
  weights_on_gpu.read(weights);
  return {ids, weights};
}

TEST(GatingOnGpu, RandomOptionsShapesAndLogits) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    std::mt19937_64 random(21);
    for (int i = 0; i < 600; ++i) {
      const GatingCase one = draw_gating_case(random, 512, 200);
      context.expect(choose(context, one, true) == choose(context, one, false), one.name());
    }
  });
}

TEST(GatingOnGpu, RandomOptionsWithManyTokens) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    constexpr int kNumCases = 16;
    std::mt19937_64 random(23);
    int num_drawn = 0;
    while (num_drawn < kNumCases) {
      GatingCase one = draw_gating_case(random, 512, 5000);
      if (one.num_experts % 128 != 0 || one.num_tokens < 3500) continue;
      one.options.num_topk = std::min(one.options.num_topk, 8);
      one.options.noise = 0;
      context.expect(choose(context, one, true) == choose(context, one, false), one.name());
      ++num_drawn;
    }
  });
}

TEST(GatingOnGpu, PresetsWithManyTokens) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    std::mt19937_64 random(22);
    std::normal_distribution<float> normal(0.0F, 2.0F);
    for (const GatingPreset& preset : gating_presets()) {
      GatingCase one{.options = preset.options, .num_tokens = 20'000, .num_experts = preset.num_experts};
      for (std::int64_t i = 0; i < one.num_tokens * one.num_experts; ++i) one.logits.push_back(normal(random));
      for (std::int64_t e = 0; e < one.num_experts && preset.has_bias; ++e) one.bias.push_back(normal(random) * 0.05F);
      context.expect(choose(context, one, true) == choose(context, one, false), std::string(preset.name));
    }
  });
}

TEST(GatingOnGpu, RefusesHostMemoryAndTooManyExperts) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    std::vector<float> logits(600, 0.0F);
    const OnDevice<std::int64_t> ids({-7});
    const OnDevice<float> weights({-7.0F});
    const auto call = [&](std::int64_t num_experts) {
      return select_experts(ConstTensorView(logits.data(), DType::kFloat32, {1, num_experts}), {}, {},
                            TensorView(ids.data(), DType::kInt64, {1, 1}),
                            TensorView(weights.data(), DType::kFloat32, {1, 1}), {.backend = "cuda"}, thread_stream());
    };
    const Status host_memory = call(512);
    context.expect_code(host_memory, ErrorCode::kInvalidArgument, "logits in host memory");
    context.expect(host_memory.message().find("select_experts: logits is at") != std::string_view::npos,
                   std::string(host_memory.message()));
    context.expect_code(call(513), ErrorCode::kUnsupported, "513 experts");
    std::vector<std::int64_t> untouched(1);
    ids.read(untouched);
    context.expect(untouched[0] == -7, "ids were written");
  });
}

}  // namespace
}  // namespace ferry::test
