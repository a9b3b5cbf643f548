#ifndef FERRY_CUDA_INTRANODE_CALLS_HPP
#define FERRY_CUDA_INTRANODE_CALLS_HPP

/// Calls of a group whose ranks are all on one host. core/backend.hpp describes each call.

#include <memory>

#include "core/backend.hpp"
#include "cuda/context/context.hpp"
#include "cuda/intranode/placements.hpp"

namespace ferry::cuda {

/// Facts about past routes of a group that later routes use.
struct RouteHistory {
  Placements placements;
  std::int64_t most_rows = 0;  ///< most rows that an exact route has had
};

namespace intranode {

Result<std::shared_ptr<RoutingState>> route(Context& context, RouteHistory& history, const RouteCall& call);
Status dispatch(Context& context, const DispatchCall& call);
Status combine(Context& context, const CombineCall& call);
Status channel_tables(Context& context, const ChannelTablesCall& call);

}  // namespace intranode
}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_CALLS_HPP
