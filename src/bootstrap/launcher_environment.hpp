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

/// Port if no variable gives one, and range of the ports derived from a job's id. All are below 32768, where the
/// default range of ports for outgoing connections begins on Linux.
inline constexpr std::uint16_t kDefaultPort = 28'000;
inline constexpr std::uint16_t kFirstDerivedPort = 20'000;
inline constexpr std::uint16_t kNumDerivedPorts = 8'000;

Result<TcpBootstrapOptions> tcp_bootstrap_options_from(const EnvironmentLookup& lookup);

std::vector<LauncherVariables> launcher_variables_from(const EnvironmentLookup& lookup);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_LAUNCHER_ENVIRONMENT_HPP
