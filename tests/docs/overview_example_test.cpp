// The worked example of docs/overview.md, number by number.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr int kNumRanks = 2;
constexpr std::int64_t kNumTopk = 2;

/// Results of one rank, in the notation of the document: its received rows and its slots.
struct Seen {
  std::string rows;
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> recv_topk_idx;
  std::int64_t num_rows = 0;
};

std::string name_rows(const ferry::ConstTensorView& source) {
  const auto* entries = static_cast<const std::int32_t*>(source.data);
  std::string text;
  for (std::int64_t row = 0; row < source.extent(0); ++row) {
    const std::int32_t rank = entries[2 * row];
    if (rank < 0) {
      text += '-';
    } else {
      text += static_cast<char>('a' + rank);
      text += std::to_string(entries[2 * row + 1]);
    }
    text += ' ';
  }
  return text;
}

Seen run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap, const ferry::RouteOptions& options) {
  const std::vector<std::vector<std::int64_t>> picks = {{0, 2, 1, 0, 3, -1}, {1, 3, 2, 3}};
  const auto group = ferry::Group::create(bootstrap, {.backend = "cpu"}).value();
  const auto& mine = picks[static_cast<std::size_t>(group->rank())];
  const std::int64_t num_tokens = static_cast<std::int64_t>(mine.size()) / kNumTopk;

  ferry::RouteInput choice;
  choice.topk_idx = {mine.data(), ferry::DType::kInt64, {num_tokens, kNumTopk}};
  const ferry::Routing routing = group->route(choice, options).value();

  Seen seen;
  seen.num_rows = routing.num_recv_rows();
  seen.rows = name_rows(routing.source());
  const auto* slots = static_cast<const std::int32_t*>(routing.slots().data);
  seen.slots.assign(slots, slots + mine.size());

  if (options.layout == ferry::Layout::kTokens) {
    constexpr std::int64_t kHidden = 4;
    const std::vector<float> x(static_cast<std::size_t>(num_tokens * kHidden));
    std::vector<float> recv_x(static_cast<std::size_t>(seen.num_rows * kHidden));
    seen.recv_topk_idx.resize(static_cast<std::size_t>(seen.num_rows * kNumTopk));
    ferry::DispatchInput send;
    send.x = {x.data(), ferry::DType::kFloat32, {num_tokens, kHidden}};
    ferry::DispatchOutput receive;
    receive.x = {recv_x.data(), ferry::DType::kFloat32, {seen.num_rows, kHidden}};
    receive.topk_idx = {seen.recv_topk_idx.data(), ferry::DType::kInt32, {seen.num_rows, kNumTopk}};
    ferry::throw_if_error(group->dispatch(routing, send, receive));
  }
  ferry::throw_if_error(group->destroy());
  return seen;
}

std::vector<Seen> run(const ferry::RouteOptions& options) {
  const auto bootstraps = ferry::create_in_process_bootstraps(kNumRanks).value();
  std::vector<Seen> seen(kNumRanks);
  std::vector<std::jthread> ranks;
  for (std::size_t r = 0; r < kNumRanks; ++r) {
    ranks.emplace_back([&, r] { seen[r] = run_rank(bootstraps[r], options); });
  }
  ranks.clear();
  return seen;
}

ferry::RouteOptions with_layout(ferry::Layout layout) {
  ferry::RouteOptions options;
  options.num_experts = 4;
  options.layout = layout;
  return options;
}

TEST(OverviewExample, Tokens) {
  const std::vector<Seen> seen = run(with_layout(ferry::Layout::kTokens));
  EXPECT_EQ(seen[0].rows, "a0 a1 b0 ");
  EXPECT_EQ(seen[1].rows, "a0 a2 b0 b1 ");
  EXPECT_EQ(seen[0].num_rows, 3);
  EXPECT_EQ(seen[1].num_rows, 4);
  EXPECT_EQ(seen[0].slots, (std::vector<std::int32_t>{0, 0, 1, 1, 1, -1}));
  EXPECT_EQ(seen[1].slots, (std::vector<std::int32_t>{2, 2, 3, 3}));
  EXPECT_EQ(seen[0].recv_topk_idx, (std::vector<std::int32_t>{0, -1, 1, 0, 1, -1}));
}

TEST(OverviewExample, Experts) {
  ferry::RouteOptions options = with_layout(ferry::Layout::kExperts);
  options.expert_alignment = 2;
  const std::vector<Seen> seen = run(options);
  EXPECT_EQ(seen[0].rows, "a0 a1 a1 b0 ");
  EXPECT_EQ(seen[1].rows, "a0 b1 a2 b0 b1 - ");
  EXPECT_EQ(seen[0].num_rows, 4);
  EXPECT_EQ(seen[1].num_rows, 6);
}

TEST(OverviewExample, Slab) {
  ferry::RouteOptions options = with_layout(ferry::Layout::kSlab);
  options.slab_capacity = 3;
  const std::vector<Seen> seen = run(options);
  EXPECT_EQ(seen[0].rows, "a0 a1 - a1 b0 - ");
  EXPECT_EQ(seen[1].rows, "a0 b1 - a2 b0 b1 ");
}

}  // namespace
