#ifndef FERRY_NET_UCX_SETUP_HPP
#define FERRY_NET_UCX_SETUP_HPP

/// How an end sets UCX up: which peers a context is for, and which transports and devices it may use.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::net::ucx {

/// Peers of this host use memory and the loopback interface, so that nothing listens to other hosts for their sake.
enum class Scope { kHost, kNetwork };
inline constexpr std::size_t kNumScopes = 2;

/// One way to set up a context. Empty: as UCX's variables say, or its defaults.
struct Setup {
  std::string transports{};  ///< UCX_TLS
  std::string devices{};     ///< UCX_NET_DEVICES
  /// Peers write into this end's memory by UCX's puts. Only where every transport's network card does that: otherwise
  /// UCX would emulate puts by messages that name addresses and come from anybody who connects.
  bool remote_writes = false;
  /// UCX makes files for the posix transport.
  bool shared_memory = false;
  /// Whether to try the next one if the system lacks what this one needs.
  bool optional = false;
};

/// What the environment and the machine say.
struct Surroundings {
  const char* transports = nullptr;  ///< UCX_TLS; null if not set
  const char* devices = nullptr;     ///< UCX_NET_DEVICES; null if not set
  std::string loopback{};            ///< name of the loopback interface; empty if there is none
  bool has_infiniband = false;       ///< a card for InfiniBand or RoCE
  bool gpu_memory = false;           ///< peers' cards are to reach GPU memory of this end, too

  static Surroundings here();
};

/// The setups to try, best first; never empty. `devices`: what the engine's owner allows for other hosts.
std::vector<Setup> setups_for(Scope scope, std::string_view devices, const Surroundings& surroundings);

/// Network interfaces of this host that are up and have an address: on each of them UCX may listen.
std::size_t num_network_interfaces();

/// Whether a value of UCX_TLS allows a transport of that name.
bool allows(std::string_view transports, std::string_view name);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SETUP_HPP
