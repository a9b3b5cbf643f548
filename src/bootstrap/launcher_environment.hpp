#ifndef FERRY_BOOTSTRAP_LAUNCHER_ENVIRONMENT_HPP
#define FERRY_BOOTSTRAP_LAUNCHER_ENVIRONMENT_HPP

/// The variables that launchers set, made into TcpBootstrapOptions. docs/bootstrap.md has the rules in a table.

#include <cstdint>
#include <functional>
#include <string>

#include "ferry/bootstrap.hpp"

namespace ferry::bootstrap {

/// getenv, or a stand-in: the value of a variable, null where it is not set. An empty value counts as not set.
using EnvironmentLookup = std::function<const char*(const char*)>;

/// Where nothing says which port, and where a port derived from a job's number lies. Both below 32768, where Linux by
/// default begins to number outgoing connections.
inline constexpr std::uint16_t kDefaultPort = 28'000;
inline constexpr std::uint16_t kFirstDerivedPort = 20'000;
inline constexpr std::uint16_t kNumDerivedPorts = 8'000;

Result<TcpBootstrapOptions> tcp_bootstrap_options_from(const EnvironmentLookup& lookup);

/// First host of a Slurm node list such as "gpu[03-07,9],login1"; empty where the list is not understood.
std::string first_host_of_node_list(std::string_view node_list);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_LAUNCHER_ENVIRONMENT_HPP
