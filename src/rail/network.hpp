#ifndef FERRY_RAIL_NETWORK_HPP
#define FERRY_RAIL_NETWORK_HPP

/// Opens a network engine for this rank and exchanges addresses with its peers.

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend_context.hpp"
#include "core/rank_place.hpp"
#include "net/engine.hpp"
#include "net/threads.hpp"
#include "rail/net_devices.hpp"

namespace ferry::rail {

/// An engine that has not connected yet.
struct Network {
  std::string engine_name{};
  NetDeviceChoice devices{};
  net::EngineOptions options{};
  net::CardSettings cards{};  ///< those that the engine has given to cards
  std::unique_ptr<net::Engine> engine{};
  std::vector<net::Blob> addresses{};  ///< by peer

  /// Description for errors: the engine, its devices, and the reason for their choice.
  std::string describe() const;
};

struct NetworkParams {
  /// `ranks` names the rank of every peer; open_network() sets the members about hosts and devices.
  net::EngineOptions engine{};
  std::span<const RankPlace> places{};  ///< of all ranks
  /// PCI address of the rank's GPU, for the choice of a near network card; empty: no GPU.
  std::string gpu_pci_address{};
  /// If not null, the creation can do without this network: where a rank fails to open its end, open_network() returns
  /// that error, puts it here too, and the creation goes on.
  Status* failed_attempt = nullptr;
};

/// Reserves this rank's threads of the network, none in a group of one node. Ranks may share a limit: they keep them
/// until an exchange has shown that all have enough.
Status reserve_threads(const Topology& topology, net::ReservedThreads* threads);

/// Collective over all ranks: succeeds on all or fails on all, with `my_status` if that is an error.
Result<Network> open_network(const BackendContext& context, const NetworkParams& params, const Status& my_status);

/// `versions`: Engine::version of each rank.
/// @errors kUnsupported: they differ
Status check_engine_versions(std::span<const std::string_view> versions);

}  // namespace ferry::rail

#endif  // FERRY_RAIL_NETWORK_HPP
