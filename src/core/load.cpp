#include "ferry/load.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/expert_placement.hpp"
#include "plan/to_size.hpp"

namespace ferry {
namespace {

using nlohmann::json;

/// Far above any model's number of layers.
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 16;

Status invalid_load(std::string message) { return Status(ErrorCode::kInvalidArgument, std::move(message)); }

/// Header that a rank sends ahead of its counts, so that these can follow in parts that fit a message.
using Sizes = std::array<std::int64_t, 4>;

/// [layers, n] as a list for each layer.
json rows_of(const std::vector<std::int64_t>& values, std::int64_t num_rows) {
  json rows = json::array();
  const auto width = static_cast<std::ptrdiff_t>(values.size()) / std::max<std::ptrdiff_t>(num_rows, 1);
  for (std::ptrdiff_t row = 0; row < num_rows; ++row) {
    rows.push_back(std::vector<std::int64_t>(values.begin() + row * width, values.begin() + (row + 1) * width));
  }
  return rows;
}

/// All ranks' values, one rank after the other. All ranks have equally many.
Result<std::vector<std::int64_t>> gather(Bootstrap& bootstrap, std::span<const std::int64_t> mine,
                                         std::int64_t timeout_ns) {
  constexpr std::size_t kMostValues = kMaxBootstrapMessageBytes / sizeof(std::int64_t);
  std::vector<std::int64_t> all(mine.size() * to_size(bootstrap.num_ranks()));
  for (std::size_t first = 0; first < mine.size(); first += kMostValues) {
    const auto part = mine.subspan(first, std::min(kMostValues, mine.size() - first));
    Result<std::vector<std::vector<std::byte>>> messages = bootstrap.all_gather(std::as_bytes(part), timeout_ns);
    if (!messages.ok()) return messages.status();
    for (std::size_t rank = 0; rank < messages->size(); ++rank) {
      const std::vector<std::byte>& message = (*messages)[rank];
      if (message.size() != part.size_bytes()) {
        return Status(
            ErrorCode::kTransport,
            fmt::format("LoadWindow::sum: rank {} sent {} bytes, expected {}; run the same build on every rank", rank,
                        message.size(), part.size_bytes()),
            static_cast<int>(rank));
      }
      std::memcpy(all.data() + rank * mine.size() + first, message.data(), message.size());
    }
  }
  return all;
}

void add_to(std::vector<std::int64_t>& sum, std::span<const std::int64_t> values) {
  std::transform(sum.begin(), sum.end(), values.begin(), sum.begin(), std::plus<>());
}

}  // namespace

std::string LoadSummary::to_json() const {
  json object = {{"layers", num_layers},
                 {"experts", num_experts},
                 {"physical_experts", num_physical_experts},
                 {"logical", rows_of(logical, num_layers)}};
  if (!physical.empty()) object["physical"] = rows_of(physical, num_layers);
  std::int64_t num_ranks = 0;
  while (num_ranks * num_ranks < static_cast<std::int64_t>(wait_times_ns.size())) ++num_ranks;
  if (num_ranks > 0) object["wait_times_ns"] = rows_of(wait_times_ns, num_ranks);
  return object.dump();
}

LoadWindow::LoadWindow(std::int64_t num_layers, std::int64_t num_experts, std::int64_t num_physical_experts)
    : num_layers_(num_layers),
      num_experts_(num_experts),
      num_physical_experts_(num_physical_experts),
      logical_(to_size(num_layers * num_experts), 0),
      physical_(to_size(num_layers * num_physical_experts), 0) {}

Result<LoadWindow> LoadWindow::create(std::int64_t num_layers, std::int64_t num_experts,
                                      std::int64_t num_physical_experts) {
  if (num_layers < 1 || num_layers > kMaxLayers) {
    return invalid_load(fmt::format("LoadWindow::create: num_layers is {}, expected 1 to {}", num_layers, kMaxLayers));
  }
  if (num_experts < 1 || num_experts > kMaxPlacedExperts) {
    return invalid_load(
        fmt::format("LoadWindow::create: num_experts is {}, expected 1 to {}", num_experts, kMaxPlacedExperts));
  }
  if (num_physical_experts < 0 || num_physical_experts > kMaxPlacedExperts) {
    return invalid_load(fmt::format("LoadWindow::create: num_physical_experts is {}, expected 0 (not counted) to {}",
                                    num_physical_experts, kMaxPlacedExperts));
  }
  return LoadWindow(num_layers, num_experts, num_physical_experts);
}

LoadCounters LoadWindow::counters(std::int64_t layer) {
  LoadCounters counters;
  if (layer < 0 || layer >= num_layers_) return counters;
  counters.logical = TensorView(logical_.data() + layer * num_experts_, DType::kInt64, {num_experts_});
  if (num_physical_experts_ > 0) {
    counters.physical =
        TensorView(physical_.data() + layer * num_physical_experts_, DType::kInt64, {num_physical_experts_});
  }
  return counters;
}

Status LoadWindow::add(std::span<const std::int64_t> logical, std::span<const std::int64_t> physical) {
  if (logical.size() != logical_.size()) {
    return invalid_load(fmt::format("LoadWindow::add: logical has {} entries, expected {} layers of {} experts",
                                    logical.size(), num_layers_, num_experts_));
  }
  if (!physical.empty() && physical.size() != physical_.size()) {
    return invalid_load(
        fmt::format("LoadWindow::add: physical has {} entries, expected {} layers of {} physical experts, or "
                    "none",
                    physical.size(), num_layers_, num_physical_experts_));
  }
  add_to(logical_, logical);
  if (!physical.empty()) add_to(physical_, physical);
  return {};
}

void LoadWindow::reset() {
  std::fill(logical_.begin(), logical_.end(), 0);
  std::fill(physical_.begin(), physical_.end(), 0);
}

Result<LoadSummary> LoadWindow::sum(Bootstrap& bootstrap, std::span<const std::int64_t> wait_times_ns,
                                    std::int64_t timeout_ns) const {
  const Sizes sizes = {num_layers_, num_experts_, num_physical_experts_,
                       static_cast<std::int64_t>(wait_times_ns.size())};
  const auto num_ranks = to_size(bootstrap.num_ranks());
  const Result<std::vector<std::int64_t>> all_sizes = gather(bootstrap, sizes, timeout_ns);
  if (!all_sizes.ok()) return all_sizes.status();
  constexpr std::array<std::string_view, 4> kNames = {"num_layers", "num_experts", "num_physical_experts",
                                                      "number of wait_times_ns"};
  for (std::size_t i = 0; i < num_ranks * sizes.size(); ++i) {
    const std::size_t which = i % sizes.size();
    if ((*all_sizes)[i] == (*all_sizes)[which]) continue;
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("LoadWindow::sum: ranks disagree on {}: rank 0 has {}, rank {} has {}; it must be the same "
                    "on every rank",
                    kNames[which], (*all_sizes)[which], i / sizes.size(), (*all_sizes)[i]),
        static_cast<int>(i / sizes.size()));
  }
  if (!wait_times_ns.empty() && wait_times_ns.size() != num_ranks) {
    return invalid_load(fmt::format("LoadWindow::sum: wait_times_ns has {} entries, expected one for each of {} ranks",
                                    wait_times_ns.size(), num_ranks));
  }
  LoadSummary summary{.num_layers = num_layers_,
                      .num_experts = num_experts_,
                      .num_physical_experts = num_physical_experts_,
                      .logical = std::vector<std::int64_t>(logical_.size(), 0),
                      .physical = std::vector<std::int64_t>(physical_.size(), 0)};
  for (const auto& [mine, total] : {std::pair(&logical_, &summary.logical), std::pair(&physical_, &summary.physical)}) {
    const Result<std::vector<std::int64_t>> all = gather(bootstrap, *mine, timeout_ns);
    if (!all.ok()) return all.status();
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      add_to(*total, std::span(*all).subspan(rank * mine->size(), mine->size()));
    }
  }
  Result<std::vector<std::int64_t>> waits = gather(bootstrap, wait_times_ns, timeout_ns);
  if (!waits.ok()) return waits.status();
  summary.wait_times_ns = std::move(*waits);
  return summary;
}

}  // namespace ferry
