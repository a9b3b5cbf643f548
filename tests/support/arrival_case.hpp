#ifndef FERRY_TESTS_ARRIVAL_CASE_HPP
#define FERRY_TESTS_ARRIVAL_CASE_HPP

/// Random inputs of arrival_tables, with expected results counted row by row.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace ferry::test {

struct ArrivalResults {
  std::vector<std::int32_t> origin;             ///< [N, 2 + K]
  std::vector<std::int32_t> rows_through_rank;  ///< [R]
  std::vector<std::int32_t> expert_ends;        ///< [L]
  std::vector<std::int64_t> sent_idx;           ///< [T, K]

  bool operator==(const ArrivalResults&) const = default;
};

struct ArrivalCase {
  int num_ranks = 1;
  int num_topk = 1;
  std::int64_t max_tokens = 1;
  std::int64_t alignment = 1;
  std::int64_t num_tokens = 0;               ///< T
  std::int64_t num_rows = 0;                 ///< N, some of them without a token
  std::vector<std::int32_t> source;          ///< [N, 2]
  std::vector<std::int64_t> ids;             ///< [N, K], any values in rows without a token
  std::vector<std::int32_t> rows_of_expert;  ///< [L]
  std::vector<std::int64_t> sent;            ///< [T, K]

  std::int64_t num_local() const { return static_cast<std::int64_t>(rows_of_expert.size()); }
  std::string name() const;
  ArrivalResults expected() const;
  /// Results of the right sizes filled with other numbers.
  ArrivalResults spoiled() const;
};

ArrivalCase draw_arrival_case(std::mt19937_64& random, std::int64_t max_rows, int max_ranks);

}  // namespace ferry::test

#endif  // FERRY_TESTS_ARRIVAL_CASE_HPP
