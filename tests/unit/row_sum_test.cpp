/// Sums of combine with each instruction set of this machine, compared with the formula computed element by element
/// without fused operations of a compiler or a C library.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/rows/row_sum.hpp"

namespace ferry::cpu {
namespace {

/// a * b + c rounded once: the product of two f32 is exact in f64, and rounding the sum to odd there keeps all bits
/// that rounding to f32 needs (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
/// using rounding to odd", 2008).
float exact_fma(float a, float b, float c) {
  const double product = double{a} * double{b};
  const double addend = c;
  const double sum = product + addend;
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  const double from_addend = sum - product;
  const double error = (product - (sum - from_addend)) + (addend - from_addend);  // Knuth's two-sum
  auto bits = std::bit_cast<std::uint64_t>(sum);
  if (error != 0.0 && (bits & 1U) == 0) {
    // Toward the exact sum: up in magnitude if the error has the sign of the sum.
    if ((error > 0.0) == (sum > 0.0)) {
      ++bits;
    } else {
      --bits;
    }
  }
  return static_cast<float>(std::bit_cast<double>(bits));
}

float separate_multiply_add(float a, float b, float c) {
  const float product = a * b;
  return product + c;
}

struct Bf16Rows {
  using Element = std::uint16_t;
  static constexpr const char* kName = "bf16";
  static RowSumFunction function(const RowSumVariant& variant) { return variant.bf16; }
  static float load(Element bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  static Element store(float value) {
    if (std::isnan(value)) return 0x7FFF;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t low = bits & 0xFFFFU;
    std::uint32_t high = bits >> 16;
    if (low > 0x8000U || (low == 0x8000U && (high & 1U) != 0)) ++high;
    return static_cast<Element>(high);
  }
};

struct Float32Rows {
  using Element = std::uint32_t;
  static constexpr const char* kName = "f32";
  static RowSumFunction function(const RowSumVariant& variant) { return variant.f32; }
  static float load(Element bits) { return std::bit_cast<float>(bits); }
  static Element store(float value) { return std::isnan(value) ? 0x7FFFFFFFU : std::bit_cast<Element>(value); }
};

template <typename Rows>
struct Terms {
  using Element = typename Rows::Element;

  std::vector<std::vector<Element>> rows;
  std::vector<float> weights;

  template <typename MultiplyAdd>
  [[nodiscard]] std::vector<Element> expected(std::size_t num_elements, bool weighted, MultiplyAdd multiply_add) const {
    std::vector<Element> out(num_elements);
    for (std::size_t i = 0; i < num_elements; ++i) {
      float acc = 0.0F;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const float value = Rows::load(rows[r][i]);
        acc = weighted ? multiply_add(weights[r], value, acc) : acc + value;
      }
      out[i] = Rows::store(acc);
    }
    return out;
  }

  /// Sums of these rows in groups, one up to each of `ends`. Each group's sum is rounded before it is added.
  [[nodiscard]] std::vector<Element> expected_of_groups(std::size_t num_elements,
                                                        const std::vector<std::size_t>& ends) const {
    std::vector<float> totals(num_elements);
    std::size_t first = 0;
    for (const std::size_t end : ends) {
      Terms group;
      for (; first < end; ++first) {
        group.rows.push_back(rows[first]);
        group.weights.push_back(weights[first]);
      }
      const std::vector<Element> sum = group.expected(num_elements, true, exact_fma);
      for (std::size_t i = 0; i < num_elements; ++i) totals[i] += Rows::load(sum[i]);
    }
    std::vector<Element> out(num_elements);
    for (std::size_t i = 0; i < num_elements; ++i) out[i] = Rows::store(totals[i]);
    return out;
  }

  void check(std::size_t num_elements, bool weighted) const {
    compare(num_elements, weighted, nullptr, expected(num_elements, weighted, exact_fma));
  }
  void check_groups(std::size_t num_elements, const std::vector<std::size_t>& ends) const {
    compare(num_elements, true, &ends, expected_of_groups(num_elements, ends));
  }

  void compare(std::size_t num_elements, bool weighted, const std::vector<std::size_t>* ends,
               const std::vector<Element>& want) const {
    std::vector<const std::byte*> pointers;
    for (const auto& row : rows) pointers.push_back(reinterpret_cast<const std::byte*>(row.data()));
    std::size_t num_variants = 0;
    const RowSumVariant* variants = row_sum_variants(&num_variants);
    for (std::size_t v = 0; v < num_variants; ++v) {
      if (!variants[v].available) continue;
      std::vector<Element> out(num_elements + 1, 0xAAAA);
      Rows::function(variants[v])({pointers.data(), weighted ? weights.data() : nullptr, rows.size(),
                                   reinterpret_cast<std::byte*>(out.data()), num_elements * sizeof(Element),
                                   ends != nullptr ? ends->data() : nullptr, ends != nullptr ? ends->size() : 0});
      EXPECT_EQ(out.back(), 0xAAAA) << variants[v].name << " wrote past its row";
      out.pop_back();
      for (std::size_t i = 0; i < num_elements; ++i) {
        if (out[i] == want[i]) continue;
        ADD_FAILURE() << variants[v].name << ' ' << Rows::kName << ", " << rows.size() << " rows of " << num_elements
                      << ", weighted " << weighted << ", in groups " << (ends != nullptr) << ": element " << i
                      << " is bits " << out[i] << ", not " << want[i];
        break;
      }
    }
  }
};

/// Terms of any bits, including NaN, infinities and subnormals.
template <typename Rows>
Terms<Rows> any_terms(std::size_t num_rows, std::size_t num_elements, std::mt19937_64& random) {
  Terms<Rows> terms;
  for (std::size_t r = 0; r < num_rows; ++r) {
    auto& row = terms.rows.emplace_back(num_elements);
    for (auto& value : row) value = static_cast<typename Rows::Element>(random());
    terms.weights.push_back(static_cast<float>(random() % 1000) / 700.0F);
  }
  return terms;
}

/// Rows in pairs, the second with the first one's weight negated. Their sum is the error of rounding the product, which
/// disappears if the product is rounded by itself. No larger value hides it, even in bf16: a row without a partner,
/// such as a bias row of weight 1, is as small as these errors.
template <typename Rows>
Terms<Rows> cancelling_terms(std::size_t num_rows, std::size_t num_elements, bool biased, std::mt19937_64& random) {
  std::uniform_real_distribution<float> between(0.5F, 1.5F);
  // The weight's last bit is set, so that products need more bits than f32 has.
  const auto any_weight = [&] { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(between(random)) | 1U); };
  Terms<Rows> terms;
  const auto add_row = [&](float scale, float weight) {
    auto& row = terms.rows.emplace_back(num_elements);
    for (auto& value : row) value = Rows::store(scale * between(random));
    terms.weights.push_back(weight);
  };
  if (biased) add_row(0x1p-34F, 1.0F);
  for (std::size_t r = 0; r < num_rows / 2; ++r) {
    add_row(1.0F, any_weight());
    const std::vector<typename Rows::Element> same = terms.rows.back();
    const float negated = -terms.weights.back();
    terms.rows.push_back(same);
    terms.weights.push_back(negated);
  }
  if (num_rows % 2 != 0) add_row(0x1p-34F, any_weight());
  return terms;
}

/// Row lengths in bytes, all multiples of 16: below any vector, each remainder of the widest vector (64 bytes of
/// result), whole blocks of each instruction set, and blocks followed by vectors and a remainder.
class RowSums : public testing::TestWithParam<std::size_t> {
 protected:
  template <typename Rows>
  void check_any() {
    const std::size_t num_elements = GetParam() / sizeof(typename Rows::Element);
    std::mt19937_64 random(num_elements);
    for (const std::size_t num_rows : {0U, 1U, 2U, 5U, 32U}) {
      const auto terms = any_terms<Rows>(num_rows, num_elements, random);
      for (const bool weighted : {false, true}) terms.check(num_elements, weighted);
    }
  }

  /// One group of all rows, one group of each row, no rows, and groups as ranks have them.
  template <typename Rows>
  void check_groups() {
    const std::size_t num_elements = GetParam() / sizeof(typename Rows::Element);
    std::mt19937_64 random(num_elements + 1);
    const std::vector<std::vector<std::size_t>> groups = {
        {0}, {1}, {5}, {1, 2, 3, 4, 5}, {2, 3}, {3, 4, 8}, {1, 2, 4, 5, 7, 8}, {31, 32}};
    for (const auto& ends : groups) {
      any_terms<Rows>(ends.back(), num_elements, random).check_groups(num_elements, ends);
      cancelling_terms<Rows>(ends.back(), num_elements, false, random).check_groups(num_elements, ends);
    }
  }

  template <typename Rows>
  void check_cancelling() {
    const std::size_t num_elements = GetParam() / sizeof(typename Rows::Element);
    std::mt19937_64 random(num_elements);
    for (const std::size_t num_rows : {2U, 3U, 8U, 32U}) {
      for (const bool biased : {false, true}) {
        const auto terms = cancelling_terms<Rows>(num_rows, num_elements, biased, random);
        const auto fused = terms.expected(num_elements, true, exact_fma);
        const auto separate = terms.expected(num_elements, true, separate_multiply_add);
        std::size_t num_different = 0;
        for (std::size_t i = 0; i < num_elements; ++i) num_different += fused[i] != separate[i] ? 1U : 0U;
        EXPECT_GT(num_different, num_elements / 2) << "these values would not detect an unfused operation";
        terms.check(num_elements, true);
        terms.check(num_elements, false);
      }
    }
  }
};

TEST_P(RowSums, OfAnyBf16AreTheFormulasBitsOnEachInstructionSet) { check_any<Bf16Rows>(); }
TEST_P(RowSums, OfAnyF32AreTheFormulasBitsOnEachInstructionSet) { check_any<Float32Rows>(); }
TEST_P(RowSums, OfBf16RoundEachWeightedTermOnce) { check_cancelling<Bf16Rows>(); }
TEST_P(RowSums, OfF32RoundEachWeightedTermOnce) { check_cancelling<Float32Rows>(); }

TEST_P(RowSums, OfGroupsOfBf16AreRoundedByGroup) { check_groups<Bf16Rows>(); }
TEST_P(RowSums, OfGroupsOfF32AreAddedByGroup) { check_groups<Float32Rows>(); }

INSTANTIATE_TEST_SUITE_P(RowBytes, RowSums,
                         testing::Values(16, 32, 48, 64, 80, 128, 240, 256, 272, 512, 528, 784, 1024, 1072, 14336));

TEST(RowSums, FloatRowsAreSummedWithoutRoundingTwice) {
  const std::vector<float> a = {1.0F, 1e30F, NAN, -0.0F};
  const std::vector<float> b = {0x1p-24F, -1e30F, 1.0F, -0.0F};
  const std::byte* rows[] = {reinterpret_cast<const std::byte*>(a.data()),
                             reinterpret_cast<const std::byte*>(b.data())};
  std::vector<float> out(4);
  choose_row_sum(DType::kFloat32)({rows, nullptr, 2, reinterpret_cast<std::byte*>(out.data()), 16});
  EXPECT_EQ(out[0], 1.0F) << "half an ulp rounds to even";
  EXPECT_EQ(out[1], 0.0F);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(out[2]), 0x7FFFFFFFU);
  EXPECT_FALSE(std::signbit(out[3])) << "sums start from +0";
}

/// The oracle uses this function.
TEST(Fma, OfTheCLibraryIsExact) {
  std::mt19937 random(1);
  for (int i = 0; i < 1'000'000; ++i) {
    const auto a = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    const auto b = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    float c = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (i % 2 == 0) c = -a * b;  // where separate rounding of the product shows
    const float want = exact_fma(a, b, c);
    const float got = std::fma(a, b, c);
    ASSERT_TRUE(std::isnan(want) ? std::isnan(got)
                                 : std::bit_cast<std::uint32_t>(want) == std::bit_cast<std::uint32_t>(got))
        << a << " * " << b << " + " << c << " = " << got << ", not " << want;
  }
}

}  // namespace
}  // namespace ferry::cpu
