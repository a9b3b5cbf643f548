#include "common/routing_source.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "common/hash.hpp"

namespace ferry::tools {

namespace {

/// Parts of the seed, so that the streams of a run are independent.
constexpr std::uint64_t kPopularityStream = 1;
constexpr std::uint64_t kChoiceStream = 2;

/// Expert ids from the most to the least popular.
std::vector<std::int64_t> popularity_order(std::int64_t num_experts, std::uint64_t seed) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  const std::uint64_t stream = derive_seed(seed, kPopularityStream);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[splitmix64(stream + i) % i]);
  }
  return order;
}

/// [num_experts] relative odds of being chosen.
std::vector<double> odds_of(RoutingKind kind, std::int64_t num_experts, std::uint64_t seed) {
  std::vector<double> odds(static_cast<std::size_t>(num_experts), 1.0);
  if (kind == RoutingKind::kZipf) {
    const auto order = popularity_order(num_experts, seed);
    for (std::size_t place = 0; place < order.size(); ++place) {
      odds[static_cast<std::size_t>(order[place])] = 1.0 / static_cast<double>(place + 1);
    }
  }
  return odds;
}

/// K draws without replacement with given odds: the K smallest of exponential variables with those rates
/// (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006).
class Sampler {
 public:
  Sampler(std::vector<double> odds, int num_topk)
      : odds_(std::move(odds)),
        keys_(odds_.size()),
        num_topk_(std::min(static_cast<std::size_t>(num_topk), odds_.size())) {}

  void draw(std::uint64_t stream, std::int64_t* ids) {
    for (std::size_t expert = 0; expert < odds_.size(); ++expert) {
      const double uniform = positive_unit_double(splitmix64(stream + expert));
      keys_[expert] = {-std::log(uniform) / odds_[expert], static_cast<std::int64_t>(expert)};
    }
    const auto end = keys_.begin() + static_cast<std::ptrdiff_t>(num_topk_);
    std::partial_sort(keys_.begin(), end, keys_.end());
    std::transform(keys_.begin(), end, ids, [](const auto& key) { return key.second; });
  }

 private:
  std::vector<double> odds_;
  std::vector<std::pair<double, std::int64_t>> keys_;
  std::size_t num_topk_;
};

/// 1/2, 1/4, 1/8, 1/16, 1/2, …: close in exponent, so that sums of their products with a bf16 value are exact in f32.
float power_of_two_weight(int k) {
  constexpr int kNumWeights = 4;
  return 0.5F / static_cast<float>(1 << (k % kNumWeights));
}

}  // namespace

RoutingTable make_routing(RoutingKind kind, const RoutingShape& shape, std::uint64_t seed, int rank) {
  RoutingTable table;
  table.num_tokens = shape.num_tokens;
  table.num_topk = shape.num_topk;
  table.num_experts = shape.num_experts;
  const auto num_topk = static_cast<std::size_t>(shape.num_topk);
  const auto num_tokens = static_cast<std::size_t>(shape.num_tokens);
  table.topk_idx.assign(num_tokens * num_topk, -1);
  table.topk_weights.resize(num_tokens * num_topk);
  Sampler sampler(odds_of(kind, shape.num_experts, seed), shape.num_topk);
  const std::uint64_t rank_seed = derive_seed(derive_seed(seed, kChoiceStream), static_cast<std::uint64_t>(rank));
  for (std::size_t token = 0; token < num_tokens; ++token) {
    std::int64_t* ids = &table.topk_idx[token * num_topk];
    if (kind == RoutingKind::kOneHot) {
      std::iota(ids, ids + std::min(shape.num_experts, std::int64_t{shape.num_topk}), 0);
    } else {
      sampler.draw(derive_seed(rank_seed, token), ids);
    }
    for (std::size_t k = 0; k < num_topk; ++k) {
      table.topk_weights[token * num_topk + k] = power_of_two_weight(static_cast<int>(k));
    }
  }
  return table;
}

RoutingTable slice_routing(const RoutingTable& table, std::int64_t first, std::int64_t num_tokens) {
  RoutingTable slice;
  slice.num_tokens = num_tokens;
  slice.num_topk = table.num_topk;
  slice.num_experts = table.num_experts;
  const auto num_topk = static_cast<std::ptrdiff_t>(table.num_topk);
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    const std::ptrdiff_t start = (first + i) % table.num_tokens * num_topk;
    const auto ids = table.topk_idx.begin() + start;
    const auto weights = table.topk_weights.begin() + start;
    slice.topk_idx.insert(slice.topk_idx.end(), ids, ids + num_topk);
    slice.topk_weights.insert(slice.topk_weights.end(), weights, weights + num_topk);
  }
  return slice;
}

std::int64_t owner_of(std::int64_t expert, std::int64_t num_experts, std::int64_t num_ranks) {
  std::int64_t rank = expert * num_ranks / num_experts;
  while ((rank + 1) * num_experts / num_ranks <= expert) ++rank;
  return rank;
}

}  // namespace ferry::tools
