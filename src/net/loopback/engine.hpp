#ifndef FERRY_NET_LOOPBACK_ENGINE_HPP
#define FERRY_NET_LOOPBACK_ENGINE_HPP

/// The network inside one process, for tests: ends that are threads. Every byte is written by the poll() of the end
/// whose memory it is, so thread sanitizers see only the order that the protocol above relies on. Keeps the order of
/// everything one end sends to another, unless a test's rules change it.
///
/// With the variable FERRY_LOOPBACK_RATE, in bytes per second, when an engine is created, what is put to its end takes
/// the time that a link of that rate needs, one put after the other: for measurements without such a network.

#include <memory>

#include "net/engine.hpp"

namespace ferry::net::loopback {

/// @errors kSystem: no descriptor or no random bytes; kInvalidArgument: FERRY_LOOPBACK_RATE is no number of bytes
Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options);

/// Always ok.
Status probe();

}  // namespace ferry::net::loopback

#endif  // FERRY_NET_LOOPBACK_ENGINE_HPP
