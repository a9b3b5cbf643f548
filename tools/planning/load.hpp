#ifndef FERRY_TOOLS_PLANNING_LOAD_HPP
#define FERRY_TOOLS_PLANNING_LOAD_HPP

/// Uneven routing: by how much the busiest rank has more than experts at random would give it.

#include <cstdint>
#include <string>

#include "common/routing_source.hpp"
#include "planning/shape.hpp"

namespace ferry::tools {

/// `routing`: "random", "zipf", "one-hot" or "trace:FILE", as for `ferry bench`. Counts the ids of all ranks, or of a
/// part of their tokens where there are more than 262,144.
/// @errors kInvalidArgument: no such routing, a node limit with one of them, or a trace of another shape; kSystem: the
///         trace cannot be read
Result<PlanLoad> busiest_load(const PlanShape& shape, const std::string& routing, std::uint64_t seed);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_PLANNING_LOAD_HPP
