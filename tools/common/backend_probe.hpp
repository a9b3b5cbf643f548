#ifndef FERRY_TOOLS_COMMON_BACKEND_PROBE_HPP
#define FERRY_TOOLS_COMMON_BACKEND_PROBE_HPP

#include <vector>

#include "ferry/backends.hpp"
#include "ferry/status.hpp"
#include "ferry/transports.hpp"

namespace ferry::tools {

/// `ferry::backends()`, asked by a short-lived child where looking for GPUs might start CUDA: that does not survive the
/// fork by which this process makes its ranks. Call it while this process has one thread.
/// @errors kSystem: no child could be made, or it died
Result<std::vector<BackendInfo>> probe_backends();

/// `ferry::transports()`, asked by such a child likewise: network libraries start threads as they please.
/// @errors as probe_backends
Result<std::vector<TransportInfo>> probe_transports();

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_COMMON_BACKEND_PROBE_HPP
