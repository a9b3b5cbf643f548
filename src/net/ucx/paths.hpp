#ifndef FERRY_NET_UCX_PATHS_HPP
#define FERRY_NET_UCX_PATHS_HPP

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "net/ucx/library.hpp"

namespace ferry::net::ucx {

/// Transport through which an endpoint reaches its peer.
struct Lane {
  std::string transport;  ///< and device: "tcp/eth0.0", "posix/memory.0"
  bool puts = false;
  bool messages = false;
};

/// Lanes of an endpoint. UCX offers them only as text for people (ucp_ep_print_info); empty if the text has another
/// form.
std::vector<Lane> lanes_of(const Library& library, ucp_ep_h endpoint);

/// Parser of that text.
std::vector<Lane> parse_lanes(std::string_view info);

/// For display: "tcp/eth0.0 (puts, messages)", "unknown" if there are none.
std::string describe(const std::vector<Lane>& lanes);

/// True if there are lanes and all of them use memory of this host (UCX calls that device "memory").
bool are_in_memory(const std::vector<Lane>& lanes);

/// Number of network devices that write into the peer's memory by themselves.
std::size_t num_writing_devices(const std::vector<Lane>& lanes);

/// Number of lanes by which network devices do.
std::size_t num_writing_lanes(const std::vector<Lane>& lanes);

/// True if a network card performs puts. UCX also assigns a lane to puts that it emulates with messages.
bool have_remote_writes(const std::vector<Lane>& lanes);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_PATHS_HPP
