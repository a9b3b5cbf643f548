#ifndef FERRY_CPU_INTRANODE_CALLS_HPP
#define FERRY_CPU_INTRANODE_CALLS_HPP

#include "core/backend.hpp"
#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"

/// Route, dispatch and combine between ranks of one node, which copy rows directly into each other's memory.
namespace ferry::cpu::intranode {

/// Fills `routing`, which must be new.
Status route(const RouteCall& call, const Context& context, CpuRouting& routing);
Status dispatch(const DispatchCall& call, const Context& context);
Status combine(const CombineCall& call, const Context& context);

}  // namespace ferry::cpu::intranode

#endif  // FERRY_CPU_INTRANODE_CALLS_HPP
