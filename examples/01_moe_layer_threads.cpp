// A Mixture-of-Experts layer over four ranks that are threads of this program. No launcher, no GPU, nothing to set up.
//
// Each rank holds 16 tokens and two of the eight experts. A token is sent to its two experts on the ranks that own them
// (dispatch), and their outputs are returned and summed with the router's weights (combine).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr int kNumRanks = 4;
constexpr std::int64_t kNumTokens = 16;  // T, on each rank
constexpr std::int64_t kHidden = 64;     // H
constexpr std::int64_t kNumTopk = 2;     // K
constexpr std::int64_t kNumExperts = 8;  // E

// Stands in for the expert's matrix products: each expert computes something different.
float expert(std::int64_t expert_id, float x) { return static_cast<float>(expert_id + 1) * x; }

// The whole layer on one rank. Returns the largest difference from computing all experts locally.
float run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap) {
  // With GPUs "auto" would choose backend "cuda", which takes only GPU memory; all tensors here are in host memory.
  const std::shared_ptr<ferry::Group> group = ferry::Group::create(bootstrap, {.backend = "cpu"}).value();

  // This rank's tokens, and its router's choice: ids of experts of the whole group, and their weights.
  std::vector<float> x(kNumTokens * kHidden);
  std::vector<std::int64_t> topk_idx(kNumTokens * kNumTopk);
  std::vector<float> topk_weights(kNumTokens * kNumTopk);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i) + static_cast<float>(group->rank()));
  for (std::size_t i = 0; i < topk_idx.size(); ++i) {
    topk_idx[i] = (3 * static_cast<std::int64_t>(i) + group->rank()) % kNumExperts;
    topk_weights[i] = i % 2 == 0 ? 0.75F : 0.25F;
  }

  // Route: exchange counts and assign every row. kExperts groups the rows by expert, ready for a grouped matrix
  // product.
  ferry::RouteInput choice;
  choice.topk_idx = {topk_idx.data(), ferry::DType::kInt64, {kNumTokens, kNumTopk}};
  choice.topk_weights = {topk_weights.data(), ferry::DType::kFloat32, {kNumTokens, kNumTopk}};
  ferry::RouteOptions options;
  options.num_experts = kNumExperts;
  options.layout = ferry::Layout::kExperts;
  const ferry::Routing routing = group->route(choice, options).value();
  const std::int64_t num_rows = routing.num_recv_rows();

  // Dispatch: the tokens for this rank's experts arrive in `rows`.
  std::vector<float> rows(static_cast<std::size_t>(num_rows * kHidden));
  ferry::DispatchInput send;
  send.x = {x.data(), ferry::DType::kFloat32, {kNumTokens, kHidden}};
  ferry::DispatchOutput receive;
  receive.x = {rows.data(), ferry::DType::kFloat32, {num_rows, kHidden}};
  ferry::throw_if_error(group->dispatch(routing, send, receive));

  // The experts work in place, each on its own group of rows.
  const auto offsets = routing.expert_row_offsets();
  const auto expert_ids = routing.local_expert_ids();
  for (std::size_t local = 0; local < expert_ids.size(); ++local) {
    for (std::int64_t i = offsets[local] * kHidden; i < offsets[local + 1] * kHidden; ++i) {
      auto& value = rows[static_cast<std::size_t>(i)];
      value = expert(expert_ids[local], value);
    }
  }

  // Combine: the experts' rows are returned to their source ranks and summed there, weighted.
  std::vector<float> out(x.size());
  ferry::CombineInput results;
  results.x = {rows.data(), ferry::DType::kFloat32, {num_rows, kHidden}};
  ferry::CombineOutput sums;
  sums.x = {out.data(), ferry::DType::kFloat32, {kNumTokens, kHidden}};
  ferry::throw_if_error(group->combine(routing, results, sums, {}, {.weighted = true}));
  ferry::throw_if_error(group->destroy());

  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    float expected = 0;
    for (std::size_t entry = i / kHidden * kNumTopk; entry < (i / kHidden + 1) * kNumTopk; ++entry) {
      expected += topk_weights[entry] * expert(topk_idx[entry], x[i]);
    }
    worst = std::max(worst, std::abs(out[i] - expected));
  }
  std::printf("rank %d: %lld rows from all ranks, largest difference %g\n", group->rank(),
              static_cast<long long>(num_rows), static_cast<double>(worst));
  return worst;
}

}  // namespace

int main() {
  const auto bootstraps = ferry::create_in_process_bootstraps(kNumRanks).value();
  std::vector<float> worst(kNumRanks);
  {
    std::vector<std::jthread> ranks;
    for (std::size_t r = 0; r < kNumRanks; ++r) {
      ranks.emplace_back([&, r] { worst[r] = run_rank(bootstraps[r]); });
    }
  }
  constexpr float kTolerance = 1e-5F;  // sums of two numbers below 8: a few roundings of 2^-21 each
  return *std::max_element(worst.begin(), worst.end()) <= kTolerance ? 0 : 1;
}
