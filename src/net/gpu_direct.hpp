#ifndef FERRY_NET_GPU_DIRECT_HPP
#define FERRY_NET_GPU_DIRECT_HPP

/// Host requirements for network cards that read and write GPU memory by themselves (GPUDirect). The backend reports
/// the GPU's own requirements.

#include <filesystem>
#include <span>
#include <vector>

#include "ferry/status.hpp"
#include "ferry/transports.hpp"

namespace ferry::net {

/// Checks for a card with an active port.
GpuDirectFact card_fact(std::span<const NetDeviceInfo> devices);

/// Checks for access from a card's driver to GPU memory: a kernel module, or dma-buf if the GPU's driver has it.
GpuDirectFact driver_fact(bool gpu_has_dma_buf, const std::filesystem::path& modules = "/sys/module");

/// Variable that says how puts into GPU memory that follow each other are ordered: "flush", which holds on every
/// network, or "fence", on networks whose cards place the bytes of a write behind those of the writes before it. Cards
/// do not where adaptive routing reorders packets and they place them as they come.
inline constexpr const char* kCardOrderVariable = "FERRY_CARD_ORDER";

/// True if the variable says "fence". Ranks may differ.
/// @errors kInvalidArgument: another value than these two
Result<bool> cards_keep_order();

}  // namespace ferry::net

#endif  // FERRY_NET_GPU_DIRECT_HPP
