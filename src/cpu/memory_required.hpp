#ifndef FERRY_CPU_MEMORY_REQUIRED_HPP
#define FERRY_CPU_MEMORY_REQUIRED_HPP

#include <cstddef>

#include "ferry/group.hpp"
#include "ferry/status.hpp"

namespace ferry::cpu {

/// Implements BackendFactory::bytes_required.
Result<std::size_t> bytes_required(const MemoryShape& shape, const Topology& topology);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_MEMORY_REQUIRED_HPP
