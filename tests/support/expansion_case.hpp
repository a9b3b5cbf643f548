#ifndef FERRY_TESTS_EXPANSION_CASE_HPP
#define FERRY_TESTS_EXPANSION_CASE_HPP

/// Random inputs of arrival_tables with `expand`, of expand_rows and reduce_rows, with expected results computed row by
/// row.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "support/arrival_case.hpp"

namespace ferry::test {

/// Outputs of arrival_tables.
struct ExpansionTables {
  std::vector<std::int32_t> origin;          ///< [N, 2 + K]
  std::vector<std::int32_t> expert_ends;     ///< [L]
  std::vector<std::int32_t> rows_of_expert;  ///< [L]
  std::vector<std::int8_t> last_equal;       ///< [N, K]

  /// Replaces every value with one that no call writes, so that unwritten values show.
  void spoil();
  bool operator==(const ExpansionTables&) const = default;
};

/// Outputs of expand_rows, gaps cleared.
struct ExpandedRows {
  std::vector<std::uint16_t> x;           ///< [P, H]
  std::vector<std::int32_t> scales;       ///< [P, S], row-major
  std::vector<float> weights;             ///< [P]
  std::vector<std::int32_t> row_of_slot;  ///< [P]

  /// Replaces every value with one that no call writes, so that unwritten values show.
  void spoil();
  bool operator==(const ExpandedRows&) const = default;
};

/// Outputs of reduce_rows.
struct ReducedRows {
  std::vector<std::uint16_t> rounded;  ///< [N, H]
  std::vector<float> exact;            ///< [N, H]
  std::vector<float> weights;          ///< [N, K]

  /// Replaces every value with one that no call writes, so that unwritten values show.
  void spoil();
  bool operator==(const ReducedRows&) const = default;
};

struct ExpansionCase {
  ArrivalCase arrivals;                       ///< with rows_of_expert computed from its ids
  std::int64_t num_slots = 0;                 ///< P: the slots needed, and some more
  std::int64_t hidden = 8;                    ///< H
  std::int64_t num_scales = 0;                ///< S
  std::vector<std::uint16_t> x;               ///< [N, H] bf16
  std::vector<std::int32_t> scales;           ///< [N, S]
  std::vector<float> weights;                 ///< [N, K]
  std::vector<std::uint16_t> expert_outputs;  ///< [P, H] bf16; NaN in gaps
  std::vector<float> expert_weights;          ///< [P]

  std::string name() const;
  ExpansionTables tables() const;
  ExpandedRows expanded(const ExpansionTables& tables) const;
  ReducedRows reduced(const ExpansionTables& tables) const;
};

ExpansionCase draw_expansion_case(std::mt19937_64& random, std::int64_t max_rows, int max_experts);

}  // namespace ferry::test

#endif  // FERRY_TESTS_EXPANSION_CASE_HPP
