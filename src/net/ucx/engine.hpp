#ifndef FERRY_NET_UCX_ENGINE_HPP
#define FERRY_NET_UCX_ENGINE_HPP

/// The network through UCX (ucp): TCP and shared memory for tests and small clusters, InfiniBand and RoCE on large
/// ones. UCX is loaded when first asked for; its UCX_* variables count as they do for every program that uses it. No
/// include of UCX here: this header is also read where UCX is not installed (unavailable.cpp then stands in for the
/// engine).

#include <memory>

#include "net/engine.hpp"

namespace ferry::net::ucx {

/// @errors kUnsupported: see probe; kInvalidArgument: a UCX_* variable has a value that UCX refuses; kTransport,
/// kSystem
Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options);

/// Loads the library and looks at its version; nothing of it is initialized.
/// @errors kUnsupported: built without UCX's headers, or the library is not installed, or too old
Status probe();

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_ENGINE_HPP
