#include "support/arrival_case.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ferry::test {
namespace {

std::int64_t draw(std::mt19937_64& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

}  // namespace

std::string ArrivalCase::name() const {
  return fmt::format("N={} K={} R={} T={} M={} L={} alignment={}", num_rows, num_topk, num_ranks, num_tokens,
                     max_tokens, num_local(), alignment);
}

ArrivalResults ArrivalCase::expected() const {
  ArrivalResults results;
  results.rows_through_rank.assign(size(num_ranks), 0);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int32_t rank = source[size(2 * row)];
    const std::int32_t token = source[size(2 * row + 1)];
    int last = -1;
    for (int k = 0; k < num_topk; ++k) {
      if (ids[size(row * num_topk + k)] >= 0) last = k;
    }
    const bool spare = rank < 0;
    results.origin.push_back(spare ? -1 : static_cast<std::int32_t>(max_tokens * rank + token));
    results.origin.push_back(spare ? -1 : num_topk * rank + last);
    results.origin.insert(results.origin.end(), size(num_topk), -1);
    for (int through = rank; !spare && through < num_ranks; ++through) ++results.rows_through_rank[size(through)];
  }
  std::int64_t end = 0;
  for (const std::int32_t rows : rows_of_expert) {
    end += rows;
    while (end % alignment != 0) ++end;
    results.expert_ends.push_back(static_cast<std::int32_t>(end));
  }
  results.sent_idx = sent;
  return results;
}

ArrivalResults ArrivalCase::spoiled() const {
  constexpr int kNoResult = -7;
  ArrivalResults results = expected();
  std::ranges::fill(results.origin, kNoResult);
  std::ranges::fill(results.rows_through_rank, kNoResult);
  std::ranges::fill(results.expert_ends, kNoResult);
  std::ranges::fill(results.sent_idx, kNoResult);
  return results;
}

ArrivalCase draw_arrival_case(std::mt19937_64& random, std::int64_t max_rows, int max_ranks) {
  ArrivalCase one;
  one.num_ranks = static_cast<int>(draw(random, 1, max_ranks));
  one.num_topk = static_cast<int>(draw(random, 1, 32));
  one.max_tokens = draw(random, 1, 1000);
  one.alignment = draw(random, 0, 1) == 0 ? 1 : draw(random, 1, 130);
  one.num_tokens = draw(random, 0, 4) == 0 ? 0 : draw(random, 1, max_rows);
  one.num_rows = draw(random, 0, 4) == 0 ? 0 : draw(random, 1, max_rows);
  const std::int64_t num_used = draw(random, 0, 2) == 0 ? one.num_rows : draw(random, 0, one.num_rows);
  std::vector<std::int32_t> ranks;
  for (std::int64_t row = 0; row < num_used; ++row) {
    ranks.push_back(static_cast<std::int32_t>(draw(random, 0, one.num_ranks - 1)));
  }
  std::ranges::sort(ranks);
  for (std::int64_t row = 0; row < one.num_rows; ++row) {
    one.source.push_back(row < num_used ? ranks[size(row)] : -1);
    one.source.push_back(row < num_used ? static_cast<std::int32_t>(draw(random, 0, one.max_tokens - 1)) : -1);
    for (int k = 0; k < one.num_topk; ++k) one.ids.push_back(draw(random, -2, 5));
  }
  const std::int64_t num_local = draw(random, 1, 100);
  for (std::int64_t expert = 0; expert < num_local; ++expert) {
    one.rows_of_expert.push_back(static_cast<std::int32_t>(draw(random, 0, 300)));
  }
  for (std::int64_t entry = 0; entry < one.num_tokens * one.num_topk; ++entry) {
    one.sent.push_back(draw(random, -1, 300));
  }
  return one;
}

}  // namespace ferry::test
