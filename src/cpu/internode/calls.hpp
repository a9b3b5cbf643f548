#ifndef FERRY_CPU_INTERNODE_CALLS_HPP
#define FERRY_CPU_INTERNODE_CALLS_HPP

#include <memory>

#include "core/backend.hpp"
#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"

/// Route, dispatch and combine between ranks of several nodes.
namespace ferry::cpu::internode {

/// Fills `routing`, which must be new.
Status route(const RouteCall& call, const Context& context, CpuRouting& routing);
Status dispatch(const DispatchCall& call, const Context& context);
Status combine(const CombineCall& call, const Context& context);

}  // namespace ferry::cpu::internode

#endif  // FERRY_CPU_INTERNODE_CALLS_HPP
