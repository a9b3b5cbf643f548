#ifndef FERRY_CPU_INTERNODE_CALLS_HPP
#define FERRY_CPU_INTERNODE_CALLS_HPP

#include <memory>

#include "core/backend.hpp"
#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"

/// The three calls between ranks of several nodes.
namespace ferry::cpu::internode {

/// Fills `routing`, a new one.
Status route(const RouteCall& call, const Context& context, CpuRouting& routing);
Status dispatch(const DispatchCall& call, const Context& context);
Status combine(const CombineCall& call, const Context& context);

}  // namespace ferry::cpu::internode

#endif  // FERRY_CPU_INTERNODE_CALLS_HPP
