#include "report/wire.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "common/routing_source.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

/// Records are padded to a multiple of this (ferry::kRowGranuleBytes).
std::int64_t round_up_to_granule(std::int64_t bytes) {
  constexpr std::int64_t kGranule = kRowGranuleBytes;
  return (bytes + kGranule - 1) / kGranule * kGranule;
}

template <std::size_t kSize>
void set_text(std::array<char, kSize>& to, std::string_view text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  const std::size_t size = std::min(line.size(), kSize - 1);
  std::copy_n(line.begin(), size, to.begin());
  to[size] = '\0';
}

}  // namespace

WireFigures WireMeter::sent() const {
  const NetworkUsage now = group_.network_usage();
  WireFigures figures{};
  for (std::size_t i = 0; i < now.rails.size(); ++i) {
    const RailUsage& before = before_.rails[i];
    const auto bytes = static_cast<std::int64_t>(now.rails[i].sent_bytes - before.sent_bytes);
    figures.sent_bytes += bytes;
    figures.max_rail_bytes = std::max(figures.max_rail_bytes, bytes);
    figures.num_messages += static_cast<std::int64_t>(now.rails[i].num_messages - before.num_messages);
  }
  return figures;
}

WireNames wire_names(const Group& group) {
  const NetworkUsage usage = group.network_usage();
  WireNames names{};
  set_text(names.transport, usage.transport);
  if (!usage.rails.empty()) set_text(names.route, usage.rails.front().route);
  set_text(names.ring_memory, usage.ring_memory);
  return names;
}

void WireTotal::add(const WireFigures& figures) {
  sent_bytes += figures.sent_bytes;
  max_rank_bytes = std::max(max_rank_bytes, figures.sent_bytes);
  max_rail_bytes = std::max(max_rail_bytes, figures.max_rail_bytes);
  num_messages += figures.num_messages;
  formula_bytes += figures.formula_bytes;
}

std::optional<double> WireTotal::ratio_to_formula() const {
  if (formula_bytes == 0) return std::nullopt;
  return static_cast<double>(sent_bytes) / static_cast<double>(formula_bytes);
}

WireTotal operator+(WireTotal a, const WireTotal& b) {
  a.sent_bytes += b.sent_bytes;
  a.max_rank_bytes += b.max_rank_bytes;
  a.max_rail_bytes += b.max_rail_bytes;
  a.num_messages += b.num_messages;
  a.formula_bytes += b.formula_bytes;
  return a;
}

std::string describe_nodes(int num_nodes, int ranks_per_node) {
  return fmt::format("{} nodes of {} rank{}", num_nodes, ranks_per_node, ranks_per_node == 1 ? "" : "s");
}

std::vector<std::string> wire_header() {
  return {"sent", "a rank, mean", "a rank, max", "a rail, max", "messages", "formula", "sent/formula"};
}

std::vector<std::string> wire_row(const WireTotal& total) {
  const auto ratio = total.ratio_to_formula();
  return {format_bytes(static_cast<double>(total.sent_bytes)),
          format_bytes(total.mean_rank_bytes()),
          format_bytes(static_cast<double>(total.max_rank_bytes)),
          format_bytes(static_cast<double>(total.max_rail_bytes)),
          fmt::to_string(total.num_messages),
          ratio ? format_bytes(static_cast<double>(total.formula_bytes)) : "-",
          ratio ? fmt::format("{:.4f}", *ratio) : "-"};
}

Json to_json(const WireTotal& total) {
  const auto ratio = total.ratio_to_formula();
  return {{"sent_bytes", total.sent_bytes},
          {"sent_bytes_per_rank_mean", total.mean_rank_bytes()},
          {"sent_bytes_per_rank_max", total.max_rank_bytes},
          {"sent_bytes_per_rail_max", total.max_rail_bytes},
          {"messages", total.num_messages},
          {"formula_bytes", ratio ? Json(total.formula_bytes) : Json(nullptr)},
          {"ratio_to_formula", ratio ? Json(*ratio) : Json(nullptr)}};
}

WireFigures& WireFigures::operator+=(const WireFigures& other) {
  sent_bytes += other.sent_bytes;
  max_rail_bytes += other.max_rail_bytes;
  num_messages += other.num_messages;
  formula_bytes += other.formula_bytes;
  return *this;
}

std::int64_t count_rows_to_other_nodes(std::span<const std::int64_t> topk_idx, const WireShape& shape, int rank) {
  const auto num_topk = static_cast<std::size_t>(shape.num_topk);
  const std::int64_t own_node = rank / shape.ranks_per_node;
  std::int64_t num_rows = 0;
  std::vector<std::int64_t> nodes;
  for (std::size_t first = 0; first + num_topk <= topk_idx.size(); first += num_topk) {
    nodes.clear();
    for (const std::int64_t expert : topk_idx.subspan(first, num_topk)) {
      if (expert < 0) continue;
      const std::int64_t node = owner_of(expert, shape.num_experts, shape.num_ranks) / shape.ranks_per_node;
      if (node != own_node && std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
    }
    num_rows += static_cast<std::int64_t>(nodes.size());
  }
  return num_rows;
}

std::int64_t dispatch_record_bytes(std::int64_t scale_bytes, int num_topk, bool weights) {
  constexpr std::int64_t kEntryBytes = sizeof(std::int32_t) + sizeof(float);
  return round_up_to_granule(scale_bytes + (weights ? num_topk * kEntryBytes : 0));
}

std::int64_t combine_record_bytes(int num_topk, bool weighted) {
  return weighted ? round_up_to_granule(num_topk * std::int64_t{sizeof(float)}) : 0;
}

}  // namespace ferry::tools
