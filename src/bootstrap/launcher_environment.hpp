#ifndef FERRY_BOOTSTRAP_LAUNCHER_ENVIRONMENT_HPP
#define FERRY_BOOTSTRAP_LAUNCHER_ENVIRONMENT_HPP

/// TcpBootstrapOptions from the variables that launchers set. docs/bootstrap.md lists the rules.

#include <cstdint>
#include <functional>
#include <vector>

#include "ferry/bootstrap.hpp"

namespace ferry::bootstrap {

/// getenv or a substitute: the value of a variable, null if it is not set. An empty value counts as not set.
using EnvironmentLookup = std::function<const char*(const char*)>;

Result<TcpBootstrapOptions> tcp_bootstrap_options_from(const EnvironmentLookup& lookup);

std::vector<LauncherVariables> launcher_variables_from(const EnvironmentLookup& lookup);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_LAUNCHER_ENVIRONMENT_HPP
