#ifndef FERRY_CPU_INTRANODE_CALLS_HPP
#define FERRY_CPU_INTRANODE_CALLS_HPP

#include <memory>

#include "core/backend.hpp"
#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"
#include "cpu/latency/survivors.hpp"

/// Route, dispatch and combine between ranks of one node, which copy rows directly into each other's memory.
namespace ferry::cpu::intranode {

/// Fills `routing`, which must be new.
Status route(const RouteCall& call, const Context& context, CpuRouting& routing);
Status dispatch(const DispatchCall& call, const Context& context);
/// `survivors`: a weighted combine of latency mode, without the ranks that this one masks; null: of all ranks.
Status combine(const CombineCall& call, const Context& context, Survivors* survivors = nullptr);

/// A route of layout kSlab and a dispatch in one call, without the ranks that this one masks; fills `routing`. One call
/// plans and moves rows, because rows of a rank that is lost meanwhile are taken out of the plan again. `dispatch`
/// quantises nothing.
Status dispatch_among(const LatencyDispatchCall& call, DispatchCall dispatch,
                      const std::shared_ptr<CpuRouting>& routing, const Context& context, Survivors& survivors);

}  // namespace ferry::cpu::intranode

#endif  // FERRY_CPU_INTRANODE_CALLS_HPP
