#include "net/ucx/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "net/blob.hpp"
#include "net/ucx/address.hpp"
#include "net/ucx/limits.hpp"
#include "net/ucx/serve.hpp"
#include "net/ucx/ucx_engine.hpp"

namespace ferry::net::ucx {

template <Way way>
ucs_status_t UcxEngine::on_message(void* engine, const void* header, std::size_t header_bytes, void* data,
                                   std::size_t num_bytes, const ucp_am_recv_param_t* param) noexcept {
  // With this flag `data` only describes bytes that the sender offers for fetching. No peer sends such a message.
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return UCS_OK;
  static_cast<UcxEngine*>(engine)->receive({static_cast<const std::byte*>(header), header_bytes},
                                           {static_cast<const std::byte*>(data), num_bytes}, way);
  return UCS_OK;
}

/// Receives a message from any sender that reaches this end, on the owner's thread or a receiver's.
void UcxEngine::receive(std::span<const std::byte> header, std::span<const std::byte> payload, Way way) {
  const std::optional<Message> message = parse_message(header);
  if (!message || message->sender >= peers_.size()) return;
  Inbound* inbound = peers_[message->sender].inbound.get();
  if (inbound == nullptr) return;
  const bool was_broken = inbound->broken();
  inbound->accept(*message, payload, way);
  if (!inbound->has_due() && inbound->broken() == was_broken) return;
  is_due_ = true;
  if (wants_wake_.load(std::memory_order_seq_cst) && wants_wake_.exchange(false, std::memory_order_seq_cst)) {
    wake_.signal();
  }
}

Status UcxEngine::open(const Library& library) {
  version_ = library.version;
  if (options_.may_start_receiver && wake_.get() < 0) options_.may_start_receiver = false;
  const Receiver::Calls receiver{on_message<Way::kReceiver>, this, [this] { return !is_receiver_ahead(); }};
  Status status = scopes_.open(library, options_, {on_message<Way::kWorker>, this, receiver, wake_.get()});
  options_.memory = scopes_.memory();
  return status;
}

Result<Blob> UcxEngine::address() const {
  if (!scopes_.is_open()) {
    return Status(ErrorCode::kInternal, "network engine ucx: closed; please report this bug");
  }
  has_been_asked_ = true;
  EndAddress address{.name = token_,
                     .public_key = keys_.public_key(),
                     .memory_base = reinterpret_cast<std::uintptr_t>(options_.memory.data()),
                     .gpu_base = reinterpret_cast<std::uintptr_t>(options_.gpu_memory.data()),
                     .gpu_bytes = options_.gpu_memory.size(),
                     .read_back_gpu_writes = options_.read_back_gpu_writes};
  for (const Scope scope : {Scope::kHost, Scope::kNetwork}) {
    const Resources* resources = scopes_.at(scope);
    if (resources == nullptr) continue;
    const Receiver* receiver = scopes_.receiver_at(scope);
    address.scopes[static_cast<std::size_t>(scope)] = {
        .worker = resources->address(),
        .memory_key = resources->remote_key(),
        .gpu_key = resources->gpu_key(),
        .receiver = receiver != nullptr ? receiver->address() : std::span<const std::byte>()};
  }
  return make_blob(kEngineName, options_, encode_address(address));
}

Status UcxEngine::connect(std::span<const Blob> addresses, EngineEvents events) {
  if (!scopes_.is_open() || connected_ || addresses.size() != peers_.size()) {
    return Status(ErrorCode::kInternal,
                  fmt::format("network engine ucx: connect with {} addresses for {} peers, or not "
                              "for the first time; please report this bug",
                              addresses.size(), peers_.size()));
  }
  std::vector<std::span<const std::byte>> own_parts(peers_.size());
  for (int peer = 0; peer < options_.num_peers; ++peer) {
    if (peer == options_.self) continue;
    const auto index = static_cast<std::size_t>(peer);
    Result<std::span<const std::byte>> own_part = parse_blob(addresses[index], kEngineName, options_, peer);
    if (!own_part.ok()) return own_part.status();
    own_parts[index] = *own_part;
  }
  // UCX ends the process if it runs out of descriptors while it connects.
  if (Status status = descriptors_.reserve(num_descriptors_for(own_parts)); !status.ok()) return status;
  const OwnEnd own{options_, scopes_, token_, keys_};
  Status status;
  for (int peer = 0; peer < options_.num_peers && status.ok(); ++peer) {
    if (options_.uses(peer)) status = connect_peer(own, peer, own_parts[static_cast<std::size_t>(peer)], &at(peer));
  }
  if (status.ok()) status = scopes_.start_receivers();
  if (!status.ok()) return status;
  events_ = std::move(events);
  connected_ = true;
  for (std::size_t idx = 0; idx < peers_.size(); ++idx) {
    Connection* connection = peers_[idx].connection.get();
    if (connection == nullptr) continue;
    connection->report_to(&attention_, static_cast<std::uint32_t>(idx));
    connection->greet();
  }
  return {};
}

/// Descriptors of connections between workers, and of both directions between workers and receivers.
std::size_t UcxEngine::num_descriptors_for(std::span<const std::span<const std::byte>> own_parts) const {
  const bool has_peer_receiver = std::ranges::any_of(own_parts, [](std::span<const std::byte> own_part) {
    const Result<EndAddress> address = parse_address(own_part);
    return address.ok() &&
           std::ranges::any_of(address->scopes, [](const ScopeAddress& one) { return !one.receiver.empty(); });
  });
  const std::size_t num_kinds = 1U + (scopes_.has_receivers() ? 1U : 0U) + (has_peer_receiver ? 1U : 0U);
  return num_kinds * descriptors_of_connections(peers_.size() - 1);
}

void UcxEngine::put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) {
  if (can_send(peer)) at(peer).connection->put(channel, local_offset, remote_offset, num_bytes);
}

void UcxEngine::put_from(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset) {
  if (can_send(peer)) at(peer).connection->put_from(channel, source, remote_offset);
}

void UcxEngine::get(int peer, std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) {
  if (!can_send(peer) || at(peer).connection->get(into, remote_offset, ticket)) return;
  at(peer).inbound->expect(ticket, into);
  at(peer).connection->answer(
      {.kind = MessageKind::kGet, .value = remote_offset, .ticket = ticket, .operand = into.size()});
}

void UcxEngine::atomic(int peer, int channel, const AtomicOp& op, std::uint64_t ticket) {
  if (!can_send(peer)) return;
  Message message = message_of(op);
  message.channel = static_cast<std::uint32_t>(channel);
  message.ticket = ticket;
  at(peer).connection->notify(channel, message);
}

void UcxEngine::put_atomic(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset,
                           const AtomicOp& op) {
  if (!can_send(peer)) return;
  if (std::optional<Message> message = message_of_put(remote_offset, op); message) {
    message->channel = static_cast<std::uint32_t>(channel);
    if (at(peer).connection->put_with(*message, source)) return;
  }
  Engine::put_atomic(peer, channel, source, remote_offset, op);
}

void UcxEngine::flush(int peer, std::uint64_t ticket) {
  if (can_send(peer)) at(peer).connection->notify_after_all({.kind = MessageKind::kFlush, .ticket = ticket});
}

void UcxEngine::release(int peer, std::uint64_t ticket) {
  if (can_send(peer)) at(peer).connection->release(ticket);
}

void UcxEngine::forget(std::uint64_t ticket) {
  for (Peer& peer : peers_) {
    if (peer.inbound != nullptr) peer.inbound->forget(ticket);
  }
}

void UcxEngine::notify(int peer, int channel, std::uint64_t value) {
  if (!can_send(peer)) return;
  at(peer).connection->notify(
      channel, {.kind = MessageKind::kNotify, .channel = static_cast<std::uint32_t>(channel), .value = value});
}

void UcxEngine::put_notify(int peer, int channel, std::size_t local_offset, std::size_t remote_offset,
                           std::size_t num_bytes, std::uint64_t value) {
  if (!can_send(peer)) return;
  if (local_offset < kGpuOffset) {
    const Message message{.kind = MessageKind::kPutNotify,
                          .channel = static_cast<std::uint32_t>(channel),
                          .value = remote_offset,
                          .operand = value};
    if (at(peer).connection->put_notify(message, local_offset, num_bytes)) return;
  }
  Engine::put_notify(peer, channel, local_offset, remote_offset, num_bytes, value);
}

Status probe() { return library().status(); }

std::string library_in_use() {
  const Result<const Library*> table = library();
  return table.ok() ? (*table)->file : std::string();
}

Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options) {
  Result<const Library*> table = library();
  if (!table.ok()) return table.status();
  Result<Token> token = make_token();
  if (!token.ok()) return token.status();
  Result<KeyPair> keys = KeyPair::make();
  if (!keys.ok()) return keys.status();
  auto engine = std::make_unique<UcxEngine>(options, *token, std::move(*keys));
  if (Status status = engine->open(**table); !status.ok()) return status;
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace ferry::net::ucx
