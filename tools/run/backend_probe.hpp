#ifndef FERRY_TOOLS_RUN_BACKEND_PROBE_HPP
#define FERRY_TOOLS_RUN_BACKEND_PROBE_HPP

#include <vector>

#include "ferry/backends.hpp"
#include "ferry/status.hpp"
#include "ferry/transports.hpp"

namespace ferry::tools {

/// `ferry::backends()`, called in a short-lived child process, because it may start CUDA, which would not survive the
/// fork that creates the ranks. Call it while this process has one thread.
/// @errors kSystem: the child could not be created, or it died
Result<std::vector<BackendInfo>> probe_backends();

/// `ferry::transports()`, also called in a child process, because network libraries may start threads.
/// @errors as probe_backends
Result<std::vector<TransportInfo>> probe_transports();

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_BACKEND_PROBE_HPP
