#ifndef FERRY_RAIL_RING_MEMORY_HPP
#define FERRY_RAIL_RING_MEMORY_HPP

/// Location of the chunks of rings between nodes: pinned host memory, or GPU memory that network cards reach.

#include <string>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"
#include "ferry/transports.hpp"

namespace ferry::rail {

/// GPUDirect facts that a GPU and its driver report.
struct GpuPart {
  GpuDirectFact registration;
  bool has_dma_buf = false;
};

/// All requirements of rings in GPU memory. `transport`: GroupOptions::transport.
std::vector<GpuDirectFact> gpu_direct_facts(const GpuPart& gpu, const std::string& transport);

/// Checks that rings can be in the memory that `wanted` (GroupOptions::ring_memory) names.
/// @errors kUnsupported: `wanted` is "gpu" and a requirement is missing: names all that are missing, and the remedies
Status check_ring_memory(std::string_view wanted, const std::vector<GpuDirectFact>& facts);

}  // namespace ferry::rail

#endif  // FERRY_RAIL_RING_MEMORY_HPP
