#ifndef FERRY_RAIL_RING_MEMORY_HPP
#define FERRY_RAIL_RING_MEMORY_HPP

/// Location of the chunks of rings between nodes: pinned host memory, or GPU memory that network cards reach.

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/rank_place.hpp"
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

/// The rank's GPU, for the choice of the memory.
struct GpuSide {
  std::string pci_address{};  ///< empty: not known
  /// Asks the GPU and its driver. Called only where a card is near the GPU.
  std::function<GpuPart()> examine{};
};

/// Proposal of this rank where GroupOptions::ring_memory is "auto". Where no card is near the GPU it only looks at
/// `devices`. `named`: the devices that the user names; empty: none.
RingProposal propose_gpu_rings(const GpuSide& gpu, const std::string& transport, std::string_view named,
                               std::span<const NetDeviceInfo> devices, const std::filesystem::path& sys = "/sys");

/// Why ranks at these places have their rings in host memory, in one clause that names a rank; empty: they may try GPU
/// memory. The same on every rank.
std::string why_host_memory(std::span<const RankPlace> places);

}  // namespace ferry::rail

#endif  // FERRY_RAIL_RING_MEMORY_HPP
