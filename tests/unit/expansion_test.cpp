/// expand_rows and reduce_rows on host memory, and the tables that arrival_tables makes for them. The emulator and
/// tests/gpu/expansion_test.cpp run the kernels on the same cases.

#include "ferry/expansion.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <vector>

#include "ferry/arrival_tables.hpp"
#include "support/expansion_case.hpp"
#include "support/sanitizers.hpp"

namespace ferry {
namespace {

using test::ExpandedRows;
using test::ExpansionCase;
using test::ExpansionTables;
using test::ReducedRows;
using testing::HasSubstr;

constexpr int kNumCases = test::kSanitized ? 40 : 200;

/// Vectors hold their rows of at least 16 bytes at addresses aligned to 16 bytes.
static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);

template <typename Id>
ExpansionTables make_tables(const ExpansionCase& one, DType dtype) {
  const test::ArrivalCase& arrivals = one.arrivals;
  const std::vector<Id> ids(arrivals.ids.begin(), arrivals.ids.end());
  const std::int64_t num_rows = arrivals.num_rows;
  const std::int64_t num_local = arrivals.num_local();
  ExpansionTables made = one.tables();
  made.spoil();
  const Arrivals in{.source = ConstTensorView(arrivals.source.data(), DType::kInt32, {num_rows, 2}),
                    .topk_idx = ConstTensorView(ids.data(), dtype, {num_rows, arrivals.num_topk}),
                    .rows_per_expert = ConstTensorView(arrivals.rows_of_expert.data(), DType::kInt32, {num_local})};
  ArrivalTables out;
  out.origin = TensorView(made.origin.data(), DType::kInt32, {num_rows, 2 + arrivals.num_topk});
  out.expert_ends = TensorView(made.expert_ends.data(), DType::kInt32, {num_local});
  out.rows_of_expert = TensorView(made.rows_of_expert.data(), DType::kInt32, {num_local});
  out.last_equal = TensorView(made.last_equal.data(), DType::kInt8, {num_rows, arrivals.num_topk});
  const Status status = arrival_tables(in,
                                       {.num_ranks = arrivals.num_ranks,
                                        .max_tokens = arrivals.max_tokens,
                                        .expert_alignment = arrivals.alignment,
                                        .expand = true},
                                       out);
  EXPECT_TRUE(status.ok()) << status.message();
  return made;
}

ConstTensorView slots_of(const ExpansionTables& tables, const ExpansionCase& one) {
  const std::int64_t width = 2 + one.arrivals.num_topk;
  const std::int32_t* const first = tables.origin.empty() ? nullptr : &tables.origin[2];
  return ConstTensorView(first, DType::kInt32, {one.arrivals.num_rows, one.arrivals.num_topk}, {width, 1});
}

ExpandedRows expand(const ExpansionCase& one, const ExpansionTables& tables, bool column_major, bool zero_padding) {
  const std::int64_t num_rows = one.arrivals.num_rows;
  const int num_topk = one.arrivals.num_topk;
  ExpandedRows made = one.expanded(tables);
  std::vector<std::int32_t> scales(made.scales.size(), -7);
  if (zero_padding) {
    made.spoil();
  } else {
    scales.assign(scales.size(), 0);
  }
  const std::int64_t num_slots = one.num_slots;
  const std::int64_t width = one.num_scales;
  ExpandInput in{.slots = slots_of(tables, one),
                 .x = ConstTensorView(one.x.data(), DType::kBfloat16, {num_rows, one.hidden}),
                 .weights = ConstTensorView(one.weights.data(), DType::kFloat32, {num_rows, num_topk}),
                 .last_equal = ConstTensorView(tables.last_equal.data(), DType::kInt8, {num_rows, num_topk})};
  ExpandOutput out{.x = TensorView(made.x.data(), DType::kBfloat16, {num_slots, one.hidden}),
                   .weights = TensorView(made.weights.data(), DType::kFloat32, {num_slots}),
                   .row_of_slot = TensorView(made.row_of_slot.data(), DType::kInt32, {num_slots})};
  if (width > 0) {
    in.scales = ConstTensorView(one.scales.data(), DType::kInt32, {num_rows, width});
    out.scales = TensorView(scales.data(), DType::kInt32, {num_slots, width},
                            {column_major ? 1 : width, column_major ? num_slots : 1});
  }
  const Status status = expand_rows(in, {.zero_padding = zero_padding}, out);
  EXPECT_TRUE(status.ok()) << status.message();
  for (std::int64_t slot = 0; slot < num_slots; ++slot) {
    for (std::int64_t i = 0; i < width; ++i) {
      made.scales[static_cast<std::size_t>(slot * width + i)] =
          scales[static_cast<std::size_t>(column_major ? i * num_slots + slot : slot * width + i)];
    }
  }
  return made;
}

TEST(Expansion, PutsEachExpertsRowsTogether) {
  std::mt19937_64 random(3);
  for (int i = 0; i < kNumCases; ++i) {
    const ExpansionCase one = test::draw_expansion_case(random, 60, 12);
    const ExpansionTables tables = one.tables();
    EXPECT_EQ(make_tables<std::int64_t>(one, DType::kInt64), tables) << one.name();
    EXPECT_EQ(make_tables<std::int32_t>(one, DType::kInt32), tables) << one.name();
    EXPECT_EQ(expand(one, tables, i % 2 == 0, true), one.expanded(tables)) << one.name();
    // Gaps keep the caller's contents, which are zero here.
    EXPECT_EQ(expand(one, tables, i % 2 == 0, false), one.expanded(tables)) << one.name();
  }
}

ReducedRows reduce(const ExpansionCase& one, const ExpansionTables& tables) {
  const std::int64_t num_rows = one.arrivals.num_rows;
  const int num_topk = one.arrivals.num_topk;
  ReducedRows made = one.reduced(tables);
  made.spoil();
  ReduceInput in{.slots = slots_of(tables, one),
                 .x = ConstTensorView(one.expert_outputs.data(), DType::kBfloat16, {one.num_slots, one.hidden}),
                 .last_equal = ConstTensorView(tables.last_equal.data(), DType::kInt8, {num_rows, num_topk})};
  ReduceOutput out{.x = TensorView(made.exact.data(), DType::kFloat32, {num_rows, one.hidden})};
  Status status = reduce_rows(in, {}, out);
  EXPECT_TRUE(status.ok()) << status.message();
  in.weights = ConstTensorView(one.expert_weights.data(), DType::kFloat32, {one.num_slots});
  out = {.x = TensorView(made.rounded.data(), DType::kBfloat16, {num_rows, one.hidden}),
         .weights = TensorView(made.weights.data(), DType::kFloat32, {num_rows, num_topk})};
  status = reduce_rows(in, {}, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return made;
}

TEST(Expansion, SumsEachRowsSlotsAndRoundsOnce) {
  std::mt19937_64 random(4);
  for (int i = 0; i < kNumCases; ++i) {
    const ExpansionCase one = test::draw_expansion_case(random, 60, 12);
    const ExpansionTables tables = one.tables();
    EXPECT_EQ(reduce(one, tables), one.reduced(tables)) << one.name();
  }
}

/// Two rows by token, three by expert.
struct Small {
  std::vector<std::int32_t> slots{0, 2, 1, -1};
  std::vector<std::int8_t> last_equal{0, 1, 0, -1};
  std::vector<std::uint16_t> by_token = std::vector<std::uint16_t>(16, 0x3F80);
  std::vector<std::uint16_t> by_expert = std::vector<std::uint16_t>(24, 0x3F80);
  std::vector<float> weights{1, 2, 3, 4};
  std::vector<float> sums{-7, -7, -7};
  std::vector<std::int32_t> rows{-7, -7, -7};
  ConstTensorView slot_table = ConstTensorView(slots.data(), DType::kInt32, {2, 2});
  ExpandInput in{.slots = slot_table, .x = ConstTensorView(by_token.data(), DType::kBfloat16, {2, 8})};
  ExpandOutput out{.x = TensorView(by_expert.data(), DType::kBfloat16, {3, 8})};
  ReduceInput reduce_in{.slots = slot_table, .x = ConstTensorView(by_expert.data(), DType::kBfloat16, {3, 8})};
  ReduceOutput reduce_out{.x = TensorView(by_token.data(), DType::kBfloat16, {2, 8})};
  ExpansionOptions options{};
};

TEST(Expansion, SlotsPastTheEndAreNone) {
  Small small;
  small.slots = {3, 2147483647, -2147483647, 0};
  small.in.weights = ConstTensorView(small.weights.data(), DType::kFloat32, {2, 2});
  small.out.weights = TensorView(small.sums.data(), DType::kFloat32, {3});
  ASSERT_TRUE(expand_rows(small.in, {}, small.out).ok());
  EXPECT_THAT(small.sums, testing::ElementsAre(4, 0, 0));
  small.reduce_in.weights = ConstTensorView(small.sums.data(), DType::kFloat32, {3});
  small.reduce_out.weights = TensorView(small.weights.data(), DType::kFloat32, {2, 2});
  ASSERT_TRUE(reduce_rows(small.reduce_in, {}, small.reduce_out).ok());
  EXPECT_THAT(small.weights, testing::ElementsAre(0, 0, 0, 4));
  EXPECT_EQ(small.by_token.front(), 0);
  EXPECT_EQ(small.by_token.back(), 0x3F80);
}

TEST(Expansion, AddsInTheOrderOfChoicesFromPositiveZero) {
  Small small;
  // 1 + 2^-24 + 2^-24 is 1 in f32, while 2^-24 + 2^-24 + 1 is not.
  const std::vector<std::uint16_t> values{0x3F80, 0x3380, 0x3380};
  for (std::size_t slot = 0; slot < values.size(); ++slot) {
    std::fill_n(small.by_expert.begin() + static_cast<std::ptrdiff_t>(slot) * 8, 8, values[slot]);
  }
  std::vector<float> sums(16);
  small.reduce_out.x = TensorView(sums.data(), DType::kFloat32, {2, 8});
  const std::vector<std::int32_t> slots{0, 1, 2, 1, 2, 0};
  small.reduce_in.slots = ConstTensorView(slots.data(), DType::kInt32, {2, 3});
  ASSERT_TRUE(reduce_rows(small.reduce_in, {}, small.reduce_out).ok());
  EXPECT_EQ(sums.front(), 1.0F);
  EXPECT_EQ(sums.back(), 1.0F + 0x1p-23F);
  small.by_expert.assign(small.by_expert.size(), 0x8000);
  ASSERT_TRUE(reduce_rows(small.reduce_in, {}, small.reduce_out).ok());
  EXPECT_EQ(std::bit_cast<std::uint32_t>(sums.front()), 0U);
}

/// With at most one row the row stride is unused, and may have any value.
TEST(Expansion, TakesOneRowAndNoneWithAnyStride) {
  for (const std::int64_t num_rows : {0, 1}) {
    Small small;
    small.in.slots.shape[0] = small.in.x.shape[0] = num_rows;
    small.in.slots.strides = {1, 1, 0};
    const Status status = expand_rows(small.in, small.options, small.out);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST(Expansion, RefusesWrongArgumentsAndWritesNothing) {
  const auto refused = [](auto spoil, const std::string& word, bool reduces = false) {
    Small small;
    spoil(small);
    const std::vector<std::uint16_t> before = reduces ? small.by_token : small.by_expert;
    const Status status = reduces ? reduce_rows(small.reduce_in, small.options, small.reduce_out)
                                  : expand_rows(small.in, small.options, small.out);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.message();
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
    EXPECT_EQ(reduces ? small.by_token : small.by_expert, before);
  };
  const auto reduction_refused = [&](auto spoil, const std::string& word) { refused(spoil, word, true); };
  refused([](Small& small) { small.in.slots = {}; }, "slots are");
  refused([](Small& small) { small.in.slots.dtype = DType::kInt64; }, "slots are");
  refused([](Small& small) { small.in.slots.strides = {1, 2, 0}; }, "slots are");
  refused([](Small& small) { small.in.slots.data = nullptr; }, "null");
  refused([](Small& small) { small.in.x.shape[0] = 1; }, "x is [1, 8]");
  refused(
      [](Small& small) {
        small.in.x = ConstTensorView(small.by_token.data(), DType::kBfloat16, {2, 4});
      },
      "16 bytes");
  refused([](Small& small) { small.in.x.data = small.by_token.data() + 1; }, "aligned");
  refused([](Small& small) { small.out.x.dtype = DType::kFloat16; }, "output x");
  refused(
      [](Small& small) {
        small.in.weights = ConstTensorView(small.weights.data(), DType::kFloat32, {2, 2});
      },
      "weights is present and its output is not");
  refused(
      [](Small& small) {
        small.out.scales = TensorView(small.rows.data(), DType::kInt32, {3, 1});
      },
      "scales is not present and its output is");
  refused(
      [](Small& small) {
        small.in.scales = ConstTensorView(small.weights.data(), DType::kFloat32, {2, 1});
        small.out.scales = TensorView(small.rows.data(), DType::kInt32, {3, 2});
      },
      "output scales is [3, 2]");
  refused(
      [](Small& small) {
        small.in.scales = ConstTensorView(small.weights.data(), DType::kFloat32, {2, 1});
        small.out.scales = TensorView(small.rows.data(), DType::kInt32, {3, 1});
      },
      "expected the dtype of the input's");
  refused(
      [](Small& small) {
        small.in.scales = ConstTensorView(small.weights.data(), DType::kFloat32, {2, 2});
        small.out.scales = TensorView(small.rows.data(), DType::kFloat32, {3, 2}, {1, 1});
      },
      "elements overlap");
  refused(
      [](Small& small) {
        small.in.scales = ConstTensorView(small.weights.data(), DType::kFloat32, {2, 1});
        small.out.scales = TensorView(reinterpret_cast<std::byte*>(small.rows.data()) + 2, DType::kFloat32, {3, 1});
      },
      "aligned to 4 bytes");
  refused([](Small& small) { small.in.slots.data = static_cast<const std::byte*>(small.in.slots.data) + 1; },
          "aligned to 4 bytes");
  refused(
      [](Small& small) {
        small.in.last_equal = ConstTensorView(small.last_equal.data(), DType::kInt8, {2, 1});
      },
      "last_equal is [2, 1]");
  refused([](Small& small) { small.options.zero_padding = true; }, "row_of_slot");
  refused([](Small& small) { small.out.row_of_slot = TensorView(small.rows.data(), DType::kInt32, {2}); },
          "row_of_slot is [2]");
  refused([](Small& small) { small.options.backend = "tpu"; }, "backend is \"tpu\"");
  reduction_refused([](Small& small) { small.reduce_in.x.dtype = DType::kFloat16; }, "x has dtype f16");
  reduction_refused([](Small& small) { small.reduce_out.x.dtype = DType::kFloat16; }, "output x has dtype f16");
  reduction_refused([](Small& small) { small.reduce_out.x.shape[0] = 3; }, "output x is [3, 8]");
  reduction_refused(
      [](Small& small) {
        small.reduce_out.weights = TensorView(small.weights.data(), DType::kFloat32, {2, 2});
      },
      "weights is not present and its output is");
  Small small;
  EXPECT_EQ(expand_rows(small.in, {}, small.out, Stream{&small}).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(reduce_rows(small.reduce_in, {}, small.reduce_out, Stream{&small}).code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace ferry
