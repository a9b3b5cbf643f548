/// Times select_experts for the published models: on this host, and where there is a GPU on that too, next to a kernel
/// that only reads the scores. On a GPU it is the time of a call in a graph of many, whose inputs take turns so that
/// larger batches come from memory; small ones stay in the second-level cache, as when a layer has just computed them.
/// gating_bench [--tokens 4096,65536] [--backend cpu|cuda]

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ferry/gating.hpp"
#include "options.hpp"
#if defined(FERRY_WITH_CUDA)
#include "gating_gpu.hpp"
#endif

namespace {

using namespace ferry;  // NOLINT(google-build-using-namespace)

/// A batch for one preset, in host memory.
struct Batch {
  explicit Batch(const GatingPreset& preset, std::int64_t tokens)
      : num_tokens(tokens),
        num_experts(preset.num_experts),
        num_topk(preset.options.num_topk),
        logits(static_cast<std::size_t>(num_tokens * num_experts)),
        bias(preset.has_bias ? static_cast<std::size_t>(num_experts) : 0),
        ids(static_cast<std::size_t>(num_tokens * num_topk)),
        weights(ids.size()) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal(0.0F, 2.0F);
    constexpr float kBiasScale = 0.025F;
    for (float& logit : logits) logit = normal(random);
    for (float& one : bias) one = normal(random) * kBiasScale;
  }

  std::int64_t num_tokens;
  std::int64_t num_experts;
  std::int64_t num_topk;
  std::vector<float> logits;
  std::vector<float> bias;
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
};

/// The tensors of a batch at these addresses.
Status choose(const Batch& batch, const GatingOptions& options, const float* logits, const float* bias,
              std::int64_t* ids, float* weights, const ExecutionOptions& execution, Stream stream) {
  const ConstTensorView bias_view =
      bias == nullptr ? ConstTensorView() : ConstTensorView(bias, DType::kFloat32, {batch.num_experts});
  return select_experts(ConstTensorView(logits, DType::kFloat32, {batch.num_tokens, batch.num_experts}), bias_view,
                        options, TensorView(ids, DType::kInt64, {batch.num_tokens, batch.num_topk}),
                        TensorView(weights, DType::kFloat32, {batch.num_tokens, batch.num_topk}), execution, stream);
}

void measure_on_host(const GatingPreset& preset, std::int64_t num_tokens) {
  Batch batch(preset, num_tokens);
  constexpr int kRounds = 7;
  double best_ns = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    throw_if_error(choose(batch, preset.options, batch.logits.data(), batch.bias.empty() ? nullptr : batch.bias.data(),
                          batch.ids.data(), batch.weights.data(), {}, {}));
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    best_ns = round == 0 ? took.count() : std::min(best_ns, took.count());
  }
  fmt::print("cpu   {:<14} E {:>3}  K {}  T {:>6}  {:>9.1f} us  {:>6.0f} ns a token\n", preset.name, batch.num_experts,
             batch.num_topk, num_tokens, best_ns / 1e3, best_ns / static_cast<double>(num_tokens));
}

#if defined(FERRY_WITH_CUDA)
void measure_on_gpu(const GatingPreset& preset, std::int64_t num_tokens) {
  Batch batch(preset, num_tokens);
  constexpr int kNumCalls = 64;
  constexpr int kNumSlowCalls = 1;  // where tokens choose again: much more than starting it
  const bench::RotatedInput logits(batch.logits, kNumCalls);
  const bench::DeviceCopy<float> bias(batch.bias);
  const bench::DeviceCopy<std::int64_t> ids(batch.ids);
  const bench::DeviceCopy<float> weights(batch.weights);
  const float* bias_at = batch.bias.empty() ? nullptr : bias.data();
  const auto run = [&](const GatingOptions& options, int num_calls) {
    return bench::time_in_graph_us(num_calls, [&](int turn, Stream stream) {
      throw_if_error(
          choose(batch, options, logits.at(turn), bias_at, ids.data(), weights.data(), {.backend = "cuda"}, stream));
    });
  };
  const double read_us = bench::time_in_graph_us(
      kNumCalls, [&](int turn, Stream stream) { bench::read_all(logits.at(turn), batch.logits.size(), stream); });
  const double choose_us = run(preset.options, kNumCalls);
  GatingOptions limited = preset.options;
  limited.capacity = 2 * num_tokens * batch.num_topk / batch.num_experts;
  const double drop_us = run(limited, kNumCalls);
  limited.overflow = GatingOverflow::kRechoose;
  const double rechoose_us = run(limited, kNumSlowCalls);
  fmt::print(
      "cuda  {:<14} E {:>3}  K {}  T {:>6}  {:>9.2f} us  read {:>7.2f} us  ratio {:>5.2f}  drop {:>7.1f} us  "
      "rechoose {:>8.1f} us\n",
      preset.name, batch.num_experts, batch.num_topk, num_tokens, choose_us, read_us, choose_us / read_us, drop_us,
      rechoose_us);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  benchmarks::Options options("Times select_experts for the published models");
  std::vector<std::int64_t> token_counts = {4096, 65536};
  std::string backend = "cpu";
  options.add("--tokens", token_counts, "Tokens of a batch");
  options.add("--backend", backend, "cpu or cuda", {"cpu", "cuda"});
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  if (backend == "cuda") fmt::print("microseconds on the GPU of one call in a graph of many, without the host\n");
  for (const GatingPreset& preset : gating_presets()) {
    for (std::int64_t num_tokens : token_counts) {
#if defined(FERRY_WITH_CUDA)
      if (backend == "cuda") {
        measure_on_gpu(preset, num_tokens);
        continue;
      }
#endif
      measure_on_host(preset, num_tokens);
    }
  }
  return 0;
}
