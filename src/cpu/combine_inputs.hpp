#ifndef FERRY_CPU_COMBINE_INPUTS_HPP
#define FERRY_CPU_COMBINE_INPUTS_HPP

#include "core/backend.hpp"
#include "cpu/cpu_routing.hpp"
#include "cpu/staging.hpp"
#include "node/crew.hpp"

namespace ferry::cpu {

/// Tell the node where combine's rows and returned weights are, by the ticket. Weights are copied into the arena, and
/// so are the rows unless `readers_reach_rows`: all ranks that will read them can do so where they are.
/// @errors those of Staging, without the name of the call
Status publish_combine_inputs(const CombineCall& call, const CpuRouting& routing, node::Crew& crew, Staging& staging,
                              bool readers_reach_rows, node::Ticket& ticket);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_COMBINE_INPUTS_HPP
