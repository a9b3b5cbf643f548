#include "cuda/call/wait_times.hpp"

#include "cuda/context/parts.hpp"

namespace ferry::cuda {

WaitTimesParams wait_times_of(const Parts& parts, std::int64_t* times_ns) {
  WaitTimesParams params;
  params.local = parts.ranks.control.local;
  params.ranks_per_node = parts.ranks.num_ranks;
  params.rank_in_node = parts.ranks.rank;
  params.times_ns = times_ns;
  if (parts.rail_link == nullptr) return params;
  const RailParams& rails = parts.rail_link->params();
  params.rails = rails.state;
  params.node = rails.node;
  params.num_nodes = rails.num_nodes;
  if (parts.latency_bytes > 0) params.num_group_ranks = rails.num_nodes * parts.ranks.num_ranks;
  return params;
}

}  // namespace ferry::cuda
