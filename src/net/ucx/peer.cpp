#include "net/ucx/peer.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "net/ucx/address.hpp"

namespace ferry::net::ucx {
namespace {

/// Checks that both ends agree on their hosts and on the size of GPU memory.
Status check_fits(const OwnEnd& own, int rank, Scope scope, const EndAddress& address) {
  if (address.at(scope).worker.empty()) {
    return Status(ErrorCode::kTransport,
                  fmt::format("network engine ucx: rank {} does not expect this rank {} its host; give all ranks the "
                              "same view of which hosts they are on",
                              rank, scope == Scope::kHost ? "on" : "outside"),
                  rank);
  }
  if (address.gpu_bytes != own.options.gpu_memory.size()) {
    return Status(ErrorCode::kTransport,
                  fmt::format("network engine ucx: rank {} has {} bytes of GPU memory, expected {} as on this "
                              "rank; run the same build with the same options on every rank",
                              rank, address.gpu_bytes, own.options.gpu_memory.size()),
                  rank);
  }
  if (address.gpu_bytes > 0 && address.gpu_bytes < gpu_probe_bytes(static_cast<std::size_t>(own.options.num_peers))) {
    return Status(ErrorCode::kInternal,
                  fmt::format("network engine ucx: {} bytes of GPU memory have no room for probes; please report this "
                              "bug",
                              address.gpu_bytes));
  }
  return {};
}

}  // namespace

Status connect_peer(const OwnEnd& own, int idx, std::span<const std::byte> own_part, Peer* peer) {
  const int rank = own.options.rank_of(idx);
  const auto about_peer = [rank](const Status& status) {
    return Status(status.code(), fmt::format("{} (rank {})", status.message(), rank), rank);
  };
  const Result<EndAddress> address = parse_address(own_part);
  if (!address.ok()) return about_peer(address.status());
  const Scope scope = Scopes::of(own.options, idx);
  if (Status status = check_fits(own, rank, scope, *address); !status.ok()) return status;
  const Result<PairKeys> keys = own.keys.agree(address->public_key, own.token, address->name);
  if (!keys.ok()) return about_peer(keys.status());
  Result<Seal> sending = Seal::make(keys->sending);
  if (!sending.ok()) return sending.status();
  Result<Seal> receiving = Seal::make(keys->receiving);
  if (!receiving.ok()) return receiving.status();
  peer->connection =
      std::make_unique<Connection>(*own.scopes.at(scope), std::move(*sending),
                                   static_cast<std::uint32_t>(own.options.self), rank, own.options.num_channels);
  const ScopeAddress& there = address->at(scope);
  peer->address.assign(there.worker.begin(), there.worker.end());
  peer->address.insert(peer->address.end(), there.receiver.begin(), there.receiver.end());
  const Inbound::Params params{.sender = static_cast<std::uint32_t>(idx),
                               .num_channels = static_cast<std::uint32_t>(own.options.num_channels),
                               .memory = own.options.memory};
  peer->inbound = std::make_unique<Inbound>(std::move(*receiving), params);
  const Connection::RemoteMemory memory{there.memory_key, address->memory_base};
  std::uint64_t probe_word = 0;  // no other end has the same name
  std::memcpy(&probe_word, own.token.data(), sizeof(probe_word));
  const Connection::RemoteMemory gpu_memory{.key = there.gpu_key,
                                            .base = address->gpu_base,
                                            .read_back = address->read_back_gpu_writes,
                                            .cards_keep_order = own.options.cards_keep_order,
                                            .num_ends = static_cast<std::size_t>(own.options.num_peers),
                                            .probe_word = probe_word};
  Status status = peer->connection->open({.worker = there.worker, .receiver = there.receiver}, memory, gpu_memory);
  Receiver* const receiver = own.scopes.receiver_at(scope);
  // The peer reaches the same result, because it sees the same transports.
  if (status.ok() && receiver != nullptr && peer->connection->puts_over_tcp()) {
    status = receiver->expect(there.worker, rank);
  }
  peer->receiver_reached = !peer->connection->has_receiver();
  return status;
}

}  // namespace ferry::net::ucx
