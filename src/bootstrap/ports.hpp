#ifndef FERRY_BOOTSTRAP_PORTS_HPP
#define FERRY_BOOTSTRAP_PORTS_HPP

/// Ports on which rank 0 may listen. All ranks derive the same ones.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/bootstrap.hpp"

namespace ferry::bootstrap {

/// Port if no variable gives one, and range of derived ports. All are below 32768, where the default range of ports for
/// outgoing connections begins on Linux.
inline constexpr std::uint16_t kDefaultPort = 28'000;
inline constexpr std::uint16_t kFirstDerivedPort = 20'000;
inline constexpr std::uint16_t kNumDerivedPorts = 8'000;

/// Spare ports of a job. Far apart, so a few suffice: that all are taken is next to impossible by accident.
inline constexpr int kNumSparePorts = 3;

/// Different texts nearly always have different ports.
std::uint16_t derive_port(std::string_view text);

/// The port of `options`, then its spare ports: those derived from "port.1", "port.2", ….
std::vector<std::uint16_t> ports_of(const TcpBootstrapOptions& options);

/// "port 29501", "port 29501, 21207, 26100 or 25011".
std::string describe_ports(const TcpBootstrapOptions& options);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_PORTS_HPP
