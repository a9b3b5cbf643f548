#ifndef FERRY_BOOTSTRAP_TCP_BOOTSTRAP_HPP
#define FERRY_BOOTSTRAP_TCP_BOOTSTRAP_HPP

#include <memory>
#include <string>

#include "ferry/bootstrap.hpp"

namespace ferry::bootstrap {

/// create_tcp_bootstrap for a rank that says it runs `version` of the library.
Result<std::shared_ptr<Bootstrap>> create_tcp_bootstrap_as(const TcpBootstrapOptions& options,
                                                           const std::string& version);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_BOOTSTRAP_HPP
