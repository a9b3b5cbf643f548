#ifndef FERRY_NET_LOOPBACK_ENGINE_HPP
#define FERRY_NET_LOOPBACK_ENGINE_HPP

/// Network inside one process, for tests: each end is a thread. The end that owns the memory writes every byte, in its
/// poll(), so thread sanitizers see only the order that the protocol above the engine relies on. Keeps the order of all
/// operations from one end to another, unless a test's rules change it (rules.hpp).
///
/// If FERRY_LOOPBACK_RATE (bytes per second) is set when an engine is created, puts to its end take as long as on a
/// link of that rate, one after the other: for measurements on a machine without such a network.

#include <memory>

#include "net/engine.hpp"

namespace ferry::net::loopback {

/// @errors kSystem: no descriptor or no random bytes; kInvalidArgument: FERRY_LOOPBACK_RATE is not a number of bytes
Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options);

/// Always ok.
Status probe();

}  // namespace ferry::net::loopback

#endif  // FERRY_NET_LOOPBACK_ENGINE_HPP
