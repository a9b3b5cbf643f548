#ifndef FERRY_NET_GPU_DIRECT_HPP
#define FERRY_NET_GPU_DIRECT_HPP

/// What network cards need from a host so that they read and write GPU memory by themselves (GPUDirect). The GPU's own
/// part is the backend's to tell.

#include <filesystem>
#include <span>
#include <vector>

#include "ferry/transports.hpp"

namespace ferry::net {

/// A card with an active port.
GpuDirectFact card_fact(std::span<const NetDeviceInfo> devices);

/// The way from a card's driver to GPU memory: a kernel module, or dma-buf where the GPU's driver has it.
GpuDirectFact driver_fact(bool gpu_has_dma_buf, const std::filesystem::path& modules = "/sys/module");

}  // namespace ferry::net

#endif  // FERRY_NET_GPU_DIRECT_HPP
