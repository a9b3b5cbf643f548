#ifndef FERRY_CORE_BACKEND_CONTEXT_HPP
#define FERRY_CORE_BACKEND_CONTEXT_HPP

#include <vector>

#include "core/tuning.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"

namespace ferry {

/// Arguments of a backend's creation. All ranks have agreed on `options` and `topology` already.
struct BackendContext {
  Bootstrap* bootstrap = nullptr;
  Topology topology;
  GroupOptions options;
  std::vector<TuningTable> tuning{};  ///< this rank's tables
};

}  // namespace ferry

#endif  // FERRY_CORE_BACKEND_CONTEXT_HPP
