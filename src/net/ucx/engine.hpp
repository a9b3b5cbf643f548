#ifndef FERRY_NET_UCX_ENGINE_HPP
#define FERRY_NET_UCX_ENGINE_HPP

/// Network through UCX (ucp): TCP and shared memory for tests and small clusters, InfiniBand and RoCE for large ones.
/// UCX is loaded on first use; its UCX_* variables apply as in every program that uses it. This header includes no UCX
/// header, because it is also used without UCX (unavailable.cpp then replaces the engine).

#include <memory>
#include <string>

#include "net/engine.hpp"

namespace ferry::net::ucx {

/// @errors kUnsupported: see probe; kInvalidArgument: a UCX_* variable has a value that UCX refuses; kTransport,
/// kSystem
Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options);

/// Loads the library and checks its version; initialises nothing.
/// @errors kUnsupported: built without UCX's headers, or the library is not installed, or too old
Status probe();

/// "UCX 1.22.0, /usr/lib/libucp.so.0"; empty if the probe fails.
std::string library_in_use();

/// Reports whether UCX works with GPU memory in this process; opens a context for this.
GpuDirectFact gpu_memory_fact();

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_ENGINE_HPP
