#ifndef FERRY_TRANSPORTS_HPP
#define FERRY_TRANSPORTS_HPP

/// Networks over which ranks of different nodes can exchange data, whether each works on this machine, and their
/// devices.

#include <string>
#include <vector>

#include "ferry/export.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// One network engine of this build.
struct TransportInfo {
  std::string name{};         ///< value for GroupOptions::transport, e.g. "ucx"
  std::string description{};  ///< one-line description
  bool available = false;     ///< can run on this machine now
  std::string reason{};       ///< why not, and the remedy; empty when available
  std::string library{};      ///< version and path of the library that it loaded; empty: none
};

/// All network engines of this build, best first. Loads their libraries, if they have any, and starts nothing.
FERRY_API std::vector<TransportInfo> transports();

/// A device that carries data between hosts: a network interface, or a port of an RDMA card.
struct NetDeviceInfo {
  std::string name{};                    ///< value for GroupOptions::net_devices, e.g. "eth0", "mlx5_0:1"
  std::vector<std::string> addresses{};  ///< numeric addresses of an interface
  bool rdma = false;                     ///< a port of an RDMA card
  bool loopback = false;                 ///< reaches this host only
  bool usable = false;                   ///< an interface that is up and has an address, or an active port
  std::string link_layer{};              ///< of a port: "InfiniBand" or "Ethernet" (RoCE); empty: not known
  int rate_gbps = 0;                     ///< of a port, in whole Gb/s; 0: not known
};

/// The network devices of this host, whether usable or not. Empty if the system does not list them.
FERRY_API std::vector<NetDeviceInfo> net_devices();

/// Names of the usable ports of RDMA cards that are nearest to the PCI device at `pci_address` ("0000:1b:00.0"): the
/// ports that GPU ranks divide among themselves. Only the fastest ports of one link layer count, see
/// docs/network-cards.md. Empty if the system does not list them.
FERRY_API std::vector<std::string> nearest_net_devices(const std::string& pci_address);

/// Devices, and the reason for the choice.
struct NetDeviceChoice {
  std::string devices{};  ///< names separated by commas
  std::string reason{};   ///< e.g. "GroupOptions::net_devices", "eth0 leads to rank 0 at 192.0.2.1"
};

/// Devices that this rank would use between hosts. `wanted` stands for GroupOptions::net_devices. `rank_0` is the
/// numeric address at which the bootstrap reaches rank 0; if it is empty (not known) or loopback, the interface of the
/// default route is used. Reads the environment (docs/nodes.md); sends nothing.
/// @errors kInvalidArgument: a named device does not exist or cannot be used (the message lists those that do);
///         kUnsupported: no interface leads to rank 0
FERRY_API Result<NetDeviceChoice> choose_net_devices(const std::string& wanted = {}, const std::string& rank_0 = {});

/// One condition for network cards to read and write GPU memory by themselves (GPUDirect).
struct GpuDirectFact {
  std::string name{};  ///< "gpu", "driver", "card" or "network library"
  bool present = false;
  std::string observed{};  ///< state found on this machine
  std::string advice{};    ///< remedy if it is not present
};

/// Every condition of GroupOptions::ring_memory = "gpu" on this host that can be checked without a group. `transport`
/// and `device` as in GroupOptions. Opens the transport's library.
FERRY_API std::vector<GpuDirectFact> gpu_direct_facts(const std::string& transport = "auto", int device = -1);

}  // namespace ferry

#endif  // FERRY_TRANSPORTS_HPP
