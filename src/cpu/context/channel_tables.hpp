#ifndef FERRY_CPU_CONTEXT_CHANNEL_TABLES_HPP
#define FERRY_CPU_CONTEXT_CHANNEL_TABLES_HPP

#include "core/backend.hpp"
#include "cpu/context/routing.hpp"

namespace ferry::cpu {

/// Writes the tables that the call asks for. The Routing is of layout kTokens.
void write_channel_tables(const ChannelTablesCall& call, const CpuRouting& routing);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CONTEXT_CHANNEL_TABLES_HPP
