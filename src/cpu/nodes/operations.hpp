#ifndef FERRY_CPU_NODES_OPERATIONS_HPP
#define FERRY_CPU_NODES_OPERATIONS_HPP

/// The three calls over several nodes, as the backend runs them.

#include <memory>

#include "core/backend.hpp"
#include "cpu/staging.hpp"
#include "hop/collective.hpp"
#include "hop/rails.hpp"
#include "node/crew.hpp"

namespace ferry::cpu::nodes {

/// Items are multiples of this, as rows are; streams of bytes travel as items of this size.
inline constexpr auto kGranuleBytes = static_cast<std::size_t>(kRowGranuleBytes);

/// What a call works with.
struct Means {
  node::Crew& crew;
  hop::Rails& rails;
  hop::Collective& collective;
  Staging& staging;

  const Topology& topology() const { return rails.topology(); }
};

Result<std::shared_ptr<RoutingState>> route(const RouteCall& call, const Means& means);
Status dispatch(const DispatchCall& call, const Means& means);
Status combine(const CombineCall& call, const Means& means);

}  // namespace ferry::cpu::nodes

#endif  // FERRY_CPU_NODES_OPERATIONS_HPP
