#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "ferry/types.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kHighest = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kTwoToThe32 = std::int64_t{1} << 32;

TEST(TensorView, CountsElementsAndStrides) {
  const ConstTensorView view(nullptr, DType::kBfloat16, {2, 3, 5});
  EXPECT_EQ(view.num_elements(), 30);
  EXPECT_EQ(view.stride(0), 15);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(ConstTensorView().num_elements(), 0);
  EXPECT_EQ(ConstTensorView(nullptr, DType::kInt32, {7, 0}).num_elements(), 0);
}

/// A product that wraps around could be zero, and a call would take the view as empty.
TEST(TensorView, ProductsOfHugeExtentsDoNotWrap) {
  for (const std::int64_t huge : {kTwoToThe32, kHighest}) {
    const ConstTensorView view(nullptr, DType::kFloat32, {huge, huge, huge});
    EXPECT_EQ(view.num_elements(), kHighest);
    EXPECT_EQ(view.stride(0), kHighest);
    EXPECT_EQ(ConstTensorView(nullptr, DType::kFloat32, {huge, huge, 0}).num_elements(), 0);
  }
}

}  // namespace
}  // namespace ferry::test
