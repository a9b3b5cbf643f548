/// When what several ends send to each other has arrived.

#include "ucx_card/wire.hpp"

#include <gtest/gtest.h>

#include <cstdint>

namespace ferry::test {
namespace {

using ucx_card::Wire;

constexpr std::uint64_t kNow = 1000;

TEST(UcxCardWire, CarriesOneAfterTheOtherToOneEnd) {
  Wire sends;
  Wire receives;
  EXPECT_EQ(Wire::carry(sends, &receives, kNow, 20), kNow + 20);
  EXPECT_EQ(Wire::carry(sends, &receives, kNow, 30), kNow + 50);
  EXPECT_EQ(Wire::carry(sends, &receives, kNow + 60, 10), kNow + 70);
}

TEST(UcxCardWire, KeepsTheOrderOfAWordBehindMore) {
  Wire sends;
  Wire receives;
  ASSERT_EQ(Wire::carry(sends, &receives, kNow, 20), kNow + 20);
  EXPECT_EQ(Wire::carry(sends, &receives, kNow, 0), kNow + 21);
}

TEST(UcxCardWire, SharesTheWireOfAnEndThatReceivesFromTwo) {
  Wire first;
  Wire second;
  Wire receives;
  EXPECT_EQ(Wire::carry(first, &receives, kNow, 20), kNow + 20);
  EXPECT_EQ(Wire::carry(second, &receives, kNow, 20), kNow + 40);
}

TEST(UcxCardWire, UsesWhatABusyReceiverLeavesFree) {
  Wire other;
  Wire sends;
  Wire busy;
  Wire free;
  ASSERT_EQ(Wire::carry(other, &busy, kNow, 20), kNow + 20);
  ASSERT_EQ(Wire::carry(sends, &busy, kNow, 10), kNow + 30);
  // 20 before what waits for the busy end, and 5 behind it.
  EXPECT_EQ(Wire::carry(sends, &free, kNow, 25), kNow + 35);
  EXPECT_EQ(Wire::carry(other, &free, kNow, 10), kNow + 30);  // in the gap between the two parts
}

TEST(UcxCardWire, HasNoOtherEndInAnotherProcess) {
  Wire sends;
  EXPECT_EQ(Wire::carry(sends, nullptr, kNow, 20), kNow + 20);
  EXPECT_EQ(Wire::carry(sends, nullptr, kNow, 20), kNow + 40);
}

}  // namespace
}  // namespace ferry::test
