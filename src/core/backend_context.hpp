#ifndef FERRY_CORE_BACKEND_CONTEXT_HPP
#define FERRY_CORE_BACKEND_CONTEXT_HPP

#include <cstdint>
#include <vector>

#include "core/present_ranks.hpp"
#include "core/tuning.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"

namespace ferry {

/// Arguments of a backend's creation. All ranks have agreed on `options` and `topology` already.
struct BackendContext {
  Bootstrap* bootstrap = nullptr;  ///< of all ranks of the group; see core/present_ranks.hpp for absent ones
  Topology topology;
  GroupOptions options;
  std::vector<TuningTable> tuning{};  ///< this rank's tables
  /// [R] waits of a group that is renewed, to which those of its further calls are added; else empty.
  std::vector<std::int64_t> earlier_waits_ns{};

  bool is_absent(int rank) const { return !is_present(options, rank); }
};

}  // namespace ferry

#endif  // FERRY_CORE_BACKEND_CONTEXT_HPP
