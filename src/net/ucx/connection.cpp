#include "net/ucx/connection.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "net/remote_words.hpp"
#include "net/ucx/receiver.hpp"

namespace ferry::net::ucx {
namespace {

bool contains(std::span<const std::byte> memory, std::span<const std::byte> part) {
  return part.data() >= memory.data() && part.data() + part.size() <= memory.data() + memory.size();
}

}  // namespace

Connection::Connection(const Resources& resources, Seal seal, std::uint32_t self, int rank, int num_channels)
    : resources_(resources),
      library_(resources.library()),
      seal_(std::move(seal)),
      self_(self),
      rank_(rank),
      last_write_(static_cast<std::size_t>(num_channels), 0),
      waiting_(static_cast<std::size_t>(num_channels)) {}

void Connection::put(int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) {
  if (!usable() || stopped_ || num_bytes == 0) return;
  if (local_offset >= kGpuOffset || remote_offset >= kGpuOffset) {
    const bool is_same_kind = local_offset >= kGpuOffset && remote_offset >= kGpuOffset;
    if (!is_same_kind || !is_inside_gpu(local_offset - kGpuOffset, num_bytes)) {
      fail(UCS_ERR_OUT_OF_RANGE);
      return;
    }
    put_from(channel, resources_.gpu_memory().subspan(local_offset - kGpuOffset, num_bytes), remote_offset);
    return;
  }
  const std::size_t size = resources_.memory().size();
  if (local_offset > size || num_bytes > size - local_offset) {
    fail(UCS_ERR_OUT_OF_RANGE);
    return;
  }
  put_from(channel, resources_.memory().subspan(local_offset, num_bytes), remote_offset);
}

/// Puts to an offset in the peer's GPU memory, from such memory or from a part of this end's memory.
void Connection::put_gpu(int channel, std::span<const std::byte> source, std::size_t offset) {
  if (gpu_key_ == nullptr || !is_inside_gpu(offset, source.size())) {
    fail(UCS_ERR_OUT_OF_RANGE);
    return;
  }
  Operation* operation = take_operation(Kind::kWrite);
  const bool is_host_memory = contains(resources_.memory(), source);
  ucp_request_param_t params = gpu_params_of(operation, is_host_memory ? UCS_MEMORY_TYPE_HOST : UCS_MEMORY_TYPE_CUDA);
  set_memory_handle(source, &params);
#if UCP_API_VERSION >= UCP_VERSION(1, 13)
  // UCX registers other memory by itself.
  if (!is_host_memory && !contains(resources_.gpu_memory(), source)) {
    params.op_attr_mask &= ~static_cast<std::uint32_t>(UCP_OP_ATTR_FIELD_MEMH);
  }
#endif
  begin(channel, {.operation = operation,
                  .params = params,
                  .source = source,
                  .remote = gpu_base_ + offset,
                  .key = gpu_key_,
                  .behind = order_after_});
  last_gpu_write_ = num_writes_;
}

void Connection::order_puts() {
  if (!usable() || stopped_) return;
  if (has_ordered_card_ && library_.worker_fence(resources_.worker()) == UCS_OK) return;
  order_after_ = num_writes_;
}

/// Begins a write, or holds it, and all that are given after it.
void Connection::begin(int channel, Write write) {
  last_write_[static_cast<std::size_t>(channel)] = write.number = ++num_writes_;
  if (held_.empty() && write.behind <= flushed_) {
    begin_now(write);
    return;
  }
  need(write.behind);
  held_.push_back(write);
}

void Connection::begin_now(const Write& write) {
  num_begun_writes_ = write.number;
  started(write.operation, library_.put_nbx(endpoint_, write.source.data(), write.source.size(), write.remote,
                                            write.key, &write.params));
}

void Connection::begin_held() {
  while (usable() && is_held_due()) {
    const Write write = held_.front();
    held_.pop_front();
    begin_now(write);
  }
}

/// Ends the writes that were not begun.
void Connection::drop_held() {
  for (const Write& write : std::exchange(held_, {})) complete(write.operation, UCS_ERR_CANCELED);
}

bool Connection::is_inside_gpu(std::size_t offset, std::size_t num_bytes) const {
  const std::size_t size = resources_.gpu_memory().size() - gpu_probe_bytes(num_probed_ends_);
  return offset <= size && num_bytes <= size - offset;
}

/// Parameters of an operation between the peer's GPU memory and memory of this type here: the GPU's, or any host's.
ucp_request_param_t Connection::gpu_params_of(Operation* operation, ucs_memory_type_t type) const {
  ucp_request_param_t params = params_of(operation);
  params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.memory_type = type;
#if UCP_API_VERSION >= UCP_VERSION(1, 13)
  if (type == UCS_MEMORY_TYPE_CUDA) {
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    params.memh = resources_.gpu_memory_handle();
  }
#endif
  return params;
}

/// Checks against the size of this end's memory, which the peer's has too.
bool Connection::is_inside(std::size_t remote_offset, std::size_t num_bytes) {
  const std::size_t size = resources_.memory().size();
  if (remote_offset <= size && num_bytes <= size - remote_offset) return true;
  fail(UCS_ERR_OUT_OF_RANGE);
  return false;
}

void Connection::put_from(int channel, std::span<const std::byte> source, std::size_t remote_offset) {
  const std::size_t num_bytes = source.size();
  if (!usable() || stopped_ || num_bytes == 0) return;
  if (remote_offset >= kGpuOffset) {
    put_gpu(channel, source, remote_offset - kGpuOffset);
    return;
  }
  if (!is_inside(remote_offset, num_bytes)) return;
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
  return waiting_.empty() && send_with(message, source, kMaxPayloadBytes);
}

bool Connection::put_notify(const Message& message, std::size_t local_offset, std::size_t num_bytes) {
  const std::span<std::byte> memory = resources_.memory();
  if (local_offset > memory.size() || num_bytes > memory.size() - local_offset) return false;
  // Large puts are the receiver's.
  const std::size_t most = bulk_endpoint_ != nullptr ? kMinReceiverBytes - 1 : kMaxPayloadBytes;
  return send_with(message, memory.subspan(local_offset, num_bytes), most);
}

/// Sends a put and what its message says as one message, of at most so many bytes where puts are messages, unless an
/// earlier write of the channel is under way.
bool Connection::send_with(const Message& message, std::span<const std::byte> source, std::size_t most) {
  if (put_way_ == PutWay::kStores || source.empty() || message.value >= kGpuOffset) return false;
  if (source.size() > (put_way_ == PutWay::kMessages ? most : kMaxOneMessageBytes)) return false;
  if (holds_notifies() || last_write_[message.channel] > flushed_) return false;
  if (!usable() || stopped_ || !is_inside(message.value, source.size())) return true;
  send(message, source);
  sent_ = true;
  attend();
  return true;
}

/// Passes the handle of this end's memory, which is registered already; UCX registers other memory by itself.
void Connection::set_memory_handle([[maybe_unused]] std::span<const std::byte> local,
                                   [[maybe_unused]] ucp_request_param_t* params) const {
#if UCP_API_VERSION >= UCP_VERSION(1, 13)
  if (!contains(resources_.memory(), local)) return;
  params->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
  params->memh = resources_.memory_handle();
#endif
}

void Connection::write(int channel, std::span<const std::byte> source, std::size_t remote_offset) {
  Operation* operation = take_operation(Kind::kWrite);
  ucp_request_param_t params = params_of(operation);
  set_memory_handle(source, &params);
  begin(channel, {.operation = operation,
                  .params = params,
                  .source = source,
                  .remote = remote_base_ + remote_offset,
                  .key = remote_key_});
}

bool Connection::get(std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) {
  if (put_way_ == PutWay::kMessages) return false;
  if (!usable() || stopped_ || !is_inside(remote_offset, into.size())) return true;
  if (put_way_ == PutWay::kStores) {
    load_bytes(into.data(), mapped_memory_ + remote_offset, into.size());
    done_.push_back(ticket);
    attend();
    return true;
  }
  Operation* operation = take_operation(Kind::kRead);
  ++num_reads_;
  operation->ticket = ticket;
  ucp_request_param_t params = params_of(operation);
  set_memory_handle(into, &params);
  started(operation,
          library_.get_nbx(endpoint_, into.data(), into.size(), remote_base_ + remote_offset, remote_key_, &params));
  return true;
}

void Connection::release(std::uint64_t ticket) {
  releases_.push_back({ticket, std::exchange(num_latest_sends_, 0)});
  complete_releases();
}

void Connection::end_send(const Operation& operation) {
  const auto place = static_cast<std::size_t>(operation.release - first_release_);
  --(place < releases_.size() ? releases_[place].num_sends : num_latest_sends_);
  complete_releases();
}

/// A release is complete when all sends before it are, also those before earlier ones.
void Connection::complete_releases() {
  for (; !releases_.empty() && releases_.front().num_sends == 0; ++first_release_) {
    done_.push_back(releases_.front().ticket);
    releases_.pop_front();
    attend();
  }
}

void Connection::notify(int channel, const Message& message) {
  notify_after(last_write_[static_cast<std::size_t>(channel)], message);
}

void Connection::notify_after_all(const Message& message) { notify_after(num_writes_, message); }

void Connection::notify_after(std::uint64_t write, const Message& message) {
  if (!usable() || stopped_) return;
  if (waiting_.empty() && write <= flushed_ && !holds_notifies()) {
    send(message);
    sent_ = true;
    attend();
    return;
  }
  waiting_.add(message, write, flush_started_);
  need(write);
  recheck_waiting();
}

void Connection::answer(const Message& message, std::span<const std::byte> payload) {
  if (usable() && !stopped_) send(message, payload);
}

void Connection::greet() {
  if (num_probed_ends_ > 0) {
    begin_probe();
  } else {
    send_hellos();
  }
}

void Connection::send_hellos() {
  const std::uint64_t uses_receiver = has_receiver() ? 1 : 0;
  send({.kind = MessageKind::kHello, .operand = uses_receiver});
  sent_ = true;
  attend();
  if (has_receiver()) send(bulk_endpoint_, {.kind = MessageKind::kHello, .value = 1, .operand = 1}, {});
}

void Connection::send_last(const Message& message) {
  if (!usable()) return;
  waiting_.add_last(message, num_writes_);
  need(num_writes_);
  recheck_waiting();
}

void Connection::stop() {
  stopped_ = true;
  waiting_.clear();
}

bool Connection::advance() {
  if (!usable()) return false;
  bool moved = std::exchange(sent_, false);
  if (is_held_due()) {
    begin_held();
    moved = true;
  }
  if (is_flush_due()) {
    flush();
    moved = true;
  }
  if (to_read_back_ > read_back_started_) {
    read_back();
    moved = true;
  }
  if (probe_ == Probe::kWriting && flushed_ >= probe_write_) {
    read_probe();
    moved = true;
  }
  if (std::exchange(hello_due_, false)) {
    send_hellos();
    moved = true;
  }
  if (std::exchange(recheck_waiting_, false)) {
    moved |= waiting_.send_due(flushed_, holds_notifies(), [this](const Message& message, bool is_last) {
      send(message);
      flush_wanted_ |= is_last;
    });
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
  operation->covers = num_begun_writes_;
  flush_started_ = num_begun_writes_;
  const ucp_request_param_t params = params_of(operation);
  started(operation, library_.ep_flush_nbx(endpoint_, &params));
}

/// Reads from the peer's GPU memory, after a flush.
void Connection::read_back() {
  Operation* operation = take_operation(Kind::kReadBack);
  operation->covers = to_read_back_;
  read_back_started_ = to_read_back_;
  const ucp_request_param_t params = gpu_params_of(operation, UCS_MEMORY_TYPE_HOST);
  started(operation, library_.get_nbx(endpoint_, &read_word_, sizeof(read_word_), gpu_base_, gpu_key_, &params));
}

/// Notes that all writes up to this number are in the peer's memory.
void Connection::arrived(std::uint64_t write) {
  flushed_ = std::max(flushed_, write);
  recheck_waiting();
  if (probe_ == Probe::kWriting || !held_.empty()) attend();
}

void Connection::shut() {
  stop();
  drop_held();
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
  if (is_send(kind)) {
    operation->release = first_release_ + releases_.size();
    ++num_latest_sends_;
  }
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
  if (operation->kind == Kind::kRead) --num_reads_;
  if (is_send(operation->kind)) end_send(*operation);
  spare_.push_back(operation);
  if (operation->kind == Kind::kClose) return;
  if (status != UCS_OK) {
    fail(status);
  } else if (operation->kind == Kind::kRead) {
    done_.push_back(operation->ticket);
    attend();
  } else if (operation->kind == Kind::kProbe) {
    check_probe();
  } else if (operation->kind == Kind::kFlush && reads_back_ && last_gpu_write_ > flushed_) {
    to_read_back_ = std::max(to_read_back_, operation->covers);
    attend();
  } else if (operation->kind == Kind::kFlush || operation->kind == Kind::kReadBack) {
    arrived(operation->covers);
  }
}

void Connection::fail(ucs_status_t status) {
  if (failure_ == UCS_OK) failure_ = status;
  attend();
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
