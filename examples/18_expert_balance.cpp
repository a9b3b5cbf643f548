// An engine's loop over two Mixture-of-Experts layers whose experts move according to their load: count the experts
// that tokens choose, compute a better placement every few steps, move the weights that it moves, and continue with the
// new tables. Four ranks, as threads of this program; each has room for six of the sixteen experts, so that busy ones
// get replicas.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr int kNumRanks = 4;
constexpr std::int64_t kNumLayers = 2;
constexpr std::int64_t kNumTokens = 64;  // T, on each rank
constexpr std::int64_t kHidden = 32;     // H
constexpr std::int64_t kNumTopk = 2;     // K
constexpr std::int64_t kNumExperts = 16;
constexpr std::int64_t kNumPlaces = 24;  // physical experts: places for the weights of one expert
constexpr std::int64_t kPlacesPerRank = kNumPlaces / kNumRanks;
constexpr int kNumSteps = 48;
constexpr int kBalanceEvery = 8;
constexpr std::int64_t kMaxMoves = 6;  // per layer and balancing, except the first, which fills the empty places

using Row = std::vector<float>;

// Stands in for an expert's matrices: each channel has its own factor.
float weight_of(std::int64_t layer, std::int64_t expert, std::int64_t channel) {
  return std::sin(static_cast<float>(100 * layer + 7 * expert + channel));
}

ferry::ConstTensorView table_view(const std::vector<std::int32_t>& placement) {
  return {placement.data(), ferry::DType::kInt32, {kNumLayers, kNumPlaces}};
}

class Engine {
 public:
  explicit Engine(std::shared_ptr<ferry::Bootstrap> bootstrap)
      : bootstrap_(std::move(bootstrap)),
        group_(ferry::Group::create(bootstrap_, {.backend = "cpu"}).value()),
        load_(kNumLayers * kNumExperts, 0),
        weights_(kNumLayers * kPlacesPerRank, Row(kHidden)) {
    // At first every expert has one home, four per rank; the other places are empty.
    for (std::int64_t layer = 0; layer < kNumLayers; ++layer) {
      for (std::int64_t place = 0; place < kNumPlaces; ++place) {
        const std::int64_t index = place % kPlacesPerRank;
        const std::int64_t expert = place / kPlacesPerRank * (kNumExperts / kNumRanks) + index;
        placement_.push_back(index < kNumExperts / kNumRanks ? static_cast<std::int32_t>(expert) : -1);
        if (place / kPlacesPerRank != group_->rank() || placement_.back() < 0) continue;
        for (std::int64_t h = 0; h < kHidden; ++h) weights(layer, index)[h] = weight_of(layer, expert, h);
      }
    }
  }

  // Returns the largest difference from computing all experts here.
  float run_layer(std::int64_t layer, int step) {
    std::vector<std::int64_t> experts = choose(layer, step);
    std::vector<float> x(kNumTokens * kHidden);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::cos(static_cast<float>(i) + static_cast<float>(step));
    std::vector<float> shares(experts.size(), 0.5F);

    // Route picks a home for each chosen expert, and counts the choices as well.
    ferry::RouteInput choice;
    choice.topk_idx = {experts.data(), ferry::DType::kInt64, {kNumTokens, kNumTopk}};
    choice.topk_weights = {shares.data(), ferry::DType::kFloat32, {kNumTokens, kNumTopk}};
    ferry::RouteOptions options;
    options.num_experts = kNumExperts;
    options.layout = ferry::Layout::kExperts;
    const auto first_place = placement_.begin() + layer * kNumPlaces;
    options.placement.physical_to_logical.assign(first_place, first_place + kNumPlaces);
    options.placement.choice = ferry::ReplicaChoice::kRoundRobin;  // the balancer assumes it
    options.counters.logical = {
        &load_[static_cast<std::size_t>(layer * kNumExperts)], ferry::DType::kInt64, {kNumExperts}};
    const ferry::Routing routing = group_->route(choice, options).value();
    std::vector<float> rows = dispatch(routing, x);
    const auto offsets = routing.expert_row_offsets();
    for (std::int64_t index = 0; index < kPlacesPerRank; ++index) {
      const auto at = static_cast<std::size_t>(index);
      for (std::int64_t i = offsets[at] * kHidden; i < offsets[at + 1] * kHidden; ++i) {
        rows[static_cast<std::size_t>(i)] *= weights(layer, index)[i % kHidden];
      }
    }
    num_rows_ += routing.num_recv_rows();
    std::vector<float> out(x.size());
    ferry::CombineInput results;
    results.x = {rows.data(), ferry::DType::kFloat32, {routing.num_recv_rows(), kHidden}};
    ferry::CombineOutput sums;
    sums.x = {out.data(), ferry::DType::kFloat32, {kNumTokens, kHidden}};
    ferry::throw_if_error(group_->combine(routing, results, sums, {}, {.weighted = true}));

    float worst = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      float expected = 0;
      for (std::size_t k = 0; k < kNumTopk; ++k) {
        const std::int64_t expert = experts[i / kHidden * kNumTopk + k];
        expected += 0.5F * x[i] * weight_of(layer, expert, static_cast<std::int64_t>(i % kHidden));
      }
      worst = std::max(worst, std::abs(out[i] - expected));
    }
    return worst;
  }

  // Collective. Every rank computes the same placement from the same loads.
  void balance() {
    const std::vector<std::int64_t> load = sum_over_ranks(load_);
    ferry::BalanceOptions options;
    options.num_replicas = kNumPlaces;
    options.num_ranks = kNumRanks;
    options.previous = table_view(placement_);
    options.max_moves = kMaxMoves;
    options.move_weight = 0.005;  // each move must lower the highest load by 0.5 % of a rank's mean
    const ferry::ConstTensorView load_view(load.data(), ferry::DType::kInt64, {kNumLayers, kNumExperts});
    const ferry::Balance placed = ferry::balance(load_view, options).value();
    const ferry::MovePlan plan =
        ferry::plan_moves(table_view(placement_), table_view(placed.physical_to_logical), {kNumExperts, kNumRanks})
            .value();
    for (std::int64_t layer = 0; layer < kNumLayers; ++layer) move(layer, plan.copies);
    placement_ = placed.physical_to_logical;
    std::fill(load_.begin(), load_.end(), 0);
    num_moves_ = plan.num_remote;
  }

  // Rows of the busiest rank since the last call, divided by the mean of all ranks. Collective.
  double unevenness() {
    const auto rows = gather({num_rows_});
    num_rows_ = 0;
    std::int64_t total = 0;
    std::int64_t most = 0;
    for (const auto& of_rank : rows) total += of_rank[0], most = std::max(most, of_rank[0]);
    return static_cast<double>(most * kNumRanks) / static_cast<double>(total);
  }

  int rank() const { return group_->rank(); }
  std::int64_t num_moves() const { return num_moves_; }
  void close() { ferry::throw_if_error(group_->destroy()); }

 private:
  float* weights(std::int64_t layer, std::int64_t index) {
    return weights_[static_cast<std::size_t>(layer * kPlacesPerRank + index)].data();
  }

  // Stands in for a router: a few experts get most tokens, and other experts after half of the steps.
  std::vector<std::int64_t> choose(std::int64_t layer, int step) const {
    std::mt19937 random(static_cast<unsigned>(step * kNumRanks + group_->rank()));
    const std::int64_t first = step < kNumSteps / 2 ? layer : layer + 9;
    std::vector<std::int64_t> experts;
    for (std::int64_t token = 0; token < kNumTokens; ++token) {
      const auto square = [&] { return static_cast<std::int64_t>(random() % 4 * (random() % 6)); };
      const std::int64_t a = (first + square()) % kNumExperts;
      const std::int64_t b = (first + square()) % kNumExperts;
      experts.push_back(a);
      experts.push_back(a == b ? (b + 1) % kNumExperts : b);
    }
    return experts;
  }

  std::vector<float> dispatch(const ferry::Routing& routing, const std::vector<float>& x) {
    std::vector<float> rows(static_cast<std::size_t>(routing.num_recv_rows() * kHidden));
    ferry::DispatchInput send;
    send.x = {x.data(), ferry::DType::kFloat32, {static_cast<std::int64_t>(x.size()) / kHidden, kHidden}};
    ferry::DispatchOutput receive;
    receive.x = {rows.data(), ferry::DType::kFloat32, {routing.num_recv_rows(), kHidden}};
    ferry::throw_if_error(group_->dispatch(routing, send, receive));
    return rows;
  }

  // Weights travel as tokens whose experts are the places. They arrive in a separate buffer, so the order of the copies
  // does not matter; a program that writes directly into places follows the waves of the plan.
  void move(std::int64_t layer, const std::vector<ferry::ExpertCopy>& copies) {
    std::vector<float> sent;
    std::vector<std::int64_t> places;
    std::vector<std::int32_t> arriving;
    for (const ferry::ExpertCopy& copy : copies) {
      if (copy.layer != layer || copy.to_staging) continue;
      if (copy.to_rank == rank()) arriving.push_back(copy.to);
      if (copy.from_rank != rank()) continue;
      const float* source = weights(layer, home_here(layer, copy.expert));
      sent.insert(sent.end(), source, source + kHidden);
      places.push_back(copy.to);
    }
    ferry::RouteInput choice;
    choice.topk_idx = {places.data(), ferry::DType::kInt64, {static_cast<std::int64_t>(places.size()), 1}};
    ferry::RouteOptions options;
    options.num_experts = kNumPlaces;
    options.layout = ferry::Layout::kExperts;
    const ferry::Routing routing = group_->route(choice, options).value();
    const std::vector<float> rows = dispatch(routing, sent);
    for (const std::int32_t place : arriving) {
      const std::int64_t index = place % kPlacesPerRank;
      const std::int64_t row = routing.expert_row_offsets()[static_cast<std::size_t>(index)];
      std::copy_n(rows.begin() + row * kHidden, kHidden, weights(layer, index));
    }
  }

  // Place of an expert on this rank, before the move.
  std::int64_t home_here(std::int64_t layer, std::int32_t expert) const {
    const auto first = placement_.begin() + layer * kNumPlaces + group_->rank() * kPlacesPerRank;
    return std::find(first, first + kPlacesPerRank, expert) - first;
  }

  // Any all-gather or all-reduce of the engine will do.
  std::vector<std::vector<std::int64_t>> gather(const std::vector<std::int64_t>& mine) {
    const auto bytes = bootstrap_->all_gather(std::as_bytes(std::span(mine)), ferry::kDefaultTimeoutNs).value();
    std::vector<std::vector<std::int64_t>> all(bytes.size(), std::vector<std::int64_t>(mine.size()));
    for (std::size_t r = 0; r < bytes.size(); ++r) std::memcpy(all[r].data(), bytes[r].data(), bytes[r].size());
    return all;
  }

  std::vector<std::int64_t> sum_over_ranks(const std::vector<std::int64_t>& mine) {
    std::vector<std::int64_t> sum(mine.size(), 0);
    for (const auto& values : gather(mine)) {
      std::transform(values.begin(), values.end(), sum.begin(), sum.begin(), std::plus<>());
    }
    return sum;
  }

  std::shared_ptr<ferry::Bootstrap> bootstrap_;
  std::shared_ptr<ferry::Group> group_;
  std::vector<std::int32_t> placement_;  // [layers, places]: the expert in each place, -1: none
  std::vector<std::int64_t> load_;       // [layers, E] chosen by this rank's tokens since experts last moved
  std::vector<Row> weights_;             // [layers, places of this rank]
  std::int64_t num_rows_ = 0;
  std::int64_t num_moves_ = 0;
};

struct Outcome {
  float worst = 0;
  std::vector<double> unevenness;  // one entry per kBalanceEvery steps
};

Outcome run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap) {
  Engine engine(bootstrap);
  Outcome outcome;
  for (int step = 0; step < kNumSteps; ++step) {
    for (std::int64_t layer = 0; layer < kNumLayers; ++layer) {
      outcome.worst = std::max(outcome.worst, engine.run_layer(layer, step));
    }
    if ((step + 1) % kBalanceEvery != 0) continue;
    outcome.unevenness.push_back(engine.unevenness());
    engine.balance();
    if (engine.rank() != 0) continue;
    std::printf("steps %2d to %2d: busiest rank %.2f times the mean; %lld experts then move\n",
                step + 1 - kBalanceEvery, step, outcome.unevenness.back(), static_cast<long long>(engine.num_moves()));
  }
  engine.close();
  return outcome;
}

}  // namespace

int main() {
  const auto bootstraps = ferry::create_in_process_bootstraps(kNumRanks).value();
  std::vector<Outcome> outcomes(kNumRanks);
  {
    std::vector<std::jthread> ranks;
    for (std::size_t r = 0; r < kNumRanks; ++r) {
      ranks.emplace_back([&, r] { outcomes[r] = run_rank(bootstraps[r]); });
    }
  }
  float worst = 0;
  for (const Outcome& outcome : outcomes) worst = std::max(worst, outcome.worst);
  const auto& unevenness = outcomes.front().unevenness;
  std::printf("largest difference %g\n", static_cast<double>(worst));
  constexpr float kTolerance = 1e-5F;  // sums of two numbers below 1
  return worst <= kTolerance && unevenness.back() < 0.8 * unevenness.front() ? 0 : 1;
}
