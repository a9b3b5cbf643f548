#ifndef FERRY_NET_UCX_ROUTES_HPP
#define FERRY_NET_UCX_ROUTES_HPP

#include <string>
#include <string_view>

#include "net/ucx/library.hpp"

namespace ferry::net::ucx {

/// The transports of an endpoint's lanes and what each is for, e.g. "tcp/eth0 (puts, messages)". UCX offers them as
/// text for people only (ucp_ep_print_info); where that text is not as expected, this is "unknown".
std::string describe_endpoint(const Library& library, ucp_ep_h endpoint);

/// The parser of that text.
std::string describe_lanes(std::string_view info);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_ROUTES_HPP
