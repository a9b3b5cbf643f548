#include "support/expansion_case.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>

namespace ferry::test {
namespace {

constexpr std::int8_t kUnwritten = -7;
constexpr std::uint16_t kUnwrittenRow = 0xAAAA;

template <typename Value, typename... Vectors>
void fill_all(Value value, Vectors&... vectors) {
  (vectors.assign(vectors.size(), value), ...);
}

constexpr std::uint16_t kNan = 0x7FC1;

std::int64_t draw(std::mt19937_64& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}

std::size_t size(std::int64_t value) { return static_cast<std::size_t>(value); }

float float_of(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

/// Rounds a number to nearest-even.
std::uint16_t rounded(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

/// Draws numbers of such different magnitudes that the order of a sum changes its result.
std::uint16_t draw_number(std::mt19937_64& random) {
  return rounded(std::ldexp(static_cast<float>(draw(random, -256, 256)), static_cast<int>(draw(random, -24, 12))));
}

/// Returns true if choice k of a row is the local expert and the row holds a token.
bool has(const ArrivalCase& one, std::int64_t row, std::int64_t k, std::int64_t expert) {
  return one.source[size(2 * row)] >= 0 && one.ids[size(row * one.num_topk + k)] == expert;
}

/// Last choice of a row that is the expert; -1: none.
int last_choice(const ArrivalCase& one, std::int64_t row, std::int64_t expert) {
  int last = -1;
  for (int k = 0; k < one.num_topk; ++k) {
    if (has(one, row, k, expert)) last = k;
  }
  return last;
}

}  // namespace

void ExpansionTables::spoil() { fill_all(kUnwritten, origin, expert_ends, rows_of_expert, last_equal); }

void ExpandedRows::spoil() {
  fill_all(kUnwritten, scales, weights, row_of_slot);
  fill_all(kUnwrittenRow, x);
}

void ReducedRows::spoil() {
  fill_all(kUnwritten, exact, weights);
  fill_all(kUnwrittenRow, rounded);
}

std::string ExpansionCase::name() const {
  return fmt::format("{} P={} H={} S={}", arrivals.name(), num_slots, hidden, num_scales);
}

ExpansionTables ExpansionCase::tables() const {
  const ArrivalCase& one = arrivals;
  ExpansionTables tables{one.expected().origin, {}, {}, std::vector<std::int8_t>(one.ids.size(), -1)};
  std::int32_t next = 0;
  for (std::int64_t expert = 0; expert < one.num_local(); ++expert) {
    const std::int32_t start = next;
    for (std::int64_t row = 0; row < one.num_rows; ++row) {
      const int last = last_choice(one, row, expert);
      if (last < 0) continue;
      tables.origin[size(row * (2 + one.num_topk) + 2 + last)] = next++;
      for (int k = 0; k < one.num_topk; ++k) {
        if (has(one, row, k, expert)) tables.last_equal[size(row * one.num_topk + k)] = static_cast<std::int8_t>(last);
      }
    }
    tables.expert_ends.push_back(next);
    tables.rows_of_expert.push_back(next - start);
    while (next % one.alignment != 0) ++next;
  }
  return tables;
}

ExpandedRows ExpansionCase::expanded(const ExpansionTables& tables) const {
  const int num_topk = arrivals.num_topk;
  ExpandedRows out{std::vector<std::uint16_t>(size(num_slots * hidden)),
                   std::vector<std::int32_t>(size(num_slots * num_scales)), std::vector<float>(size(num_slots)),
                   std::vector<std::int32_t>(size(num_slots), -1)};
  for (std::int64_t row = 0; row < arrivals.num_rows; ++row) {
    for (int k = 0; k < num_topk; ++k) {
      const std::int32_t slot = tables.origin[size(row * (2 + num_topk) + 2 + k)];
      if (slot < 0) continue;
      for (std::int64_t i = 0; i < hidden; ++i) out.x[size(slot * hidden + i)] = x[size(row * hidden + i)];
      for (std::int64_t i = 0; i < num_scales; ++i) {
        out.scales[size(slot * num_scales + i)] = scales[size(row * num_scales + i)];
      }
      for (int other = 0; other < num_topk; ++other) {
        if (tables.last_equal[size(row * num_topk + other)] == k) {
          out.weights[size(slot)] += weights[size(row * num_topk + other)];
        }
      }
      out.row_of_slot[size(slot)] = static_cast<std::int32_t>(row);
    }
  }
  return out;
}

ReducedRows ExpansionCase::reduced(const ExpansionTables& tables) const {
  const int num_topk = arrivals.num_topk;
  ReducedRows out;
  for (std::int64_t row = 0; row < arrivals.num_rows; ++row) {
    const std::int32_t* const slots = tables.origin.data() + row * (2 + num_topk) + 2;
    for (std::int64_t i = 0; i < hidden; ++i) {
      float sum = 0;
      for (int k = 0; k < num_topk; ++k) {
        if (slots[k] >= 0) sum += float_of(expert_outputs[size(slots[k] * hidden + i)]);
      }
      out.exact.push_back(sum);
      out.rounded.push_back(rounded(sum));
    }
    for (int k = 0; k < num_topk; ++k) {
      const int last = tables.last_equal[size(row * num_topk + k)];
      out.weights.push_back(last < 0 ? 0.0F : expert_weights[size(slots[last])]);
    }
  }
  return out;
}

ExpansionCase draw_expansion_case(std::mt19937_64& random, std::int64_t max_rows, int max_experts) {
  ExpansionCase one;
  ArrivalCase& arrivals = one.arrivals;
  arrivals = draw_arrival_case(random, max_rows, 40);
  arrivals.alignment = draw(random, 0, 1) == 0 ? 1 : draw(random, 1, 20);
  const std::int64_t num_local = draw(random, 1, max_experts);
  // Ids beyond the local experts mean no expert, as do ids below 0.
  for (std::int64_t& id : arrivals.ids) id = draw(random, 0, 2) == 0 ? -1 : draw(random, -2, num_local);
  arrivals.rows_of_expert.assign(size(num_local), 0);
  for (std::int64_t row = 0; row < arrivals.num_rows; ++row) {
    for (std::int64_t expert = 0; expert < num_local; ++expert) {
      if (last_choice(arrivals, row, expert) >= 0) ++arrivals.rows_of_expert[size(expert)];
    }
  }
  one.num_slots = draw(random, 0, 1) == 0 ? 0 : draw(random, 0, 30);
  for (const std::int32_t rows : arrivals.rows_of_expert) {
    one.num_slots += (rows + arrivals.alignment - 1) / arrivals.alignment * arrivals.alignment;
  }
  one.hidden = 8 * (draw(random, 0, 3) == 0 ? draw(random, 60, 200) : draw(random, 1, 40));
  one.num_scales = draw(random, 0, 1) == 0 ? 0 : draw(random, 1, 70);
  for (std::int64_t i = 0; i < arrivals.num_rows * one.hidden; ++i) one.x.push_back(draw_number(random));
  for (std::int64_t i = 0; i < arrivals.num_rows * one.num_scales; ++i) {
    one.scales.push_back(static_cast<std::int32_t>(draw(random, 1, 1 << 30)));
  }
  for (std::int64_t i = 0; i < arrivals.num_rows * arrivals.num_topk; ++i) {
    one.weights.push_back(float_of(draw_number(random)));
  }
  const ExpansionTables tables = one.tables();
  const std::vector<std::int32_t> rows = one.expanded(tables).row_of_slot;
  for (const std::int32_t row : rows) {
    for (std::int64_t i = 0; i < one.hidden; ++i) one.expert_outputs.push_back(row < 0 ? kNan : draw_number(random));
    one.expert_weights.push_back(row < 0 ? float_of(kNan) : float_of(draw_number(random)));
  }
  return one;
}

}  // namespace ferry::test
