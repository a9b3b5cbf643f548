#ifndef FERRY_CPU_LATENCY_MASKED_CALLS_HPP
#define FERRY_CPU_LATENCY_MASKED_CALLS_HPP

/// Latency mode without the ranks that this one masks, on one node. Ranks may mask different ones, so each rank decides
/// alone what its slabs and sums hold: it only reads what others publish in their arenas, which stay mapped whatever
/// becomes of them. Rows lie where their receiver put them, so a combine asks it for the ranges of its sources.

#include <memory>

#include "core/backend.hpp"
#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"
#include "cpu/latency/survivors.hpp"

namespace ferry::cpu {

/// A route of layout kSlab and a dispatch in one call, which fills `routing`. `dispatch` quantises nothing.
Status masked_dispatch(const LatencyDispatchCall& call, DispatchCall dispatch,
                       const std::shared_ptr<CpuRouting>& routing, const Context& context, Survivors& survivors);

/// A weighted combine on such a Routing.
Status masked_combine(const CombineCall& call, const Context& context, Survivors& survivors);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_LATENCY_MASKED_CALLS_HPP
