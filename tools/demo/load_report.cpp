#include "demo/load_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "report/table.hpp"

namespace ferry::tools {

namespace {

/// With more columns the table does not fit a screen.
constexpr std::size_t kMaxColumns = 8;

std::string cell_of(std::int64_t time_ns) { return time_ns == 0 ? "-" : format_ns(time_ns); }

/// Time that all ranks together have waited for each rank.
std::vector<std::int64_t> sums_by_peer(const std::vector<std::vector<std::int64_t>>& waits_ns) {
  std::vector<std::int64_t> sums(waits_ns.size(), 0);
  for (const std::vector<std::int64_t>& of_rank : waits_ns) {
    for (std::size_t peer = 0; peer < of_rank.size(); ++peer) sums[peer] += of_rank[peer];
  }
  return sums;
}

std::string wait_table(const std::vector<std::vector<std::int64_t>>& waits_ns) {
  const std::vector<std::int64_t> sums = sums_by_peer(waits_ns);
  std::vector<std::string> header = {"waited for rank"};
  for (std::size_t peer = 0; peer < waits_ns.size(); ++peer) header.push_back(fmt::to_string(peer));
  Table table(std::move(header));
  for (std::size_t rank = 0; rank < waits_ns.size(); ++rank) {
    std::vector<std::string> row = {fmt::format("rank {}", rank)};
    for (const std::int64_t time_ns : waits_ns[rank]) row.push_back(cell_of(time_ns));
    table.add_row(std::move(row));
  }
  std::vector<std::string> row = {"all"};
  for (const std::int64_t time_ns : sums) row.push_back(cell_of(time_ns));
  table.add_row(std::move(row));
  return table.to_string();
}

/// True if kernels wait without measuring it.
bool are_waits_unknown(const DemoPlan& plan) { return plan.latency() && plan.backend == "cuda" && plan.num_nodes == 1; }

}  // namespace

double max_over_mean(const std::vector<std::int64_t>& loads) {
  const std::int64_t total = std::accumulate(loads.begin(), loads.end(), std::int64_t{0});
  if (total == 0) return 1;
  return static_cast<double>(*std::max_element(loads.begin(), loads.end())) * static_cast<double>(loads.size()) /
         static_cast<double>(total);
}

std::string to_text(const DemoPlan& plan, const RankLoads& loads) {
  const auto busiest = std::max_element(loads.rows.begin(), loads.rows.end());
  const std::int64_t total = std::accumulate(loads.rows.begin(), loads.rows.end(), std::int64_t{0});
  std::string text = fmt::format("load of ranks{}: max/mean {:.3f} (rank {} works on {} rows, mean {:.1f})\n",
                                 plan.balances() ? ", both halves together" : "", max_over_mean(loads.rows),
                                 busiest - loads.rows.begin(), *busiest,
                                 static_cast<double>(total) / static_cast<double>(loads.rows.size()));
  if (loads.rows.size() == 1) return text + "\n";
  if (are_waits_unknown(plan)) {
    return text + "waits for other ranks: not measured in latency mode by GPUs of one node\n\n";
  }
  const std::vector<std::int64_t> sums = sums_by_peer(loads.waits_ns);
  const auto most = std::max_element(sums.begin(), sums.end());
  if (*most == 0) return text + "waits for other ranks: none long enough to count\n\n";
  text += fmt::format("waits for other ranks in calls: most for rank {}, {} over all ranks that waited\n",
                      most - sums.begin(), format_ns(*most));
  return text + (loads.rows.size() <= kMaxColumns ? wait_table(loads.waits_ns) : "") + "\n";
}

Json to_json(const RankLoads& loads) {
  return {
      {"rows_per_rank", loads.rows}, {"max_over_mean", max_over_mean(loads.rows)}, {"wait_times_ns", loads.waits_ns}};
}

}  // namespace ferry::tools
