/// Load of experts over a window of calls, and the time that ranks wait for each other.

#include "ferry/load.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <vector>

#include "ferry/group.hpp"

namespace ferry {
namespace {

constexpr int kNumRanks = 2;

/// Runs `body(rank, bootstrap)` on one thread for each rank.
template <typename Body>
void on_ranks(Body body) {
  const auto bootstraps = create_in_process_bootstraps(kNumRanks).value();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    threads.emplace_back([&, rank] { body(rank, bootstraps[static_cast<std::size_t>(rank)]); });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Routes these ids with K = 1.
Status route(Group& group, const std::vector<std::int64_t>& ids, const LoadCounters& counters) {
  RouteOptions options;
  options.num_experts = 3;
  options.placement.physical_to_logical = {0, 1, 2, 0};
  options.counters = counters;
  const auto num_tokens = static_cast<std::int64_t>(ids.size());
  return group.route({ConstTensorView(ids.data(), DType::kInt64, {num_tokens, 1}), {}}, options).status();
}

TEST(LoadWindow, SumsOverCallsAndRanks) {
  on_ranks([](int rank, const std::shared_ptr<Bootstrap>& bootstrap) {
    const auto group = Group::create(bootstrap, {.backend = "cpu", .arena_bytes = std::size_t{1} << 24}).value();
    LoadWindow window = LoadWindow::create(2, 3, 4).value();
    for (int call = 0; call < 2; ++call) {
      EXPECT_TRUE(route(*group, rank == 0 ? std::vector<std::int64_t>{0, 0, 2} : std::vector<std::int64_t>{0, 1},
                        window.counters(1))
                      .ok());
    }
    const LoadSummary sum = window.sum(*bootstrap, group->wait_times_ns()).value();
    EXPECT_EQ(sum.logical, (std::vector<std::int64_t>{0, 0, 0, 6, 2, 2}));
    // Expert 0 has a home on each rank.
    EXPECT_EQ(sum.physical, (std::vector<std::int64_t>{0, 0, 0, 0, 4, 2, 2, 2}));
    ASSERT_EQ(sum.wait_times_ns.size(), 4U);
    EXPECT_EQ(sum.wait_times_ns[0], 0);  // no rank waits for itself
    EXPECT_EQ(sum.wait_times_ns[3], 0);
    const auto json = nlohmann::json::parse(sum.to_json());
    EXPECT_EQ(json["logical"], nlohmann::json({{0, 0, 0}, {6, 2, 2}}));
    EXPECT_EQ(json["physical"], nlohmann::json({{0, 0, 0, 0}, {4, 2, 2, 2}}));
    EXPECT_EQ(json["wait_times_ns"].size(), 2U);
    EXPECT_EQ(json["layers"], 2);
    window.reset();
    EXPECT_EQ(std::accumulate(window.logical().begin(), window.logical().end(), std::int64_t{0}), 0);
    EXPECT_EQ(window.sum(*bootstrap).value().wait_times_ns.size(), 0U);
    EXPECT_TRUE(group->destroy().ok());
  });
}

TEST(LoadWindow, ARankThatComesLateShowsInTheOthersWaits) {
  constexpr int kMostCalls = 1000;
  on_ranks([](int rank, const std::shared_ptr<Bootstrap>& bootstrap) {
    const auto group = Group::create(bootstrap, {.backend = "cpu", .arena_bytes = std::size_t{1} << 24}).value();
    // The system decides how late rank 1 is, so calls repeat until rank 0 has slept.
    std::byte has_waited{0};
    for (int call = 0; call < kMostCalls && has_waited == std::byte{0}; ++call) {
      std::int64_t busy = 0;
      for (std::int64_t i = 0; rank == 1 && i < call * 10'000; ++i) busy += i % 7;
      EXPECT_GE(busy, 0);
      ASSERT_TRUE(route(*group, {0}, {}).ok());
      const std::vector<std::int64_t> waits = group->wait_times_ns();
      ASSERT_EQ(waits.size(), 2U);
      EXPECT_EQ(waits[static_cast<std::size_t>(rank)], 0);
      const std::byte seen{static_cast<unsigned char>(waits[1] > 0 ? 1 : 0)};
      has_waited = bootstrap->all_gather(std::span(&seen, 1), kDefaultTimeoutNs).value()[0][0];
    }
    EXPECT_EQ(has_waited, std::byte{1});
    EXPECT_TRUE(group->destroy().ok());
  });
}

TEST(LoadWindow, TakesCountsFromElsewhere) {
  LoadWindow window = LoadWindow::create(1, 2).value();
  const std::vector<std::int64_t> counts = {3, 4};
  EXPECT_TRUE(window.add(counts).ok());
  EXPECT_TRUE(window.add(counts).ok());
  EXPECT_EQ(window.logical()[1], 8);
  EXPECT_EQ(window.add(counts, counts).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(window.add(std::span(counts).first(1)).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(window.logical()[1], 8);
  EXPECT_FALSE(window.counters(1).logical.present());
  EXPECT_EQ(LoadWindow::create(0, 2).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(LoadWindow::create(1, 0).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(LoadWindow::create(1, 1, -1).status().code(), ErrorCode::kInvalidArgument);
}

TEST(LoadWindow, WindowsOfOtherSizesAreRefusedOnEveryRank) {
  on_ranks([](int rank, const std::shared_ptr<Bootstrap>& bootstrap) {
    const LoadWindow window = LoadWindow::create(1, 2 + rank).value();
    const Status status = window.sum(*bootstrap).status();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(status.message().find("num_experts: rank 0 has 2, rank 1 has 3"), std::string_view::npos)
        << status.to_string();
  });
}

}  // namespace
}  // namespace ferry
