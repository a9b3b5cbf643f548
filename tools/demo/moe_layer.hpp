#ifndef FERRY_TOOLS_DEMO_MOE_LAYER_HPP
#define FERRY_TOOLS_DEMO_MOE_LAYER_HPP

/// Parts of the layer that do not communicate: router and experts, with seeded weights that every process can generate.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "demo/matmul.hpp"
#include "demo/model_presets.hpp"
#include "ferry/status.hpp"

namespace ferry::tools {

/// Independent streams of one seed.
struct LayerSeeds {
  explicit LayerSeeds(std::uint64_t seed);
  std::uint64_t embedding;
  std::uint64_t router;
  std::uint64_t experts;
};

/// Router's decision for some tokens.
struct Choice {
  std::vector<std::int64_t> topk_idx;  ///< [T, K]
  std::vector<float> topk_weights;     ///< [T, K]
};

/// Computes scores of `x` [T, H] bf16 with the seeded router, and the experts chosen by them.
Result<Choice> choose_experts(std::span<const std::uint16_t> x, const LayerShape& shape, std::uint64_t seed);

/// One SwiGLU expert: y = (silu(x Wg) * (x Wu)) Wd, in f32 throughout. One object serves one expert after another.
class Expert {
 public:
  explicit Expert(const LayerShape& shape) : shape_(shape) {}
  void load(std::uint64_t seed, std::int64_t expert_idx);
  /// Loads the result of `weights` of another object.
  void load(std::span<const float> weights);
  /// All weights, in whole rows of H values.
  std::vector<float> weights() const;
  static std::int64_t num_weights(const LayerShape& shape);
  /// x [num_rows, H] f32 -> y [num_rows, H] f32; keep num_rows at most kChunkRows.
  void forward(const float* x, std::size_t num_rows, float* y);

  /// Rows that are processed together: their intermediates stay in the second-level cache.
  static constexpr std::size_t kChunkRows = 64;

 private:
  LayerShape shape_;
  Matrix gate_;
  Matrix up_;
  Matrix down_;
  std::vector<float> gate_rows_;
  std::vector<float> up_rows_;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_MOE_LAYER_HPP
