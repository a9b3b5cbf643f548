#ifndef FERRY_CORE_GROUP_LOG_HPP
#define FERRY_CORE_GROUP_LOG_HPP

/// Lines of the log about a group that is created or renewed.

#include <string_view>

#include "core/backend.hpp"
#include "core/log.hpp"

namespace ferry {

inline LogRank log_rank(const Topology& topology) { return {topology.rank, topology.num_ranks}; }

/// Logs what the ranks have agreed on, and this rank's own options. `operation`: "create" or "renew".
void log_options(std::string_view operation, const BackendContext& context, std::string_view backend);

/// Logs the memory of a group that has been formed, and its connections to other nodes.
void log_formed(std::string_view operation, const Topology& topology, Backend& backend);

}  // namespace ferry

#endif  // FERRY_CORE_GROUP_LOG_HPP
