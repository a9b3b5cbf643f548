#include "bootstrap/ports.hpp"

#include <fmt/format.h>

namespace ferry::bootstrap {
namespace {

/// FNV-1a, 32 bits. Not for security.
std::uint32_t hash_of(std::string_view text) {
  constexpr std::uint32_t kOffsetBasis = 2'166'136'261U;
  constexpr std::uint32_t kPrime = 16'777'619U;
  std::uint32_t hash = kOffsetBasis;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * kPrime;
  return hash;
}

}  // namespace

std::uint16_t derive_port(std::string_view text) {
  return static_cast<std::uint16_t>(kFirstDerivedPort + hash_of(text) % kNumDerivedPorts);
}

std::vector<std::uint16_t> ports_of(const TcpBootstrapOptions& options) {
  std::vector<std::uint16_t> ports = {options.port};
  for (int i = 1; i <= options.num_spare_ports; ++i)
    ports.push_back(derive_port(fmt::format("{}.{}", options.port, i)));
  return ports;
}

std::string describe_ports(const TcpBootstrapOptions& options) {
  const std::vector<std::uint16_t> ports = ports_of(options);
  std::string text = fmt::format("port {}", ports.front());
  for (std::size_t i = 1; i < ports.size(); ++i) {
    text += fmt::format("{}{}", i + 1 < ports.size() ? ", " : " or ", ports[i]);
  }
  return text;
}

}  // namespace ferry::bootstrap
