#include "net/ucx/connection.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "net/remote_words.hpp"
#include "net/ucx/paths.hpp"
#include "net/ucx/receiver.hpp"

namespace ferry::net::ucx {

Connection::Connection(const Resources& resources, Seal seal, std::uint32_t self, int rank, int num_channels)
    : resources_(resources),
      library_(resources.library()),
      seal_(std::move(seal)),
      self_(self),
      rank_(rank),
      last_write_(static_cast<std::size_t>(num_channels), 0) {}

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

void Connection::put(int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) {
  if (!usable() || stopped_ || num_bytes == 0) return;
  if (local_offset >= kGpuOffset) {
    put_gpu(channel, local_offset - kGpuOffset, remote_offset - kGpuOffset, num_bytes);
    return;
  }
  const std::size_t size = resources_.memory().size();
  if (local_offset > size || num_bytes > size - local_offset) {
    fail(UCS_ERR_OUT_OF_RANGE);
    return;
  }
  put_from(channel, resources_.memory().subspan(local_offset, num_bytes), remote_offset);
}

/// Puts between GPU memory at both ends, which has the same size.
void Connection::put_gpu(int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) {
  const std::span<std::byte> memory = resources_.gpu_memory();
  const auto is_in = [&memory, num_bytes](std::size_t offset) {
    return offset <= memory.size() && num_bytes <= memory.size() - offset;
  };
  if (gpu_key_ == nullptr || !is_in(local_offset) || !is_in(remote_offset)) {
    fail(UCS_ERR_OUT_OF_RANGE);
    return;
  }
  Operation* operation = take_operation(Kind::kWrite);
  ucp_request_param_t params = params_of(operation);
  params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.memory_type = UCS_MEMORY_TYPE_CUDA;
#if UCP_API_VERSION >= UCP_VERSION(1, 13)
  params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
  params.memh = resources_.gpu_memory_handle();
#endif
  last_write_[static_cast<std::size_t>(channel)] = last_gpu_write_ = ++num_writes_;
  started(operation, library_.put_nbx(endpoint_, memory.data() + local_offset, num_bytes, gpu_base_ + remote_offset,
                                      gpu_key_, &params));
}

/// Checks against the size of this end's memory: the peer's is the same.
bool Connection::is_inside(std::size_t remote_offset, std::size_t num_bytes) {
  const std::size_t size = resources_.memory().size();
  if (remote_offset <= size && num_bytes <= size - remote_offset) return true;
  fail(UCS_ERR_OUT_OF_RANGE);
  return false;
}

void Connection::put_from(int channel, std::span<const std::byte> source, std::size_t remote_offset) {
  const std::size_t num_bytes = source.size();
  if (!usable() || stopped_ || num_bytes == 0 || !is_inside(remote_offset, num_bytes)) return;
  if (put_way_ == PutWay::kWrites) {
    write(channel, source, remote_offset);
    return;
  }
  if (put_way_ == PutWay::kStores) {
    store_bytes(mapped_memory_ + remote_offset, source.data(), source.size());
    return;
  }
  for (std::size_t done = 0; done < num_bytes; done += kMaxPayloadBytes) {
    Message message;
    message.kind = MessageKind::kPut;
    message.channel = static_cast<std::uint32_t>(channel);
    message.value = remote_offset + done;
    const std::span<const std::byte> payload = source.subspan(done, std::min(kMaxPayloadBytes, num_bytes - done));
    const bool is_bulk = bulk_endpoint_ != nullptr && payload.size() >= kMinReceiverBytes;
    send(is_bulk ? bulk_endpoint_ : endpoint_, message, payload);
  }
}

bool Connection::put_with(const Message& message, std::span<const std::byte> source) {
  // Keep the order: operations without bytes stay behind waiting messages too.
  if (put_way_ != PutWay::kMessages || !waiting_.empty()) return false;
  if (source.empty() || source.size() > kMaxPayloadBytes) return false;
  if (usable() && !stopped_ && is_inside(message.value, source.size())) send(message, source);
  return true;
}

/// Passes the handle of this end's memory, which is registered already; UCX registers other memory by itself.
void Connection::set_memory_handle([[maybe_unused]] std::span<const std::byte> local,
                                   [[maybe_unused]] ucp_request_param_t* params) const {
#if UCP_API_VERSION >= UCP_VERSION(1, 13)
  const std::byte* begin = resources_.memory().data();
  if (local.data() < begin || local.data() + local.size() > begin + resources_.memory().size()) return;
  params->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
  params->memh = resources_.memory_handle();
#endif
}

void Connection::write(int channel, std::span<const std::byte> source, std::size_t remote_offset) {
  Operation* operation = take_operation(Kind::kWrite);
  ucp_request_param_t params = params_of(operation);
  set_memory_handle(source, &params);
  last_write_[static_cast<std::size_t>(channel)] = ++num_writes_;
  started(operation, library_.put_nbx(endpoint_, source.data(), source.size(), remote_base_ + remote_offset,
                                      remote_key_, &params));
}

bool Connection::get(std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) {
  if (put_way_ == PutWay::kMessages) return false;
  if (!usable() || stopped_ || !is_inside(remote_offset, into.size())) return true;
  if (put_way_ == PutWay::kStores) {
    load_bytes(into.data(), mapped_memory_ + remote_offset, into.size());
    fetched_.push_back(ticket);
    return true;
  }
  Operation* operation = take_operation(Kind::kRead);
  operation->ticket = ticket;
  ucp_request_param_t params = params_of(operation);
  set_memory_handle(into, &params);
  started(operation,
          library_.get_nbx(endpoint_, into.data(), into.size(), remote_base_ + remote_offset, remote_key_, &params));
  return true;
}

void Connection::notify(int channel, const Message& message) {
  notify_after(last_write_[static_cast<std::size_t>(channel)], message);
}

void Connection::notify_after_all(const Message& message) { notify_after(num_writes_, message); }

void Connection::notify_after(std::uint64_t write, const Message& message) {
  if (!usable() || stopped_) return;
  if (waiting_.empty() && write <= flushed_) {
    send(message);
    sent_ = true;
    return;
  }
  waiting_.push_back({message, write, false});
  needed_ = std::max(needed_, write);
  recheck_waiting_ = true;
}

void Connection::answer(const Message& message, std::span<const std::byte> payload) {
  if (usable() && !stopped_) send(message, payload);
}

void Connection::greet() {
  const std::uint64_t uses_receiver = has_receiver() ? 1 : 0;
  send({.kind = MessageKind::kHello, .operand = uses_receiver});
  sent_ = true;
  if (has_receiver()) send(bulk_endpoint_, {.kind = MessageKind::kHello, .value = 1, .operand = 1}, {});
}

void Connection::send_last(const Message& message) {
  if (!usable()) return;
  waiting_.push_back({message, num_writes_, true});
  needed_ = num_writes_;
  recheck_waiting_ = true;
}

void Connection::stop() {
  stopped_ = true;
  waiting_.clear();
}

bool Connection::advance() {
  if (!usable()) return false;
  bool moved = std::exchange(sent_, false);
  if (needed_ > flush_started_) {
    flush();
    moved = true;
  }
  if (to_read_back_ > read_back_started_) {
    read_back();
    moved = true;
  }
  if (recheck_waiting_) {
    recheck_waiting_ = false;
    const auto due = [this](const Waiting& waiting) { return waiting.after_write <= flushed_; };
    std::deque<Waiting> later;
    for (const Waiting& waiting : waiting_) {
      // The last message stays behind all others.
      if (!due(waiting) || (waiting.last && !later.empty())) {
        later.push_back(waiting);
        continue;
      }
      send(waiting.message);
      flush_wanted_ |= waiting.last;
      moved = true;
    }
    waiting_ = std::move(later);
  }
  if (flush_wanted_ && usable()) {
    flush_wanted_ = false;
    flush();
    moved = true;
  }
  return moved;
}

void Connection::send(ucp_ep_h endpoint, const Message& message, std::span<const std::byte> payload) {
  if (!usable()) return;
  Operation* operation = take_operation(Kind::kMessage);
  Message& sent = operation->message;
  sent = message;
  sent.sender = self_;
  sent.sequence = num_sent_++;
  sent.payload_bytes = payload.size();
  if (!seal_.tag(sent.sealed_bytes(), &sent.tag)) {
    complete(operation, UCS_ERR_IO_ERROR);
    return;
  }
  // The peer must see earlier stores before it sees the message, on any processor.
  if (put_way_ == PutWay::kStores) std::atomic_thread_fence(std::memory_order_seq_cst);
  ucp_request_param_t params = params_of(operation);
  params.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_AM_SEND_FLAG_EAGER;
  started(operation,
          library_.am_send_nbx(endpoint, kMessageId, &sent, sizeof(Message), payload.data(), payload.size(), &params));
}

void Connection::flush() {
  Operation* operation = take_operation(Kind::kFlush);
  operation->covers = num_writes_;
  flush_started_ = num_writes_;
  const ucp_request_param_t params = params_of(operation);
  started(operation, library_.ep_flush_nbx(endpoint_, &params));
}

/// Reads from the peer's GPU memory, after a flush.
void Connection::read_back() {
  Operation* operation = take_operation(Kind::kReadBack);
  operation->covers = to_read_back_;
  read_back_started_ = to_read_back_;
  ucp_request_param_t params = params_of(operation);
  params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  started(operation, library_.get_nbx(endpoint_, &read_word_, sizeof(read_word_), gpu_base_, gpu_key_, &params));
}

/// Notes that all writes up to this number are in the peer's memory.
void Connection::arrived(std::uint64_t write) {
  flushed_ = std::max(flushed_, write);
  recheck_waiting_ = !waiting_.empty();
}

void Connection::shut() {
  stop();
  close(&bulk_endpoint_);
  close(&endpoint_);
}

void Connection::close(ucp_ep_h* endpoint) {
  if (*endpoint == nullptr) return;
  Operation* operation = take_operation(Kind::kClose);
  ucp_request_param_t params = params_of(operation);
  params.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  started(operation, library_.ep_close_nbx(std::exchange(*endpoint, nullptr), &params));
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

Connection::Operation* Connection::take_operation(Kind kind) {
  if (spare_.empty()) {
    Operation* added = &operations_.emplace_back();
    spare_.reserve(operations_.size());  // so that completions, which run inside UCX, allocate no memory
    spare_.push_back(added);
  }
  Operation* operation = spare_.back();
  spare_.pop_back();
  operation->connection = this;
  operation->kind = kind;
  ++num_in_flight_;
  return operation;
}

ucp_request_param_t Connection::params_of(Operation* operation) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.cb.send = on_completed;
  params.user_data = operation;
  return params;
}

/// `request`: UCX's result for the operation. Null if it has completed; there is no callback then.
void Connection::started(Operation* operation, ucs_status_ptr_t request) {
  if (request == nullptr) {
    complete(operation, UCS_OK);
  } else if (UCS_PTR_IS_ERR(request)) {
    complete(operation, UCS_PTR_STATUS(request));
  }
}

void Connection::complete(Operation* operation, ucs_status_t status) {
  --num_in_flight_;
  spare_.push_back(operation);
  if (operation->kind == Kind::kClose) return;
  if (status != UCS_OK) {
    fail(status);
  } else if (operation->kind == Kind::kRead) {
    fetched_.push_back(operation->ticket);
  } else if (operation->kind == Kind::kFlush && reads_back_ && last_gpu_write_ > flushed_) {
    to_read_back_ = std::max(to_read_back_, operation->covers);
  } else if (operation->kind == Kind::kFlush || operation->kind == Kind::kReadBack) {
    arrived(operation->covers);
  }
}

void Connection::fail(ucs_status_t status) {
  if (failure_ == UCS_OK) failure_ = status;
}

void Connection::on_completed(void* request, ucs_status_t status, void* operation) noexcept {
  auto* completed = static_cast<Operation*>(operation);
  Connection* connection = completed->connection;
  connection->complete(completed, status);
  connection->library_.request_free(request);
}

void Connection::on_failed(void* connection, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  static_cast<Connection*>(connection)->fail(status);
}

}  // namespace ferry::net::ucx
