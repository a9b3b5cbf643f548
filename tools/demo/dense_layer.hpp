#ifndef FERRY_TOOLS_DEMO_DENSE_LAYER_HPP
#define FERRY_TOOLS_DEMO_DENSE_LAYER_HPP

/// The same layer in one process, without any exchange, and the comparison with the ranks' results.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "demo/moe_layer.hpp"

namespace ferry::tools {

/// All tokens of the run.
struct DenseInput {
  std::span<const std::uint16_t> x;  ///< [T, H] bf16, as the experts receive it
  const Choice* choice = nullptr;
  const LayerShape* shape = nullptr;
  std::uint64_t seed = 0;  ///< seed of the experts' weights
};

/// [T, H] each.
struct DenseOutput {
  std::vector<float> sums;        ///< sum over k of w_k y_k, in f32
  std::vector<float> magnitudes;  ///< sum over k of |w_k y_k|
};

/// Every expert in turn processes all tokens that chose it. `on_expert` is called before each, to show progress.
DenseOutput compute_dense(const DenseInput& in, const std::function<void(std::int64_t)>& on_expert);

/// Distance of the ranks' results from the dense ones.
struct Comparison {
  bool verified = false;
  double largest_error = 0.0;
  double bound_at_largest_error = 0.0;
  double largest_share = 0.0;  ///< largest share of an element's bound that its error uses; above 1 it is a mismatch
  std::int64_t num_bad_tokens = 0;
  std::int64_t first_bad_token = -1;  ///< followed by its worst element
  std::int64_t first_bad_channel = -1;
  double expected = 0.0;
  double got = 0.0;
  double bound = 0.0;
};

/// Compares `got` [T, H] bf16 with `dense`, token by token; NaN is a mismatch.
///
/// The bound of an element follows from the two roundings to bf16 that only the ranks' computation has. With u = 2^-8
/// (half a unit in the last place), y_k the f32 output of expert k, S = sum |w_k y_k| and D the dense sum:
///   each expert output is rounded once:   |sum w_k bf16(y_k) - D|  <=  u S
///   the result is rounded once:           at most u (|D| + u S) more
///   both ways sum K products in f32:      at most 2 (K + 1) 2^-24 S more
///   bound = u S + u (|D| + u S) + 2 (K + 1) 2^-24 S + the smallest normal f32 (for sums that underflow)
///
/// Over several nodes each node's sum is rounded once before the sums are added: the sums of |w_k bf16(y_k)| of all
/// nodes are at most (1 + u) S together, so that u (1 + u) S is added to the u S from which the result's rounding is
/// computed.
Comparison compare_with_dense(std::span<const std::uint16_t> got, const DenseOutput& dense, const LayerShape& shape,
                              int num_nodes);

/// Text of the formula above.
const char* bound_formula(int num_nodes);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_DENSE_LAYER_HPP
