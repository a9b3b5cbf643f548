#ifndef FERRY_NET_UCX_SETUP_HPP
#define FERRY_NET_UCX_SETUP_HPP

/// Setup of UCX for an end: the peers of each context, and the transports and devices that it may use.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::net::ucx {

/// Peers on this host use memory and the loopback interface, so that no socket listens to other hosts for them.
enum class Scope { kHost, kNetwork };
inline constexpr std::size_t kNumScopes = 2;

/// One way to set up a context. Empty strings: UCX's variables, or its defaults.
struct Setup {
  std::string transports{};  ///< UCX_TLS
  std::string devices{};     ///< UCX_NET_DEVICES
  /// Peers write into this end's memory by UCX's puts. Only if the network card of every transport performs them:
  /// otherwise UCX would emulate puts by messages that contain addresses and that any process could send after it
  /// connects.
  bool remote_writes = false;
  /// Cards for InfiniBand or RoCE may connect peers, alone or beside other transports.
  bool has_cards = false;
  /// UCX creates files for the posix transport.
  bool shared_memory = false;
  /// Try the next setup if the system lacks resources for this one.
  bool optional = false;
};

/// Settings of the environment and properties of the machine.
struct Surroundings {
  const char* transports = nullptr;  ///< UCX_TLS; null if not set
  const char* devices = nullptr;     ///< UCX_NET_DEVICES; null if not set or empty
  std::string loopback{};            ///< name of the loopback interface; empty if there is none
  bool has_infiniband = false;       ///< there is a card for InfiniBand or RoCE
  bool gpu_memory = false;           ///< peers' cards must also reach GPU memory of this end

  static Surroundings here();
};

/// Setups to try, best first; never empty. `devices`: devices that the engine's owner allows for other hosts.
std::vector<Setup> setups_for(Scope scope, std::string_view devices, const Surroundings& surroundings);

/// Number of interfaces of this host that are up and have an address: UCX may listen on each.
std::size_t num_network_interfaces();

/// True if a value of UCX_TLS allows the transport `name`.
bool allows(std::string_view transports, std::string_view name);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SETUP_HPP
