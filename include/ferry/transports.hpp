#ifndef FERRY_TRANSPORTS_HPP
#define FERRY_TRANSPORTS_HPP

/// The networks over which ranks of different nodes can exchange data, and whether each works on this machine.

#include <string>
#include <vector>

#include "ferry/export.hpp"

namespace ferry {

/// One network engine of this build.
struct TransportInfo {
  std::string name{};         ///< what GroupOptions::transport takes, e.g. "ucx"
  std::string description{};  ///< one-line description
  bool available = false;     ///< can run on this machine now
  std::string reason{};       ///< why not, and what to do; empty when available
};

/// All network engines of this build, best first. Loads their libraries, where there are any, and starts nothing.
FERRY_API std::vector<TransportInfo> transports();

}  // namespace ferry

#endif  // FERRY_TRANSPORTS_HPP
