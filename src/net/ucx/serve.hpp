#ifndef FERRY_NET_UCX_SERVE_HPP
#define FERRY_NET_UCX_SERVE_HPP

/// Atomics, gets and flushes as messages: a peer's requests on this end's memory, applied by this end's processor.

#include <cstddef>
#include <optional>
#include <span>

#include "net/engine.hpp"
#include "net/ucx/connection.hpp"
#include "net/ucx/message.hpp"

namespace ferry::net::ucx {

Message message_of(const AtomicOp& op);
/// Message that combines a put to `remote_offset` with the atomic. Null: there is no such message.
std::optional<Message> message_of_put(std::size_t remote_offset, const AtomicOp& op);

/// Carries out the request of a message that Inbound has checked, and answers over `connection`. False: it is not a
/// request.
bool serve(const Message& message, std::span<std::byte> memory, const EngineEvents& events, Connection& connection);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SERVE_HPP
