/// C interface of the load of experts over a window of calls, and of the traffic to other nodes.

#include "ferry/load.hpp"

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"

// NOLINTBEGIN(readability-identifier-naming): the names of the C interface

struct ferry_load_window {
  ferry::LoadWindow value;
};

struct ferry_load_summary {
  ferry::LoadSummary value;
  std::string json;
};

struct ferry_network_usage {
  ferry::NetworkUsage value;  // owns the strings that the rails point to
  std::vector<ferry_rail_usage> rails;
};

// NOLINTEND(readability-identifier-naming)

namespace ferry::c {
namespace {

Status create_window(std::int64_t num_layers, std::int64_t num_experts, std::int64_t num_physical_experts,
                     ferry_load_window** handle) {
  if (handle == nullptr) return invalid("ferry_load_window_create", "the pointer to the window is null");
  Result<LoadWindow> window = LoadWindow::create(num_layers, num_experts, num_physical_experts);
  if (!window.ok()) return window.status();
  *handle = new ferry_load_window{std::move(*window)};
  return {};
}

Status fill_counters(ferry_load_window* window, std::int64_t layer, ferry_load_counters* wanted) {
  constexpr const char* kCall = "ferry_load_window_counters";
  if (window == nullptr) return invalid(kCall, "the window is null");
  const LoadCounters counters = window->value.counters(layer);
  if (!counters.logical.present()) {
    return invalid(kCall, ("layer is " + std::to_string(layer) + ", and the window has no such layer").c_str());
  }
  ferry_load_counters known{};
  known.logical = to_tensor(counters.logical);
  known.physical = to_tensor(counters.physical);
  return write_struct(kCall, known, wanted);
}

/// Array of the caller; null is allowed only without entries.
Status read_array(const char* call, const char* name, const std::int64_t* first, std::int64_t num,
                  std::span<const std::int64_t>& array) {
  if (num < 0 || (first == nullptr && num != 0)) {
    return invalid(call, (std::string(name) + " is null, or its number of entries negative").c_str());
  }
  array = std::span(first, static_cast<std::size_t>(num));
  return {};
}

struct Counts {
  const std::int64_t* first;
  std::int64_t num;
};

Status add(ferry_load_window* window, const Counts& logical, const Counts& physical) {
  constexpr const char* kCall = "ferry_load_window_add";
  if (window == nullptr) return invalid(kCall, "the window is null");
  std::span<const std::int64_t> of_logical;
  std::span<const std::int64_t> of_physical;
  Status status = read_array(kCall, "logical", logical.first, logical.num, of_logical);
  if (status.ok()) status = read_array(kCall, "physical", physical.first, physical.num, of_physical);
  return status.ok() ? window->value.add(of_logical, of_physical) : status;
}

Status reset(ferry_load_window* window) {
  if (window == nullptr) return invalid("ferry_load_window_reset", "the window is null");
  window->value.reset();
  return {};
}

Status sum(const ferry_load_window* window, ferry_bootstrap* bootstrap, const Counts& waits, std::int64_t timeout_ns,
           ferry_load_summary** handle) {
  constexpr const char* kCall = "ferry_load_window_sum";
  if (handle == nullptr) return invalid(kCall, "the pointer to the summary is null");
  if (window == nullptr) return invalid(kCall, "the window is null");
  if (bootstrap == nullptr) return invalid(kCall, "the bootstrap is null");
  std::span<const std::int64_t> wait_times_ns;
  if (Status status = read_array(kCall, "wait_times_ns", waits.first, waits.num, wait_times_ns); !status.ok()) {
    return status;
  }
  auto made = std::make_unique<ferry_load_summary>();
  Result<LoadSummary> summary =
      window->value.sum(*bootstrap->value, wait_times_ns, nonzero_or(timeout_ns, kDefaultTimeoutNs));
  if (!summary.ok()) return summary.status();
  made->value = std::move(*summary);
  made->json = made->value.to_json();
  *handle = made.release();
  return {};
}

Status network_usage(const ferry_group* group, ferry_network_usage** handle) {
  constexpr const char* kCall = "ferry_group_network_usage";
  if (handle == nullptr) return invalid(kCall, "the pointer to the usage is null");
  if (group == nullptr) return invalid(kCall, "the group is null");
  auto made = std::make_unique<ferry_network_usage>();
  made->value = group->value->network_usage();
  for (const RailUsage& rail : made->value.rails) {
    ferry_rail_usage usage{};
    usage.struct_size = sizeof(usage);
    usage.sent_bytes = rail.sent_bytes;
    usage.num_messages = rail.num_messages;
    usage.route = rail.route.c_str();
    usage.rank = rail.rank;
    made->rails.push_back(usage);
  }
  *handle = made.release();
  return {};
}

const std::int64_t* elements_of(std::span<const std::int64_t> elements, std::int64_t* num) {
  if (num != nullptr) *num = static_cast<std::int64_t>(elements.size());
  return elements.empty() ? nullptr : elements.data();
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_load_window_create(int64_t num_layers, int64_t num_experts, int64_t num_physical_experts,
                                       ferry_load_window** window) {
  return guarded([&] { return create_window(num_layers, num_experts, num_physical_experts, window); });
}

void ferry_load_window_free(ferry_load_window* window) { delete window; }

ferry_status* ferry_load_window_counters(ferry_load_window* window, int64_t layer, ferry_load_counters* counters) {
  return guarded([&] { return fill_counters(window, layer, counters); });
}

ferry_status* ferry_load_window_add(ferry_load_window* window, const int64_t* logical, int64_t num_logical,
                                    const int64_t* physical, int64_t num_physical) {
  return guarded([&] { return add(window, {logical, num_logical}, {physical, num_physical}); });
}

ferry_status* ferry_load_window_reset(ferry_load_window* window) {
  return guarded([&] { return reset(window); });
}

const int64_t* ferry_load_window_logical(const ferry_load_window* window, int64_t* num) {
  return elements_of(window == nullptr ? std::span<const std::int64_t>() : window->value.logical(), num);
}
const int64_t* ferry_load_window_physical(const ferry_load_window* window, int64_t* num) {
  return elements_of(window == nullptr ? std::span<const std::int64_t>() : window->value.physical(), num);
}

ferry_status* ferry_load_window_sum(const ferry_load_window* window, ferry_bootstrap* bootstrap,
                                    const int64_t* wait_times_ns, int64_t num_wait_times, int64_t timeout_ns,
                                    ferry_load_summary** summary) {
  return guarded([&] { return sum(window, bootstrap, {wait_times_ns, num_wait_times}, timeout_ns, summary); });
}

void ferry_load_summary_free(ferry_load_summary* summary) { delete summary; }

const int64_t* ferry_load_summary_logical(const ferry_load_summary* summary, int64_t* num) {
  return elements_of(summary == nullptr ? std::span<const std::int64_t>() : summary->value.logical, num);
}
const int64_t* ferry_load_summary_physical(const ferry_load_summary* summary, int64_t* num) {
  return elements_of(summary == nullptr ? std::span<const std::int64_t>() : summary->value.physical, num);
}
const int64_t* ferry_load_summary_wait_times_ns(const ferry_load_summary* summary, int64_t* num) {
  return elements_of(summary == nullptr ? std::span<const std::int64_t>() : summary->value.wait_times_ns, num);
}
const char* ferry_load_summary_json(const ferry_load_summary* summary) {
  return summary == nullptr ? "" : summary->json.c_str();
}

ferry_status* ferry_group_network_usage(const ferry_group* group, ferry_network_usage** usage) {
  return guarded([&] { return network_usage(group, usage); });
}

void ferry_network_usage_free(ferry_network_usage* usage) { delete usage; }

const char* ferry_network_usage_transport(const ferry_network_usage* usage) {
  return usage == nullptr ? "" : usage->value.transport.c_str();
}
const char* ferry_network_usage_net_devices(const ferry_network_usage* usage) {
  return usage == nullptr ? "" : usage->value.net_devices.c_str();
}
const char* ferry_network_usage_ring_memory(const ferry_network_usage* usage) {
  return usage == nullptr ? "" : usage->value.ring_memory.c_str();
}
const char* ferry_network_usage_why_host_memory(const ferry_network_usage* usage) {
  return usage == nullptr ? "" : usage->value.why_host_memory.c_str();
}
int32_t ferry_network_usage_service_level(const ferry_network_usage* usage) {
  return usage == nullptr ? ferry::kDefaultServiceLevel : usage->value.service_level;
}
int32_t ferry_network_usage_num_paths(const ferry_network_usage* usage) {
  return usage == nullptr ? 0 : usage->value.num_paths;
}
int64_t ferry_network_usage_num_rails(const ferry_network_usage* usage) {
  return usage == nullptr ? 0 : static_cast<int64_t>(usage->rails.size());
}
const ferry_rail_usage* ferry_network_usage_rail(const ferry_network_usage* usage, int64_t index) {
  if (index < 0 || index >= ferry_network_usage_num_rails(usage)) return nullptr;
  return &usage->rails[static_cast<std::size_t>(index)];
}
