#ifndef FERRY_RAIL_NETWORK_HPP
#define FERRY_RAIL_NETWORK_HPP

/// Opens a network engine for this rank and learns how its peers are reached.

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend_context.hpp"
#include "core/rank_place.hpp"
#include "net/engine.hpp"
#include "rail/net_devices.hpp"

namespace ferry::rail {

/// An engine that has not connected yet.
struct Network {
  std::string engine_name{};
  NetDeviceChoice devices{};
  net::EngineOptions options{};
  std::unique_ptr<net::Engine> engine{};
  std::vector<net::Blob> addresses{};  ///< by peer

  /// For errors: the engine, its devices and what decided about them.
  std::string describe() const;
};

struct NetworkParams {
  /// `ranks` names the rank of every peer; what concerns hosts and devices is filled in.
  net::EngineOptions engine{};
  std::span<const RankPlace> places{};  ///< of all ranks
  /// Of the rank's GPU, for the network card next to it; empty: it has none.
  std::string gpu_pci_address{};
};

/// Collective over all ranks: succeeds on all or fails on all, with `my_status` if that is an error.
Result<Network> open_network(const BackendContext& context, const NetworkParams& params, const Status& my_status);

/// `versions`: Engine::version of each rank's.
/// @errors kUnsupported: they differ
Status check_engine_versions(std::span<const std::string_view> versions);

}  // namespace ferry::rail

#endif  // FERRY_RAIL_NETWORK_HPP
