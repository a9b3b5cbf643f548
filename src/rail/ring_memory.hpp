#ifndef FERRY_RAIL_RING_MEMORY_HPP
#define FERRY_RAIL_RING_MEMORY_HPP

/// Where the chunks of rings between nodes are: pinned host memory, or GPU memory that network cards reach.

#include <string>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"
#include "ferry/transports.hpp"

namespace ferry::rail {

/// What a GPU and its driver say of themselves.
struct GpuPart {
  GpuDirectFact registration;
  bool has_dma_buf = false;
};

/// All that rings in GPU memory need. `transport`: GroupOptions::transport.
std::vector<GpuDirectFact> gpu_direct_facts(const GpuPart& gpu, const std::string& transport);

/// Whether rings can be where GroupOptions::ring_memory wants them.
/// @errors kUnsupported: "gpu", and something is missing: says all that is, and what to do
Status check_ring_memory(std::string_view wanted, const std::vector<GpuDirectFact>& facts);

}  // namespace ferry::rail

#endif  // FERRY_RAIL_RING_MEMORY_HPP
