#ifndef FERRY_TESTS_EXPANSION_CASE_HPP
#define FERRY_TESTS_EXPANSION_CASE_HPP

/// Random inputs of arrival_tables with `expand`, of expand_rows and reduce_rows, and what must come out, found row by
/// row.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "support/arrival_case.hpp"

namespace ferry::test {

/// What arrival_tables writes.
struct ExpansionTables {
  std::vector<std::int32_t> origin;          ///< [N, 2 + K]
  std::vector<std::int32_t> expert_ends;     ///< [L]
  std::vector<std::int32_t> rows_of_expert;  ///< [L]
  std::vector<std::int8_t> last_equal;       ///< [N, K]

  /// In place of every value one that nobody writes, so that what is left of it shows.
  void spoil();
  bool operator==(const ExpansionTables&) const = default;
};

/// What expand_rows writes, gaps cleared.
struct ExpandedRows {
  std::vector<std::uint16_t> x;           ///< [P, H]
  std::vector<std::int32_t> scales;       ///< [P, S], by row
  std::vector<float> weights;             ///< [P]
  std::vector<std::int32_t> row_of_slot;  ///< [P]

  /// In place of every value one that nobody writes, so that what is left of it shows.
  void spoil();
  bool operator==(const ExpandedRows&) const = default;
};

/// What reduce_rows writes.
struct ReducedRows {
  std::vector<std::uint16_t> rounded;  ///< [N, H]
  std::vector<float> exact;            ///< [N, H]
  std::vector<float> weights;          ///< [N, K]

  /// In place of every value one that nobody writes, so that what is left of it shows.
  void spoil();
  bool operator==(const ReducedRows&) const = default;
};

struct ExpansionCase {
  ArrivalCase arrivals;                       ///< its rows_of_expert are those of its ids
  std::int64_t num_slots = 0;                 ///< P: as many as there are, and some
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
