// A program of an outside project: two ranks as threads send one token each to the other's expert and back.
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr int kNumRanks = 2;
constexpr std::int64_t kHidden = 4;  // 4 x f32: the smallest row

bool run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap) {
  const auto group = ferry::Group::create(bootstrap, {.backend = "cpu", .arena_bytes = std::size_t{64} << 20}).value();
  const auto rank = static_cast<float>(group->rank());

  // One expert per rank; every token chooses the other rank's.
  const std::array<std::int64_t, 1> topk_idx{1 - group->rank()};
  ferry::RouteInput choice;
  choice.topk_idx = {topk_idx.data(), ferry::DType::kInt64, {1, 1}};
  ferry::RouteOptions options;
  options.num_experts = kNumRanks;
  const auto routing = group->route(choice, options).value();

  const std::vector<float> x(kHidden, 1.0F + rank);
  std::vector<float> recv_x(static_cast<std::size_t>(routing.num_recv_rows() * kHidden));
  ferry::DispatchInput send;
  send.x = {x.data(), ferry::DType::kFloat32, {1, kHidden}};
  ferry::DispatchOutput recv;
  recv.x = {recv_x.data(), ferry::DType::kFloat32, {routing.num_recv_rows(), kHidden}};
  ferry::throw_if_error(group->dispatch(routing, send, recv));
  if (recv_x != std::vector<float>(kHidden, 2.0F - rank)) return false;  // the other rank's token

  for (float& value : recv_x) value *= 10.0F;  // the expert
  std::vector<float> out(kHidden);
  ferry::CombineInput results;
  results.x = {recv_x.data(), ferry::DType::kFloat32, {routing.num_recv_rows(), kHidden}};
  ferry::CombineOutput sums;
  sums.x = {out.data(), ferry::DType::kFloat32, {1, kHidden}};
  ferry::throw_if_error(group->combine(routing, results, sums));
  ferry::throw_if_error(group->destroy());
  return out == std::vector<float>(kHidden, 10.0F * (1.0F + rank));
}

}  // namespace

int main() {
  const auto bootstraps = ferry::create_in_process_bootstraps(kNumRanks).value();
  std::array<bool, kNumRanks> good{};
  {
    std::array<std::jthread, kNumRanks> ranks;
    for (std::size_t r = 0; r < kNumRanks; ++r) ranks[r] = std::jthread([&, r] { good[r] = run_rank(bootstraps[r]); });
  }
  if (!good[0] || !good[1]) return 1;
  std::printf("ok %s\n", ferry::version());
  return 0;
}
