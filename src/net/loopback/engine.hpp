#ifndef FERRY_NET_LOOPBACK_ENGINE_HPP
#define FERRY_NET_LOOPBACK_ENGINE_HPP

/// The network inside one process, for tests: ends that are threads. Every byte is written by the poll() of the end
/// whose memory it is, so thread sanitizers see only the order that the protocol above relies on. Keeps the order of
/// everything one end sends to another, unless LoopbackFaults changes it.

#include <memory>

#include "net/engine.hpp"

namespace ferry::net::loopback {

/// @errors kSystem: no descriptor or no random bytes
Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options);

/// Always ok.
Status probe();

}  // namespace ferry::net::loopback

#endif  // FERRY_NET_LOOPBACK_ENGINE_HPP
