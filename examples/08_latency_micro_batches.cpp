// Latency mode with two micro-batches: while the tokens of one are in transit, the other one computes.
//
// Four ranks, threads of this program, decode through a few layers. Every call is split into a send half, which waits
// for no other rank, and a receive half; the computation of one micro-batch lies between the halves of the other's
// calls:
//
//   batch A   attention  send ~~~~~~~~~~~~ receive  experts  send ~~~~~~~~~~~~~~~~~~ receive  attention  send ~~~
//   batch B                     attention  send ~~~~~~~~~~~~~~~~~~ receive  experts  send ~~~~~~~~~~~~~~~~~ receive
//
// On a GPU rows travel during the waves of the picture. On CPU ranks no thread but the rank's own could move rows: the
// receive half does all of it, and this program only shows the order of the calls.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr int kNumRanks = 4;
constexpr int kNumLayers = 3;
constexpr std::int64_t kNumTokens = 8;   // T, of each micro-batch and rank
constexpr std::int64_t kHidden = 64;     // H
constexpr std::int64_t kNumTopk = 2;     // K
constexpr std::int64_t kNumExperts = 8;  // E
constexpr std::int64_t kNumLocal = kNumExperts / kNumRanks;
constexpr std::int64_t kCapacity = kNumRanks * kNumTokens;  // C: enough if every token picks the same expert

// Stand-ins for the real computations: attention for everything else in a layer, expert for an expert's matrix
// products.
float attention(int layer, float x) { return std::sin(x + static_cast<float>(layer)); }
float expert(std::int64_t expert_id, float x) { return static_cast<float>(expert_id + 1) / kNumExperts * x; }
std::int64_t pick(int rank, int batch, int layer, std::int64_t entry) {
  return (3 * entry + rank + 5 * batch + 2 * layer) % kNumExperts;
}
float weight_of(std::int64_t entry) { return entry % kNumTopk == 0 ? 0.75F : 0.25F; }

// One micro-batch of one rank. None of its memory may be touched between a split call and its receive half.
class MicroBatch {
 public:
  MicroBatch(std::shared_ptr<ferry::Group> group, int batch) : group_(std::move(group)), batch_(batch) {
    for (std::int64_t i = 0; i < kNumTokens * kHidden; ++i) {
      x_.push_back(std::sin(static_cast<float>(i) + static_cast<float>(group_->rank() + 10 * batch_)));
    }
    expected_ = x_;
    for (std::int64_t i = 0; i < kNumTokens * kNumTopk; ++i) topk_weights_.push_back(weight_of(i));
  }

  // Runs attention, and sends the tokens to their experts.
  void send_tokens(int layer) {
    for (float& value : x_) value = attention(layer, value);
    for (std::int64_t i = 0; i < kNumTokens * kNumTopk; ++i) {
      topk_idx_[static_cast<std::size_t>(i)] = pick(group_->rank(), batch_, layer, i);
    }
    ferry::LatencyDispatchInput in;
    in.x = {x_.data(), ferry::DType::kFloat32, {kNumTokens, kHidden}};
    in.topk_idx = {topk_idx_.data(), ferry::DType::kInt64, {kNumTokens, kNumTopk}};
    in.topk_weights = {topk_weights_.data(), ferry::DType::kFloat32, {kNumTokens, kNumTopk}};
    ferry::LatencyDispatchOutput out;
    out.x = {slab_.data(), ferry::DType::kFloat32, {kNumLocal, kCapacity, kHidden}};
    ferry::LatencyDispatchOptions options;
    options.num_experts = kNumExperts;
    options.max_tokens = kNumTokens;
    options.slab_capacity = kCapacity;
    options.split = true;
    routing_ = group_->latency_dispatch(in, out, options).value();
  }

  // Receives tokens of all ranks; the experts work in place, and their rows are sent back.
  void run_experts() {
    ferry::throw_if_error(group_->latency_receive(routing_));
    const auto counts = routing_.num_rows_per_local_expert();
    const auto expert_ids = routing_.local_expert_ids();
    for (std::size_t local = 0; local < counts.size(); ++local) {
      float* rows = slab_.data() + static_cast<std::int64_t>(local) * kCapacity * kHidden;
      for (std::int64_t i = 0; i < counts[local] * kHidden; ++i) rows[i] = expert(expert_ids[local], rows[i]);
    }
    ferry::LatencyCombineInput in;
    in.x = {slab_.data(), ferry::DType::kFloat32, {kNumLocal, kCapacity, kHidden}};
    ferry::LatencyCombineOutput out;
    out.x = {x_.data(), ferry::DType::kFloat32, {kNumTokens, kHidden}};
    ferry::throw_if_error(group_->latency_combine(routing_, in, out, {}, {.split = true}));
  }

  // Receives the sums, which are the next layer's tokens. Returns the largest difference from computing all experts
  // here.
  float receive_sums(int layer) {
    ferry::throw_if_error(group_->latency_receive(routing_));
    float worst = 0;
    for (std::size_t i = 0; i < x_.size(); ++i) {
      const float token = attention(layer, expected_[i]);
      expected_[i] = 0;
      const std::int64_t first = static_cast<std::int64_t>(i) / kHidden * kNumTopk;
      for (std::int64_t entry = first; entry < first + kNumTopk; ++entry) {
        expected_[i] += weight_of(entry) * expert(pick(group_->rank(), batch_, layer, entry), token);
      }
      worst = std::max(worst, std::abs(x_[i] - expected_[i]));
    }
    return worst;
  }

 private:
  std::shared_ptr<ferry::Group> group_;
  int batch_;
  std::vector<float> x_;         // [T, H]
  std::vector<float> expected_;  // [T, H]
  std::vector<std::int64_t> topk_idx_ = std::vector<std::int64_t>(kNumTokens * kNumTopk);
  std::vector<float> topk_weights_;
  std::vector<float> slab_ = std::vector<float>(kNumLocal * kCapacity * kHidden);  // [L, C, H]
  ferry::Routing routing_;
};

float run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap) {
  const std::shared_ptr<ferry::Group> group = ferry::Group::create(bootstrap, {.backend = "cpu"}).value();
  MicroBatch a(group, 0);
  MicroBatch b(group, 1);
  float worst = 0;
  a.send_tokens(0);
  for (int layer = 0; layer < kNumLayers; ++layer) {
    b.send_tokens(layer);                            // while A's tokens travel to the experts
    a.run_experts();                                 // while B's do
    b.run_experts();                                 // while A's rows travel back
    worst = std::max(worst, a.receive_sums(layer));  // while B's do
    if (layer + 1 < kNumLayers) a.send_tokens(layer + 1);
    worst = std::max(worst, b.receive_sums(layer));
  }
  ferry::throw_if_error(group->destroy());
  std::printf("rank %d: %d layers, two micro-batches, largest difference %g\n", group->rank(), kNumLayers,
              static_cast<double>(worst));
  return worst;
}

}  // namespace

int main() {
  const auto bootstraps = ferry::create_in_process_bootstraps(kNumRanks).value();
  std::array<float, kNumRanks> worst{};
  {
    std::vector<std::jthread> ranks;
    for (std::size_t r = 0; r < kNumRanks; ++r) {
      ranks.emplace_back([&, r] { worst[r] = run_rank(bootstraps[r]); });
    }
  }
  constexpr float kTolerance =
      1e-5F;  // sums of two numbers below 1, through three layers: a few roundings of 2^-24 each
  return *std::max_element(worst.begin(), worst.end()) <= kTolerance ? 0 : 1;
}
