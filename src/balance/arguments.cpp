#include "balance/arguments.hpp"

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "numeric/strided.hpp"

namespace ferry::balancing {
namespace {

using numeric::bad_argument;
using numeric::MatrixRule;

constexpr std::string_view kCall = "balance";

Status bad_option(std::string_view call, std::string_view name, std::int64_t observed, const std::string& expected,
                  std::string_view hint) {
  return bad_argument({call, name}, std::to_string(observed), expected, hint);
}

template <typename T>
double element(const ConstTensorView& view, std::int64_t row, std::int64_t column) {
  return static_cast<double>(static_cast<const T*>(view.data)[row * view.stride(0) + column * view.stride(1)]);
}

double load_at(const ConstTensorView& load, std::int64_t layer, std::int64_t expert) {
  if (load.dtype == DType::kInt32) return element<std::int32_t>(load, layer, expert);
  if (load.dtype == DType::kInt64) return element<std::int64_t>(load, layer, expert);
  return element<float>(load, layer, expert);
}

}  // namespace

Status check_ranks(std::string_view call, std::int64_t num_physical, int num_ranks, int num_nodes) {
  if (num_ranks > kMaxBalanceRanks)
    return bad_option(call, "options.num_ranks", num_ranks, fmt::format("at most {}", kMaxBalanceRanks),
                      "place the experts of fewer ranks at a time");
  if (num_ranks < 1 || num_physical % num_ranks != 0)
    return bad_option(call, "options.num_ranks", num_ranks,
                      fmt::format("a divisor of the {} physical experts", num_physical),
                      "every rank has equally many places");
  if (num_nodes < 1 || num_ranks % num_nodes != 0)
    return bad_option(call, "options.num_nodes", num_nodes, fmt::format("a divisor of the {} ranks", num_ranks),
                      "every node has equally many ranks");
  return {};
}

Status check_entries(const PlacementRule& rule, std::int64_t num_layers, std::int64_t per_layer) {
  if (per_layer == 0 || num_layers <= kMaxBalanceEntries / per_layer) return {};
  return bad_argument({rule.call, rule.name}, fmt::format("{} for each of {} layers", per_layer, num_layers),
                      fmt::format("at most {} in all", kMaxBalanceEntries), "pass fewer layers at a time");
}

Status check_options(const BalanceOptions& options, std::int64_t num_layers, std::int64_t num_experts) {
  if (options.num_replicas < num_experts || options.num_replicas > kMaxBalanceExperts)
    return bad_option(kCall, "options.num_replicas", options.num_replicas,
                      fmt::format("{} (the experts) to {}", num_experts, kMaxBalanceExperts),
                      "give the number of physical experts of all ranks, the experts themselves included");
  if (Status status = check_entries({kCall, "options.num_replicas"}, num_layers, options.num_replicas); !status)
    return status;
  if (Status status = check_ranks(kCall, options.num_replicas, options.num_ranks, options.num_nodes); !status)
    return status;
  if (options.num_groups < 1 || num_experts % options.num_groups != 0)
    return bad_option(kCall, "options.num_groups", options.num_groups,
                      fmt::format("a divisor of the {} experts", num_experts), "1 means no groups");
  if (options.policy != BalancePolicy::kAuto && options.policy != BalancePolicy::kHierarchical &&
      options.policy != BalancePolicy::kGlobal)
    return bad_option(kCall, "options.policy", static_cast<int>(options.policy), "kAuto, kHierarchical or kGlobal",
                      "pass an enumerator");
  if (options.policy == BalancePolicy::kHierarchical && options.num_groups % options.num_nodes != 0)
    return bad_option(kCall, "options.num_groups", options.num_groups,
                      fmt::format("a multiple of the {} nodes", options.num_nodes),
                      "with kHierarchical every node has equally many groups; use kGlobal");
  if (options.max_moves < -1)
    return bad_option(kCall, "options.max_moves", options.max_moves, "at least -1", "-1 means any number");
  if (!std::isfinite(options.move_weight) || options.move_weight < 0)
    return bad_argument({kCall, "options.move_weight"}, fmt::format("{}", options.move_weight), "a number from 0",
                        "it is a fraction of a rank's mean load");
  if (options.max_steps < 0)
    return bad_option(kCall, "options.max_steps", options.max_steps, "at least 0", "0 means the greedy start alone");
  return {};
}

Status check_load(const ConstTensorView& load) {
  if (load.num_dims != 2 || load.extent(0) < 0 || load.extent(1) < 1 || load.extent(1) > kMaxBalanceExperts)
    return bad_argument({kCall, "load"}, load.present() ? numeric::shape_text(load) : "absent",
                        fmt::format("[layers, E], E from 1 to {}", kMaxBalanceExperts),
                        "give one row of expert loads per layer");
  if (Status status = check_entries({kCall, "load"}, load.extent(0), load.extent(1)); !status) return status;
  const MatrixRule rule{kCall, "load", load.extent(0), load.extent(1)};
  if (load.dtype != DType::kInt32 && load.dtype != DType::kInt64 && load.dtype != DType::kFloat32)
    return bad_argument(rule, std::string(to_string(load.dtype)), "i32, i64 or f32", "convert it first");
  return check_matrix(load, rule);
}

Result<std::vector<double>> read_load(const ConstTensorView& load) {
  std::vector<double> loads;
  loads.reserve(static_cast<std::size_t>(load.num_elements()));
  for (std::int64_t layer = 0; layer < load.extent(0); ++layer) {
    for (std::int64_t expert = 0; expert < load.extent(1); ++expert) {
      const double value = load_at(load, layer, expert);
      if (!std::isfinite(value) || value < 0)
        return bad_argument({kCall, fmt::format("load[{}, {}]", layer, expert)}, fmt::format("{}", value),
                            "finite and not negative", "a load is a number of tokens, or a share of them");
      loads.push_back(value);
    }
  }
  return loads;
}

Result<std::vector<std::int32_t>> read_placement(const ConstTensorView& view, const PlacementRule& rule) {
  const std::string layers = rule.num_layers < 0 ? "layers" : std::to_string(rule.num_layers);
  const std::string physical = rule.num_physical < 0 ? "P" : std::to_string(rule.num_physical);
  const bool fits = view.num_dims == 2 && (rule.num_layers < 0 || view.extent(0) == rule.num_layers) &&
                    (rule.num_physical < 0 || view.extent(1) == rule.num_physical) && view.extent(0) >= 0 &&
                    view.extent(1) >= 1 && view.extent(1) <= kMaxBalanceExperts;
  if (!fits)
    return bad_argument(
        {rule.call, rule.name}, view.present() ? numeric::shape_text(view) : "absent",
        fmt::format("[{}, {}]{}", layers, physical,
                    rule.num_physical < 0 ? fmt::format(", P from 1 to {}", kMaxBalanceExperts) : std::string()),
        "give the expert of each physical expert");
  if (Status status = check_entries(rule, view.extent(0), view.extent(1)); !status) return status;
  const MatrixRule matrix{rule.call, rule.name, view.extent(0), view.extent(1)};
  if (view.dtype != DType::kInt32)
    return bad_argument(matrix, std::string(to_string(view.dtype)), "i32", "convert it first");
  if (Status status = check_matrix(view, matrix); !status) return status;
  std::vector<std::int32_t> experts;
  experts.reserve(static_cast<std::size_t>(view.num_elements()));
  for (std::int64_t layer = 0; layer < view.extent(0); ++layer) {
    for (std::int64_t place = 0; place < view.extent(1); ++place) {
      const std::int32_t expert =
          static_cast<const std::int32_t*>(view.data)[layer * view.stride(0) + place * view.stride(1)];
      if (expert < -1 || expert >= rule.num_experts)
        return bad_argument({rule.call, fmt::format("{}[{}, {}]", rule.name, layer, place)}, std::to_string(expert),
                            fmt::format("-1 (an empty place) or an expert from 0 to {}", rule.num_experts - 1),
                            "number experts as the load does");
      experts.push_back(expert);
    }
  }
  return experts;
}

}  // namespace ferry::balancing
