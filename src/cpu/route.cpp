#include <fmt/format.h>

#include <limits>
#include <vector>

#include "cpu/cpu_backend.hpp"
#include "cpu/router.hpp"
#include "plan/route_tables.hpp"
#include "plan/to_size.hpp"

/// Route on one node: each rank publishes its counts and its tokens by destination in its arena, and reads everybody's.

namespace ferry::cpu {
namespace {

using plan::RouteTables;

/// Everybody's tables, by rank.
Result<std::vector<RouteTables>> read_peers(const RouteCall& call, Crew& crew, Router& router) {
  std::vector<RouteTables> tables;
  for (int rank = 0; rank < crew.num_ranks(); ++rank) {
    const Ticket& ticket = crew.ticket_of(rank);
    const bool countable = ticket.num_entries >= 0 && ticket.num_entries <= std::numeric_limits<std::int32_t>::max();
    const RouteTables::Shape shape{to_size(crew.num_ranks()), to_size(call.options.num_experts),
                                   countable ? to_size(ticket.num_entries) : 0};
    const auto tables_bytes = static_cast<std::int64_t>(RouteTables::at(nullptr, shape).size_bytes);
    std::byte* base = crew.resolve(ticket.records, rank, {1, tables_bytes});
    if (base == nullptr || !countable) {
      return crew.fail(ErrorCode::kInternal, rank,
                       fmt::format("route: rank {} published tables outside its arena; please report this bug", rank));
    }
    tables.push_back(RouteTables::at(base, shape));
    if (!router.add_source(
            {tables.back().rank_counts, tables.back().expert_counts, ticket.num_entries, ticket.max_recv_rows})) {
      return crew.fail(
          ErrorCode::kInternal, rank,
          fmt::format("route: rank {} published counts that exceed its tokens; please report this bug", rank));
    }
  }
  return tables;
}

/// Where this rank's rows come from.
void read_sources(const Router& router, const std::vector<RouteTables>& peers, std::size_t my_rank, CpuRouting& state) {
  std::vector<std::int64_t> next_row(router.by_rank() ? 1 : router.num_runs(), 0);
  if (!router.by_rank()) next_row = router.expert_first_row();
  for (std::size_t source = 0; source < peers.size(); ++source) {
    const RouteTables& tables = peers[source];
    const std::int32_t* counts = router.by_rank() ? tables.rank_counts : tables.expert_counts;
    std::int64_t run_begin = 0;
    for (std::size_t run = 0; run < router.num_runs(); run_begin += counts[run], ++run) {
      if ((router.by_rank() ? run : router.owner(run)) != my_rank) continue;
      std::int64_t& row = next_row[router.by_rank() ? 0 : run];
      for (std::int64_t i = 0; i < counts[run]; ++i, ++row) {
        const std::int32_t token = tables.tokens[run_begin + i];
        const bool exists = token >= 0 && token < state.num_tokens_of_rank[source];
        state.source_table[to_size(row) * 2] = static_cast<std::int32_t>(source);
        state.source_table[to_size(row) * 2 + 1] = exists ? token : 0;  // a broken peer must not lead us astray
      }
    }
  }
}

}  // namespace

Result<std::shared_ptr<RoutingState>> CpuBackend::run_route(const RouteCall& call) {
  if (!crew_.broken().ok()) return crew_.broken();
  const auto state = std::make_shared<CpuRouting>();
  Router router(call, topology_, state);
  Ticket ticket;
  ticket.record = call.record;
  if (ticket.record.code == ErrorCode::kOk) {
    router.copy_inputs();
    const RouteTables::Shape shape{to_size(crew_.num_ranks()), to_size(call.options.num_experts),
                                   to_size(call.num_tokens * call.num_topk)};
    const std::size_t tables_bytes = RouteTables::at(nullptr, shape).size_bytes;
    Result<std::byte*> base = staging_.route_tables(tables_bytes);
    if (base.ok()) {
      const RouteTables tables = RouteTables::at(*base, shape);
      router.fill_counts(tables.rank_counts, tables.expert_counts);
      router.fill_tokens(router.by_rank() ? tables.rank_counts : tables.expert_counts, tables.tokens);
      ticket.records = crew_.locate(*base, 1, static_cast<std::int64_t>(tables_bytes), 0);
    } else {
      ticket.record.set_status(base.status());
    }
    ticket.max_recv_rows = call.options.max_recv_rows;
    ticket.num_entries = call.num_tokens * call.num_topk;
  }
  if (Status status = crew_.begin(ticket); !status.ok()) return status;
  Result<std::vector<RouteTables>> peers = read_peers(call, crew_, router);
  if (!peers.ok()) return peers.status();
  router.sum_sources();
  if (Status status = router.check_capacity(); !status.ok()) return status;
  router.place_tokens();
  router.begin_sources();
  read_sources(router, *peers, to_size(crew_.rank()), *state);
  router.finish();
  return std::shared_ptr<RoutingState>(state);
}

}  // namespace ferry::cpu
