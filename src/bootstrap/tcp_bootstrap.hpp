#ifndef FERRY_BOOTSTRAP_TCP_BOOTSTRAP_HPP
#define FERRY_BOOTSTRAP_TCP_BOOTSTRAP_HPP

#include <memory>
#include <string>

#include "bootstrap/vigil.hpp"
#include "core/unique_fd.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

/// create_tcp_bootstrap for a rank that reports `version` as its version of the library.
Result<std::shared_ptr<Bootstrap>> create_tcp_bootstrap_as(const TcpBootstrapOptions& options,
                                                           const std::string& version, const Vigil& vigil = {});

/// Rank 0 of at least two: listens on `listener`, or on the host and port of `options` if it is invalid, until all
/// ranks have connected.
Result<std::shared_ptr<Bootstrap>> create_tcp_root(const TcpBootstrapOptions& options, UniqueFd listener,
                                                   const std::string& version, const Vigil& vigil);

/// Any other rank: tries to connect to rank 0 until the deadline (rank 0 may not have started yet, or may be busy with
/// other connections), then waits until rank 0 reports that all ranks have arrived.
Result<std::shared_ptr<Bootstrap>> create_tcp_peer(const TcpBootstrapOptions& options, const std::string& version,
                                                   const Vigil& vigil);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_BOOTSTRAP_HPP
