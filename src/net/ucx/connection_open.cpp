/// How a connection begins: its endpoints, the access to the peer's memory, and the way that puts take.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "net/ucx/connection.hpp"
#include "net/ucx/paths.hpp"

namespace ferry::net::ucx {

void Connection::release_key() {
  for (ucp_rkey_h* key : {&gpu_key_, &remote_key_}) {
    if (*key != nullptr) library_.rkey_destroy(std::exchange(*key, nullptr));
  }
}

Status Connection::open(const Addresses& addresses, const RemoteMemory& memory, const RemoteMemory& gpu_memory) {
  Status status = create_endpoint(addresses.worker, &endpoint_);
  if (status.ok()) status = open_memory(memory);
  if (status.ok()) status = open_gpu_memory(gpu_memory);
  if (!status.ok() || addresses.receiver.empty() || !puts_over_tcp()) return status;
  return create_endpoint(addresses.receiver, &bulk_endpoint_);
}

bool Connection::puts_over_tcp() const {
  if (endpoint_ == nullptr || put_way_ != PutWay::kMessages) return false;
  const std::vector<Lane> lanes = lanes_of(library_, endpoint_);
  return !lanes.empty() &&
         std::ranges::all_of(lanes, [](const Lane& lane) { return lane.transport.starts_with("tcp/"); });
}

Status Connection::create_endpoint(std::span<const std::byte> address, ucp_ep_h* endpoint) {
  const std::vector<std::byte> address_copy = with_tail(address);
  const ucp_ep_params_t params = endpoint_params(address_copy, on_failed, this);
  Status status = ucx_status(library_.ep_create(resources_.worker(), &params, endpoint),
                             fmt::format("connecting to rank {}", rank_),
                             "UCX_TLS and UCX_NET_DEVICES must leave a transport that reaches it and detects that "
                             "it is lost: tcp, a network card's, or shared memory with UCX_POSIX_ERROR_HANDLING=y "
                             "and UCX_SYSV_ERROR_HANDLING=y",
                             rank_);
  if (!status.ok()) *endpoint = nullptr;
  return status;
}

Status Connection::unpack(std::span<const std::byte> key, ucp_rkey_h* unpacked) {
  const std::vector<std::byte> key_copy = with_tail(key);
  Status status = ucx_status(library_.ep_rkey_unpack(endpoint_, key_copy.data(), unpacked),
                             fmt::format("reading the key to the memory of rank {}", rank_),
                             "run the same version of UCX on every rank", rank_);
  if (!status.ok()) *unpacked = nullptr;
  return status;
}

Status Connection::open_gpu_memory(const RemoteMemory& memory) {
  if (resources_.gpu_memory().empty()) return {};
  if (put_way_ != PutWay::kWrites || memory.key.empty() || resources_.gpu_memory_handle() == nullptr) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("network engine ucx: rank {} is reached by {}, and only InfiniBand and RoCE cards write "
                              "into GPU memory by themselves; set GroupOptions::ring_memory to host",
                              rank_, describe(lanes_of(library_, endpoint_))),
                  rank_);
  }
  if (memory.read_back && num_writing_devices(lanes_of(library_, endpoint_)) > 1) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("network engine ucx: the GPU of rank {} does not see network cards' writes in order, and "
                              "a read by one card orders only its own, but that rank is reached by {}; name one device "
                              "in FERRY_NET_DEVICES, or set GroupOptions::ring_memory to host",
                              rank_, describe(lanes_of(library_, endpoint_))),
                  rank_);
  }
  gpu_base_ = memory.base;
  reads_back_ = memory.read_back;
  // Lanes are not ordered among themselves; where there are several, some versions of UCX also wait in a fence, for all
  // peers.
  has_ordered_card_ =
      memory.cards_keep_order && !memory.read_back && num_writing_lanes(lanes_of(library_, endpoint_)) == 1;
  num_probed_ends_ = memory.num_ends;
  probe_word_ = memory.probe_word;
  gpu_path_ = describe(lanes_of(library_, endpoint_));
  return unpack(memory.key, &gpu_key_);
}

Status Connection::open_memory(const RemoteMemory& memory) {
  if (memory.key.empty()) return {};
  if (Status status = unpack(memory.key, &remote_key_); !status.ok()) return status;
  void* mapped = nullptr;
  if (library_.rkey_ptr(remote_key_, memory.base, &mapped) == UCS_OK) {
    put_way_ = PutWay::kStores;
    mapped_memory_ = static_cast<std::byte*>(mapped);
  } else if (resources_.remote_writes() && have_remote_writes(lanes_of(library_, endpoint_))) {
    put_way_ = PutWay::kWrites;
    remote_base_ = memory.base;
  }
  return {};
}

Path Connection::path(int peer) const {
  if (endpoint_ == nullptr) return {.peer = peer, .description = "closed"};
  const std::vector<Lane> lanes = lanes_of(library_, endpoint_);
  const std::string_view stores = put_way_ == PutWay::kStores ? "memory (puts), " : "";
  const std::string_view bulk = bulk_endpoint_ != nullptr ? ", large puts by a receiver" : "";
  return {.peer = peer,
          .description = fmt::format("{}{}{}", stores, describe(lanes), bulk),
          .in_memory = are_in_memory(lanes)};
}

}  // namespace ferry::net::ucx
