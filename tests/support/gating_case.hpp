#ifndef FERRY_TESTS_GATING_CASE_HPP
#define FERRY_TESTS_GATING_CASE_HPP

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ferry/gating.hpp"

namespace ferry::test {

/// A batch of router logits with all arguments of select_experts.
struct GatingCase {
  GatingOptions options;
  std::int64_t num_tokens = 1;
  std::int64_t num_experts = 1;
  bool is_bfloat16 = false;
  bool wide_ids = true;
  std::vector<float> logits{};          ///< [T, E]; with is_bfloat16, exactly the values of `narrow`
  std::vector<std::uint16_t> narrow{};  ///< logits as bf16
  std::vector<float> bias{};            ///< [E] or empty
  std::string name() const;
};

/// Draws options, shapes and logits of all kinds, with ties, infinities and NaN, up to `max_experts` and `max_tokens`.
GatingCase draw_gating_case(std::mt19937_64& random, std::int64_t max_experts, std::int64_t max_tokens);

/// Result bit by bit.
struct GatingResult {
  std::vector<std::int64_t> ids;
  std::vector<std::uint32_t> weight_bits;
  friend bool operator==(const GatingResult&, const GatingResult&) = default;
};

/// Chooses experts as the documentation of select_experts defines, expert by expert, without regard to speed. Only the
/// exponential and the noise are the library's.
GatingResult choose_by_definition(const GatingCase& one);

}  // namespace ferry::test

#endif  // FERRY_TESTS_GATING_CASE_HPP
