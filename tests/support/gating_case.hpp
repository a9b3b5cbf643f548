#ifndef FERRY_TESTS_GATING_CASE_HPP
#define FERRY_TESTS_GATING_CASE_HPP

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ferry/gating.hpp"

namespace ferry::test {

/// A batch of router logits with everything that select_experts takes.
struct GatingCase {
  GatingOptions options;
  std::int64_t num_tokens = 1;
  std::int64_t num_experts = 1;
  bool is_bfloat16 = false;
  bool wide_ids = true;
  std::vector<float> logits{};          ///< [T, E]; with is_bfloat16 exactly what `narrow` holds
  std::vector<std::uint16_t> narrow{};  ///< the same as bf16
  std::vector<float> bias{};            ///< [E] or empty
  std::string name() const;
};

/// Options, shapes and logits of all kinds: ties, infinities and NaN among them. At most `max_experts` and
/// `max_tokens`.
GatingCase draw_gating_case(std::mt19937_64& random, std::int64_t max_experts, std::int64_t max_tokens);

/// The result, bit by bit.
struct GatingResult {
  std::vector<std::int64_t> ids;
  std::vector<std::uint32_t> weight_bits;
  friend bool operator==(const GatingResult&, const GatingResult&) = default;
};

/// What the documentation of select_experts defines, expert by expert with no regard to speed. Only the exponential and
/// the noise are the library's.
GatingResult choose_by_definition(const GatingCase& one);

}  // namespace ferry::test

#endif  // FERRY_TESTS_GATING_CASE_HPP
