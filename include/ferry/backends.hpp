#ifndef FERRY_BACKENDS_HPP
#define FERRY_BACKENDS_HPP

/// The backends of this build, and whether each can run on this machine.

#include <string>
#include <vector>

#include "ferry/export.hpp"

namespace ferry {

/// One backend of this build.
struct BackendInfo {
  std::string name{};         ///< value for GroupOptions::backend, e.g. "cpu"
  std::string description{};  ///< one-line description
  bool available = false;     ///< can run on this machine now
  std::string reason{};       ///< why not, and the remedy; empty when available
};

/// All backends of this build, best first. Has no side effects.
FERRY_API std::vector<BackendInfo> backends();

}  // namespace ferry

#endif  // FERRY_BACKENDS_HPP
