/// How even `ferry::balance` makes the load of ranks, next to the greedy algorithm and to a bound, and how long it
/// takes.
/// Prints the tables of docs/inside-experts.md. `--trace FILE`: recorded router decisions, see docs/demo.md.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ferry/balance.hpp"
#include "options.hpp"
#include "unit/balance_greedy.hpp"

namespace {

using ferry::testing::BalanceCase;

struct Shape {
  int num_replicas = 0;
  int num_groups = 1;
  int num_nodes = 1;
  int num_ranks = 1;
};

ferry::Balance balanced(const std::vector<float>& load, std::int64_t num_experts, const Shape& shape,
                        const std::vector<std::int32_t>* previous = nullptr, std::int64_t max_moves = -1) {
  ferry::BalanceOptions options;
  options.num_replicas = shape.num_replicas;
  options.num_groups = shape.num_groups;
  options.num_nodes = shape.num_nodes;
  options.num_ranks = shape.num_ranks;
  options.max_moves = max_moves;
  const auto num_layers = static_cast<std::int64_t>(load.size()) / num_experts;
  if (previous != nullptr)
    options.previous = {previous->data(), ferry::DType::kInt32, {num_layers, shape.num_replicas}};
  return ferry::balance({load.data(), ferry::DType::kFloat32, {num_layers, num_experts}}, options).value();
}

/// Load of the busiest rank / mean.
double unevenness(const std::vector<double>& load, const std::vector<std::int32_t>& placement, int num_ranks) {
  std::vector<int> counts(load.size(), 0);
  for (const std::int32_t expert : placement) ++counts[static_cast<std::size_t>(expert)];
  std::vector<double> ranks(static_cast<std::size_t>(num_ranks), 0.0);
  for (std::size_t p = 0; p < placement.size(); ++p) {
    const auto expert = static_cast<std::size_t>(placement[p]);
    ranks[p * ranks.size() / placement.size()] += load[expert] / counts[expert];
  }
  return *std::max_element(ranks.begin(), ranks.end()) * num_ranks / std::accumulate(load.begin(), load.end(), 0.0);
}

std::vector<std::int32_t> contiguous(std::size_t num_experts) {
  std::vector<std::int32_t> placement(num_experts);
  std::iota(placement.begin(), placement.end(), 0);
  return placement;
}

/// Entries per expert in the whole trace, in its first half and in its second half.
std::vector<std::vector<double>> read_loads(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::vector<std::int64_t>> tokens;
  std::size_t num_experts = 0;
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("num_experts")) num_experts = json["num_experts"];
    if (json.contains("topk_ids")) tokens.push_back(json["topk_ids"]);
  }
  std::vector<std::vector<double>> loads(3, std::vector<double>(num_experts, 0.0));
  for (std::size_t token = 0; token < tokens.size(); ++token) {
    for (const std::int64_t expert : tokens[token]) {
      ++loads[0].at(static_cast<std::size_t>(expert));
      ++loads[token < tokens.size() / 2 ? 1 : 2].at(static_cast<std::size_t>(expert));
    }
  }
  return loads;
}

void compare_on_trace(const std::string& path) {
  const auto loads = read_loads(path);
  fmt::print("| ranks | nodes, groups | physical experts | contiguous | greedy | ferry | bound | ferry, next half |\n");
  fmt::print("|---|---|---|---|---|---|---|---|\n");
  const auto num_experts = static_cast<std::int64_t>(loads[0].size());
  for (const Shape& shape : {Shape{60, 1, 1, 4}, Shape{60, 1, 1, 10}, Shape{60, 1, 1, 12}, Shape{60, 1, 1, 20},
                             Shape{64, 1, 1, 8}, Shape{72, 1, 1, 12}, Shape{80, 1, 1, 20}, Shape{120, 1, 1, 60},
                             Shape{72, 4, 2, 12}, Shape{72, 12, 4, 12}, Shape{80, 20, 4, 20}}) {
    const BalanceCase in{loads[0], shape.num_replicas, shape.num_groups, shape.num_nodes, shape.num_ranks};
    const double mean = std::accumulate(loads[0].begin(), loads[0].end(), 0.0) / shape.num_ranks;
    const auto place = [&](const std::vector<double>& load) {
      return balanced({load.begin(), load.end()}, num_experts, shape).physical_to_logical;
    };
    fmt::print("| {} | {}, {} | {} | {} | {:.4f} | {:.4f} | {:.4f} | {:.4f} |\n", shape.num_ranks, shape.num_nodes,
               shape.num_groups, shape.num_replicas,
               loads[0].size() % static_cast<std::size_t>(shape.num_ranks) == 0
                   ? fmt::format("{:.4f}", unevenness(loads[0], contiguous(loads[0].size()), shape.num_ranks))
                   : "–",
               ferry::testing::greedy_max_load(in) / mean, unevenness(loads[0], place(loads[0]), shape.num_ranks),
               ferry::testing::max_load_bound(in) / mean, unevenness(loads[2], place(loads[1]), shape.num_ranks));
  }
}

struct Family {
  const char* name;
  double (*draw)(std::mt19937_64&, int expert);
};

double uniform(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

/// exp of a normal variable, by Box and Muller.
double log_normal(std::mt19937_64& random, double deviation) {
  const double radius = std::sqrt(-2 * std::log(1 - uniform(random)));
  return std::exp(deviation * radius * std::cos(2 * 3.14159265358979 * uniform(random)));
}

constexpr Family kFamilies[] = {
    {"uniform", [](std::mt19937_64& random, int) { return 1000 * uniform(random); }},
    {"log-normal, deviation 1", [](std::mt19937_64& random, int) { return 100 * log_normal(random, 1); }},
    {"log-normal, deviation 2", [](std::mt19937_64& random, int) { return 100 * log_normal(random, 2); }},
    {"1 / place", [](std::mt19937_64&, int expert) { return 1e4 / (expert + 1); }},
};

template <typename Body>
double best_ms(int num_runs, const Body& body) {
  double best = 1e300;
  for (int run = 0; run < num_runs; ++run) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

void compare_on_large_layers(int num_runs) {
  constexpr int kNumLayers = 58;  // with experts, of DeepSeek-V3
  constexpr int kNumExperts = 256;
  fmt::print("| loads | policy | greedy | ferry | bound | ms | from a previous one: moves | max/mean | ms |\n");
  fmt::print("|---|---|---|---|---|---|---|---|---|\n");
  for (const Family& family : kFamilies) {
    std::mt19937_64 random(7);
    std::vector<float> load;
    for (int layer = 0; layer < kNumLayers; ++layer) {
      std::vector<float> row;
      for (int e = 0; e < kNumExperts; ++e) row.push_back(static_cast<float>(std::ceil(family.draw(random, e))));
      std::shuffle(row.begin(), row.end(), random);
      load.insert(load.end(), row.begin(), row.end());
    }
    std::vector<float> later = load;
    for (float& value : later) value *= static_cast<float>(0.9 + 0.2 * uniform(random));
    for (const Shape& shape : {Shape{288, 8, 4, 32}, Shape{288, 1, 1, 32}}) {
      double greedy = 0;
      double bound = 0;
      for (int layer = 0; layer < kNumLayers; ++layer) {
        const BalanceCase in{{load.begin() + layer * kNumExperts, load.begin() + (layer + 1) * kNumExperts},
                             shape.num_replicas,
                             shape.num_groups,
                             shape.num_nodes,
                             shape.num_ranks};
        const double mean = std::accumulate(in.load.begin(), in.load.end(), 0.0) / shape.num_ranks;
        greedy += ferry::testing::greedy_max_load(in) / mean / kNumLayers;
        bound += ferry::testing::max_load_bound(in) / mean / kNumLayers;
      }
      const auto mean_of = [](const ferry::Balance& placed) {
        double sum = 0;
        for (std::size_t layer = 0; layer < placed.max_load.size(); ++layer) {
          sum += placed.max_load[layer] / placed.mean_load[layer] / kNumLayers;
        }
        return sum;
      };
      ferry::Balance first;
      ferry::Balance next;
      const double ms = best_ms(num_runs, [&] { first = balanced(load, kNumExperts, shape); });
      const double next_ms =
          best_ms(num_runs, [&] { next = balanced(later, kNumExperts, shape, &first.physical_to_logical, 12); });
      const std::int64_t moves = std::accumulate(next.num_moves.begin(), next.num_moves.end(), std::int64_t{0});
      fmt::print("| {} | {} | {:.4f} | {:.4f} | {:.4f} | {:.0f} | {:.1f} a layer | {:.4f} | {:.0f} |\n", family.name,
                 ferry::to_string(first.policy == ferry::BalancePolicy::kHierarchical && shape.num_nodes == 1
                                      ? ferry::BalancePolicy::kGlobal
                                      : first.policy),
                 greedy, mean_of(first), bound, ms, static_cast<double>(moves) / kNumLayers, mean_of(next), next_ms);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  ferry::benchmarks::Options options("Balance of experts on ranks: max/mean and time");
  std::string trace;
  int num_runs = 5;
  options.add_file("--trace", trace, "Recorded router decisions (JSON lines)");
  options.add("--runs", num_runs, "Times are the best of this many runs", {{1, 1'000'000}});
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  if (!trace.empty()) compare_on_trace(trace);
  compare_on_large_layers(num_runs);
  return 0;
}
