#ifndef FERRY_CUDA_INTRANODE_CALLS_HPP
#define FERRY_CUDA_INTRANODE_CALLS_HPP

/// The calls of a group whose ranks are all on one host: what Backend asks of each is in core/backend.hpp.

#include <memory>

#include "core/backend.hpp"
#include "cuda/context/context.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda {

/// What the routes of a group leave for later ones.
struct RouteHistory {
  Placements placements;
  std::int64_t most_rows = 0;  ///< of an exact route
};

namespace intranode {

Result<std::shared_ptr<RoutingState>> route(Context& context, RouteHistory& history, const RouteCall& call);
Status dispatch(Context& context, const DispatchCall& call);
Status combine(Context& context, const CombineCall& call);
Status channel_tables(Context& context, const ChannelTablesCall& call);

}  // namespace intranode
}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_CALLS_HPP
