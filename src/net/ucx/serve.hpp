#ifndef FERRY_NET_UCX_SERVE_HPP
#define FERRY_NET_UCX_SERVE_HPP

/// Atomics, gets and flushes as messages: what a peer asks of this end's memory, applied by this end's processor.

#include <cstddef>
#include <optional>
#include <span>

#include "net/engine.hpp"
#include "net/ucx/connection.hpp"
#include "net/ucx/message.hpp"

namespace ferry::net::ucx {

Message message_of(const AtomicOp& op);
/// Of a put to `remote_offset`, and the atomic. Null: there is no such message.
std::optional<Message> message_of_put(std::size_t remote_offset, const AtomicOp& op);

/// Does what a message that Inbound has checked asks for, and answers over `connection`. False: it asks for nothing.
bool serve(const Message& message, std::span<std::byte> memory, const EngineEvents& events, Connection& connection);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SERVE_HPP
