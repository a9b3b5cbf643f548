#include "cpu/intranode/route_steps.hpp"

#include <fmt/format.h>

#include <limits>

namespace ferry::cpu::intranode {
namespace {

using plan::RouteTables;

/// Fills source_table from the peers' lists of tokens.
void read_sources(const plan::RouteShape& shape, const PeerTables& peers, const plan::ExpertGroups& groups,
                  std::size_t my_rank, CpuRouting& routing) {
  // Start of each run in its source's list.
  std::vector<std::vector<std::int64_t>> run_begins;
  for (const plan::SourceCounts& source : peers.counts) {
    std::vector<std::int64_t>& begins = run_begins.emplace_back(shape.num_runs() + 1, 0);
    const std::int32_t* const counts = source.of_runs(shape);
    for (std::size_t run = 0; run < shape.num_runs(); ++run) begins[run + 1] = begins[run] + counts[run];
  }
  const auto read_run = [&](std::size_t run, std::size_t source, std::int64_t first_row, std::int32_t num_rows) {
    const std::int32_t* const tokens = peers.tables[source].tokens + run_begins[source][run];
    const std::int64_t num_tokens = routing.num_tokens_of_rank[source];
    std::int32_t* const rows = routing.source_table.data() + first_row * 2;
    for (std::int64_t i = 0; i < num_rows; ++i) {
      // Clamp: a faulty peer must not cause an out-of-range read.
      const bool exists = tokens[i] >= 0 && tokens[i] < num_tokens;
      rows[2 * i] = static_cast<std::int32_t>(source);
      rows[2 * i + 1] = exists ? tokens[i] : 0;
    }
  };
  plan::for_each_received_run(shape, peers.counts, groups, my_rank, read_run);
}

Status bad_tables(int rank, const char* what) {
  return Status(ErrorCode::kInternal, fmt::format("route: rank {} published {}; please report this bug", rank, what),
                rank);
}

}  // namespace

Status publish_tables(const RouteCall& call, const plan::RouteShape& shape, const CpuRouting& routing,
                      const Context& context, node::CallDescriptor& descriptor) {
  const RouteTables::Shape sizes{shape.num_ranks, shape.num_experts, routing.ids.size()};
  const std::size_t tables_bytes = RouteTables::at(nullptr, sizes).size_bytes;
  Result<std::byte*> base = context.staging.route_tables(tables_bytes);
  if (!base.ok()) return base.status();
  const RouteTables tables = RouteTables::at(*base, sizes);
  plan::count_tokens(shape, routing.ids, tables.rank_counts, tables.expert_counts);
  plan::list_run_tokens(shape, routing.ids, shape.by_rank() ? tables.rank_counts : tables.expert_counts, tables.tokens);
  descriptor.tables = context.peers().locate(*base, 1, static_cast<std::int64_t>(tables_bytes), 0);
  descriptor.max_recv_rows = call.options.max_recv_rows;
  descriptor.num_entries = call.num_tokens * call.num_topk;
  return {};
}

Result<RankTables> find_tables(const plan::RouteShape& shape, const node::Peers& peers, int rank,
                               const node::CallDescriptor& descriptor) {
  const std::int64_t num_entries = descriptor.num_entries;
  const bool countable = num_entries >= 0 && num_entries <= std::numeric_limits<std::int32_t>::max();
  const RouteTables::Shape sizes{shape.num_ranks, shape.num_experts, countable ? to_size(num_entries) : 0};
  const auto tables_bytes = static_cast<std::int64_t>(RouteTables::at(nullptr, sizes).size_bytes);
  std::byte* const base = peers.resolve(descriptor.tables, rank, {1, tables_bytes});
  if (base == nullptr || !countable) return bad_tables(rank, "a location outside its arena");
  RankTables found;
  found.tables = RouteTables::at(base, sizes);
  found.counts = {found.tables.rank_counts, found.tables.expert_counts, num_entries, descriptor.max_recv_rows};
  if (!plan::counts_fit(shape, found.counts)) return bad_tables(rank, "counts that exceed its tokens");
  return found;
}

Status plan_from_tables(const RouteCall& call, const plan::RouteShape& shape, const PeerTables& peers,
                        std::size_t my_rank, std::span<const std::int64_t> ids, CpuRouting& routing) {
  const plan::ExpertGroups groups = plan::group_experts(shape, peers.counts);
  if (Status status = plan::check_capacity(shape, peers.counts, groups); !status.ok()) return status;
  plan_rows(shape, peers.counts, groups, my_rank, ids, routing);
  read_sources(shape, peers, groups, my_rank, routing);
  finish(call, shape, groups, my_rank, peers.counts[my_rank].expert_counts, routing);
  return {};
}

}  // namespace ferry::cpu::intranode
