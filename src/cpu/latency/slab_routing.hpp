#ifndef FERRY_CPU_LATENCY_SLAB_ROUTING_HPP
#define FERRY_CPU_LATENCY_SLAB_ROUTING_HPP

#include <cstdint>
#include <memory>

#include "core/backend.hpp"
#include "cpu/context/routing.hpp"

namespace ferry::cpu {

/// Makes a Routing whose views point to the memory that route will write, so that programs can take them between the
/// halves of a split dispatch. Counts are 0, and no row has a source.
std::shared_ptr<CpuRouting> begin_slab_routing(const LatencyDispatchCall& call, const Topology& topology,
                                               const std::shared_ptr<SpareTables>& spare_tables);

/// Rows of one (expert, source) in source_ranges.
struct SourceRange {
  std::int32_t num_rows = 0;
  std::int32_t first = 0;
};

/// Fills source_ranges, after route.
void write_source_ranges(CpuRouting& routing);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_LATENCY_SLAB_ROUTING_HPP
