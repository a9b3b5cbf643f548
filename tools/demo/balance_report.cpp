#include "demo/balance_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "demo/load_report.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

/// Width of each of the two charts, which are shown side by side.
constexpr int kBarWidth = 32;
/// With more ranks the charts do not fit a screen.
constexpr int kMaxBars = 32;

/// Rows of the second half, by the rank that owned each expert at first.
std::vector<std::int64_t> rows_had_they_stayed(const DemoPlan& plan, const Choice& choice) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(plan.num_ranks), 0);
  const std::int64_t num_topk = plan.shape.num_topk();
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    for (std::int64_t token = plan.first_token(rank) + plan.first_of_step(rank, 1); token < plan.first_token(rank + 1);
         ++token) {
      const auto first = choice.topk_idx.begin() + token * num_topk;
      for (auto id = first; id < first + num_topk; ++id) {
        // A token that names an expert twice makes one row.
        if (*id < 0 || std::find(first, id, *id) != id) continue;
        ++rows[static_cast<std::size_t>(owner_of(*id, plan.shape.num_experts, plan.num_ranks))];
      }
    }
  }
  return rows;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// Columns of a line on a screen: bytes that start a UTF-8 character.
std::size_t width_of(const std::string& line) {
  return static_cast<std::size_t>(
      std::count_if(line.begin(), line.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

std::string chart(const std::vector<std::int64_t>& rows, std::int64_t largest, bool labels) {
  std::vector<Bar> bars;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    bars.push_back({labels ? fmt::format("rank {}", rank) : std::string(), rows[rank]});
  }
  const std::int64_t own_largest = std::max<std::int64_t>(*std::max_element(rows.begin(), rows.end()), 1);
  return bar_chart(bars, static_cast<int>(kBarWidth * own_largest / std::max<std::int64_t>(largest, 1)),
                   locale_is_utf8());
}

/// Both loads of the second half, on the same scale.
std::string picture(const BalanceReport& report) {
  if (report.moved.rows.size() > kMaxBars) return "";
  const std::int64_t largest = std::max(*std::max_element(report.stayed.rows.begin(), report.stayed.rows.end()),
                                        *std::max_element(report.moved.rows.begin(), report.moved.rows.end()));
  const auto left = lines_of(chart(report.stayed.rows, largest, true));
  const auto right = lines_of(chart(report.moved.rows, largest, false));
  std::size_t width = 0;
  for (const std::string& line : left) width = std::max(width, width_of(line));
  const std::string title = "  second half, had they stayed";
  width = std::max(width, title.size());
  std::string text = fmt::format("rows per rank\n{}{}   moved\n", title, std::string(width - title.size(), ' '));
  for (std::size_t rank = 0; rank < left.size(); ++rank) {
    text += left[rank] + std::string(width - width_of(left[rank]), ' ') + right[rank] + "\n";
  }
  return text + "\n";
}

Json to_json(const HalfLoad& half) {
  return {{"rows_per_rank", half.rows},
          {"max_over_mean", half.max_over_mean()},
          {"network_bytes", half.wire_bytes},
          {"network_formula_bytes", half.formula_bytes}};
}

}  // namespace

double HalfLoad::max_over_mean() const { return tools::max_over_mean(rows); }

BalanceReport compare_halves(const DemoPlan& plan, const std::vector<RankFigures>& ranks, const Choice& choice) {
  BalanceReport report;
  for (const RankFigures& figures : ranks) {
    for (auto [half, of_rank] :
         {std::pair(&report.first, &figures.halves.front()), std::pair(&report.moved, &figures.halves.back())}) {
      half->rows.push_back(of_rank->num_received_rows);
      half->wire_bytes += of_rank->wire_bytes;
      half->formula_bytes += of_rank->formula_bytes;
    }
    report.stayed.formula_bytes += figures.halves.back().stayed_formula_bytes;
    // Times of the slowest rank; the numbers are the same on all ranks.
    report.moves.balance_ns = std::max(report.moves.balance_ns, figures.moves.balance_ns);
    report.moves.move_ns = std::max(report.moves.move_ns, figures.moves.move_ns);
    report.moves.num_moved = figures.moves.num_moved;
    report.moves.num_between_nodes = figures.moves.num_between_nodes;
  }
  report.stayed.rows = rows_had_they_stayed(plan, choice);
  report.bytes_per_expert = Expert::num_weights(plan.shape) * static_cast<std::int64_t>(sizeof(float));
  return report;
}

std::string to_text(const DemoPlan& plan, const BalanceReport& report) {
  std::vector<std::string> header = {"experts", "busiest rank", "mean", "max/mean"};
  const bool nodes = plan.num_nodes > 1;
  if (nodes) header.insert(header.end(), {"between nodes", "by the ids"});
  Table table(std::move(header));
  const auto add = [&](const char* name, const HalfLoad& half) {
    const std::int64_t total = std::accumulate(half.rows.begin(), half.rows.end(), std::int64_t{0});
    std::vector<std::string> row = {
        name, fmt::format("{} rows", *std::max_element(half.rows.begin(), half.rows.end())),
        fmt::format("{:.1f}", static_cast<double>(total) / static_cast<double>(half.rows.size())),
        fmt::format("{:.3f}", half.max_over_mean())};
    if (nodes) {
      row.push_back(half.wire_bytes == 0 ? "-" : format_bytes(static_cast<double>(half.wire_bytes)));
      row.push_back(format_bytes(static_cast<double>(half.formula_bytes)));
    }
    table.add_row(std::move(row));
  };
  add("first half, in order", report.first);
  add("second half, had they stayed", report.stayed);
  add("second half, moved", report.moved);
  const MoveFigures& moves = report.moves;
  return fmt::format(
      "experts moved between the halves: {} came to another rank ({}{} of weights by one dispatch, {}), placement "
      "computed in {}\n{}\n{}",
      moves.num_moved, nodes ? fmt::format("{} from another node, ", moves.num_between_nodes) : "",
      format_bytes(static_cast<double>(moves.num_moved * report.bytes_per_expert)), format_ns(moves.move_ns),
      format_ns(moves.balance_ns), table.to_string(), picture(report));
}

Json to_json(const BalanceReport& report) {
  return {{"moved", report.moves.num_moved},
          {"moved_between_nodes", report.moves.num_between_nodes},
          {"bytes_per_expert", report.bytes_per_expert},
          {"balance_ns", report.moves.balance_ns},
          {"move_ns", report.moves.move_ns},
          {"physical_to_logical", report.placement},
          {"first_half", to_json(report.first)},
          {"second_half_had_they_stayed", to_json(report.stayed)},
          {"second_half", to_json(report.moved)}};
}

}  // namespace ferry::tools
