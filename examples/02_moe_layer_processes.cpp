// The layer of the first example over processes, one rank each, on memory that the ranks share.
//
// Start any number of them; each needs its rank, and all need the same secret:
//   for r in 0 1 2 3; do FERRY_RANK=$r FERRY_NUM_RANKS=4 FERRY_SECRET=choose-one ./02_moe_layer_processes & done; wait
// or let a launcher number them (torchrun, mpirun, srun):
//   FERRY_SECRET=choose-one mpirun -np 4 ./02_moe_layer_processes
//
// Unlike the first example it handles errors without exceptions, keeps its buffers in symmetric memory, which needs no
// staging copy, and receives every token once, however many of its experts this rank owns.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr std::int64_t kNumTokens = 16;  // T, on each rank
constexpr std::int64_t kHidden = 64;     // H
constexpr std::int64_t kNumTopk = 2;     // K
constexpr std::int64_t kNumExperts = 8;  // E

// Stands in for the expert's matrix products: each expert computes something different.
float expert(std::int64_t expert_id, float x) { return static_cast<float>(expert_id + 1) * x; }

// Symmetric memory for `num_rows` rows, and views of it.
ferry::Result<ferry::Buffer> allocate_rows(ferry::Group& group, std::int64_t num_rows) {
  return group.allocate(static_cast<std::size_t>(num_rows * kHidden) * sizeof(float));
}
std::span<float> floats(const ferry::Buffer& buffer) {
  return {static_cast<float*>(buffer.data()), buffer.size_bytes() / sizeof(float)};
}
ferry::TensorView rows_view(const ferry::Buffer& buffer, std::int64_t num_rows) {
  return {buffer.data(), ferry::DType::kFloat32, {num_rows, kHidden}};
}

ferry::Status run_rank(ferry::Group& group, float& worst) {
  ferry::Result<ferry::Buffer> x = allocate_rows(group, kNumTokens);
  if (!x.ok()) return x.status();
  std::vector<std::int32_t> topk_idx(kNumTokens * kNumTopk);
  std::vector<float> topk_weights(kNumTokens * kNumTopk);
  for (std::size_t i = 0; i < kNumTokens * kHidden; ++i) {
    floats(*x)[i] = std::sin(static_cast<float>(i) + static_cast<float>(group.rank()));
  }
  for (std::size_t i = 0; i < topk_idx.size(); ++i) {
    topk_idx[i] = static_cast<std::int32_t>((3 * static_cast<std::int64_t>(i) + group.rank()) % kNumExperts);
    topk_weights[i] = i % 2 == 0 ? 0.75F : 0.25F;
  }

  ferry::RouteInput choice;
  choice.topk_idx = {topk_idx.data(), ferry::DType::kInt32, {kNumTokens, kNumTopk}};
  choice.topk_weights = {topk_weights.data(), ferry::DType::kFloat32, {kNumTokens, kNumTopk}};
  ferry::RouteOptions options;
  options.num_experts = kNumExperts;
  const ferry::Result<ferry::Routing> routing = group.route(choice, options);
  if (!routing.ok()) return routing.status();
  const std::int64_t num_rows = routing->num_recv_rows();

  // A token that picked two experts of this rank arrives once, together with their local ids and weights.
  ferry::Result<ferry::Buffer> rows = allocate_rows(group, num_rows);
  if (!rows.ok()) return rows.status();
  std::vector<std::int32_t> recv_idx(static_cast<std::size_t>(num_rows * kNumTopk));
  std::vector<float> recv_weights(recv_idx.size());
  ferry::DispatchInput send;
  send.x = rows_view(*x, kNumTokens);
  ferry::DispatchOutput receive;
  receive.x = rows_view(*rows, num_rows);
  receive.topk_idx = {recv_idx.data(), ferry::DType::kInt32, {num_rows, kNumTopk}};
  receive.topk_weights = {recv_weights.data(), ferry::DType::kFloat32, {num_rows, kNumTopk}};
  if (ferry::Status status = group.dispatch(*routing, send, receive); !status.ok()) return status;

  // Each row becomes the weighted sum of its local experts; combine then adds the ranks' sums.
  const auto expert_ids = routing->local_expert_ids();
  for (std::size_t i = 0; i < static_cast<std::size_t>(num_rows * kHidden); ++i) {
    float sum = 0;
    for (std::size_t entry = i / kHidden * kNumTopk; entry < (i / kHidden + 1) * kNumTopk; ++entry) {
      if (recv_idx[entry] < 0) continue;  // that expert is on another rank
      sum += recv_weights[entry] * expert(expert_ids[static_cast<std::size_t>(recv_idx[entry])], floats(*rows)[i]);
    }
    floats(*rows)[i] = sum;
  }

  std::vector<float> out(kNumTokens * kHidden);
  ferry::CombineInput results;
  results.x = rows_view(*rows, num_rows);
  ferry::CombineOutput sums;
  sums.x = {out.data(), ferry::DType::kFloat32, {kNumTokens, kHidden}};
  if (ferry::Status status = group.combine(*routing, results, sums); !status.ok()) return status;

  for (std::size_t i = 0; i < out.size(); ++i) {
    float expected = 0;
    for (std::size_t entry = i / kHidden * kNumTopk; entry < (i / kHidden + 1) * kNumTopk; ++entry) {
      expected += topk_weights[entry] * expert(topk_idx[entry], floats(*x)[i]);
    }
    worst = std::max(worst, std::abs(out[i] - expected));
  }
  std::printf("rank %d of %d: %lld rows, largest difference %g\n", group.rank(), group.num_ranks(),
              static_cast<long long>(num_rows), static_cast<double>(worst));
  return group.destroy();
}

int fail(const ferry::Status& status) {
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return 2;
}

}  // namespace

int main() {
  const auto options = ferry::tcp_bootstrap_options_from_environment();
  if (!options.ok()) return fail(options.status());
  const auto bootstrap = ferry::create_tcp_bootstrap(*options);
  if (!bootstrap.ok()) return fail(bootstrap.status());
  // With GPUs "auto" would choose backend "cuda", which takes only GPU memory; all tensors here are in host memory.
  const auto group = ferry::Group::create(*bootstrap, {.backend = "cpu"});
  if (!group.ok()) return fail(group.status());

  float worst = 0;
  if (const ferry::Status status = run_rank(**group, worst); !status.ok()) return fail(status);
  constexpr float kTolerance = 1e-5F;  // sums of two numbers below 8: a few roundings of 2^-21 each
  return worst <= kTolerance ? 0 : 1;
}
