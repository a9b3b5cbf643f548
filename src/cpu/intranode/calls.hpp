#ifndef FERRY_CPU_INTRANODE_CALLS_HPP
#define FERRY_CPU_INTRANODE_CALLS_HPP

#include <memory>

#include "core/backend.hpp"
#include "cpu/context/context.hpp"

/// The three calls between ranks of one node, which copy rows directly into each other's memory.
namespace ferry::cpu::intranode {

Result<std::shared_ptr<RoutingState>> route(const RouteCall& call, const Context& context);
Status dispatch(const DispatchCall& call, const Context& context);
Status combine(const CombineCall& call, const Context& context);

}  // namespace ferry::cpu::intranode

#endif  // FERRY_CPU_INTRANODE_CALLS_HPP
