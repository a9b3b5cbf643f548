#include "net/gpu_direct.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>
#include <system_error>

namespace ferry::net {
namespace {

/// Kernel module of NVIDIA's driver, and its predecessor, which was built separately (GPUDirect RDMA manual).
constexpr std::array<const char*, 2> kModules{"nvidia_peermem", "nv_peer_mem"};

}  // namespace

GpuDirectFact card_fact(std::span<const NetDeviceInfo> devices) {
  const auto usable = [](const NetDeviceInfo& device) { return device.rdma && device.usable; };
  const auto num_ports = std::ranges::count_if(devices, usable);
  if (num_ports > 0) return {"card", true, fmt::format("{} active RDMA ports", num_ports), ""};
  const bool has_card = std::ranges::any_of(devices, &NetDeviceInfo::rdma);
  return {"card", false, has_card ? "no active RDMA port" : "no RDMA card",
          has_card ? "see ibstat or rdma link" : "only InfiniBand and RoCE cards reach GPU memory"};
}

GpuDirectFact driver_fact(bool gpu_has_dma_buf, const std::filesystem::path& modules) {
  std::error_code error;
  const auto loaded = std::ranges::find_if(
      kModules, [&](const char* module) { return std::filesystem::exists(modules / module, error); });
  if (loaded != kModules.end()) return {"driver", true, fmt::format("module {}", *loaded), ""};
  if (gpu_has_dma_buf) return {"driver", true, "dma-buf", ""};
  return {"driver", false, "neither the module nvidia_peermem nor dma-buf",
          "modprobe nvidia_peermem, or use NVIDIA's open kernel modules, which have dma-buf"};
}

Result<bool> cards_keep_order() {
  const char* const variable = std::getenv(kCardOrderVariable);
  const std::string_view text = variable == nullptr ? "" : variable;
  if (text.empty() || text == "flush") return false;
  if (text == "fence") return true;
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("Group::create: the variable {} is \"{}\", expected \"flush\" or \"fence\"",
                            kCardOrderVariable, text));
}

}  // namespace ferry::net
