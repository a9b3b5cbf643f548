#ifndef FERRY_NET_UCX_CONNECTION_HPP
#define FERRY_NET_UCX_CONNECTION_HPP

/// The connection to one peer: an endpoint, the way to its memory, and the operations in flight. Used only by the
/// engine's thread.
///
/// A put takes the first way that works:
///   stores    memory of this host that UCX has mapped here: a copy
///   writes    a network card that writes into the peer's memory by itself: UCX's puts
///   messages  anything else: the peer copies the payload into its memory (net/ucx/inbound.hpp). UCX would emulate a
///             put in the same way, but its receiver answers each, and aborts if it cannot. Large ones go to the
///             peer's receiver (net/ucx/receiver.hpp) where it has one, by an endpoint of their own.
///
/// Order. Stores are done when put() returns, and messages are numbered, so a message may follow both at once. Writes
/// are numbered too: a message waits for that of the last write before it on its channel, until a flush that began
/// after it has completed, which UCX reports when the bytes are in the peer's memory. One flush serves all writes
/// before it, so there is at most one per poll; several may be in flight.
///
/// UCX callbacks only record what happened. What has to wait is sent from advance().

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "net/engine.hpp"
#include "net/ucx/message.hpp"
#include "net/ucx/resources.hpp"

namespace ferry::net::ucx {

class Connection {
 public:
  /// `self`: this end's index, which its messages carry.
  Connection(const Resources& resources, Seal seal, std::uint32_t self, int rank, int num_channels);
  /// Runs after the worker's, which may call back as long as it lives.
  ~Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// The peer's memory: the key comes from UCX's own packing there, and is empty where this end cannot write.
  struct RemoteMemory {
    std::span<const std::byte> key{};
    std::uint64_t base = 0;
  };
  /// Of the peer's workers, from UCX's packing, too. The second may be empty.
  struct Addresses {
    std::span<const std::byte> worker{};
    std::span<const std::byte> receiver{};
  };
  /// @errors kUnsupported: this end has GPU memory, and no card reaches the peer's
  Status open(const Addresses& addresses, const RemoteMemory& memory, const RemoteMemory& gpu_memory);

  void put(int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes);
  /// From any memory of this process, which stays as it is until a later flush was answered.
  void put_from(int channel, std::span<const std::byte> source, std::size_t remote_offset);
  /// put_from and a message after it, `kind` of which says what else it is, in one. False where that takes two.
  bool put_with(const Message& message, std::span<const std::byte> source);
  /// False where the peer has to be asked for the bytes by a message. Else take_fetched() has the ticket when they are
  /// there.
  bool get(std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket);
  std::vector<std::uint64_t> take_fetched() { return std::exchange(fetched_, {}); }
  /// Sent after all earlier puts on `channel`.
  void notify(int channel, const Message& message);
  /// Sent after all earlier puts and messages.
  void notify_after_all(const Message& message);
  /// Sent at once. The payload stays as it is until it has left.
  void answer(const Message& message, std::span<const std::byte> payload = {});
  /// A hello by each endpoint.
  void greet();
  /// Whether puts are messages that go over TCP, and nothing better.
  bool puts_over_tcp() const;
  /// Whether large puts go to a receiver.
  bool has_receiver() const { return bulk_endpoint_ != nullptr; }
  /// Sent after all earlier puts and messages, and followed by a flush of its own.
  void send_last(const Message& message);
  /// Accepts nothing more. Messages not sent yet are discarded.
  void stop();
  /// Starts making sure that all puts given so far arrive.
  void begin_flush() { needed_ = num_writes_; }

  /// Send what is due. True if anything was, or notify() has sent something at once.
  bool advance();
  /// Nothing waits and nothing is in flight.
  bool quiet() const { return waiting_.empty() && num_in_flight_ == 0 && needed_ <= flushed_ && !flush_wanted_; }
  /// UCS_OK, or why the connection failed.
  ucs_status_t failure() const { return failure_; }
  /// From now on the connection has failed, unless it had before.
  void fail(ucs_status_t status);

  /// Cancels what is in flight and closes the endpoint; later progress of the worker completes this. Idempotent.
  void shut();
  /// Releases the key to the peer's memory. Before the worker is destroyed.
  void release_key();
  bool is_shut() const { return endpoint_ == nullptr && bulk_endpoint_ == nullptr && num_in_flight_ == 0; }

  /// The transports that UCX chose for this peer, which the engine's owner knows as `peer`.
  Path path(int peer) const;

 private:
  enum class PutWay { kMessages, kStores, kWrites };
  enum class Kind { kWrite, kRead, kFlush, kMessage, kClose };
  struct Operation {
    Connection* connection = nullptr;
    Kind kind = Kind::kWrite;
    std::uint64_t covers = 0;  // kFlush: the number of the last write before it
    std::uint64_t ticket = 0;  // kRead
    Message message;           // kMessage: must stay where it is until sent
  };
  struct Waiting {
    Message message;
    std::uint64_t after_write = 0;
    bool last = false;
  };

  /// noexcept: UCX calls this from C code, through which no exception may pass.
  static void on_completed(void* request, ucs_status_t status, void* operation) noexcept;
  static void on_failed(void* connection, ucp_ep_h endpoint, ucs_status_t status);

  bool usable() const { return endpoint_ != nullptr && failure_ == UCS_OK; }
  Operation* take_operation(Kind kind);
  static ucp_request_param_t params_of(Operation* operation);
  void started(Operation* operation, ucs_status_ptr_t request);
  void complete(Operation* operation, ucs_status_t status);
  Status create_endpoint(std::span<const std::byte> address, ucp_ep_h* endpoint);
  Status unpack(std::span<const std::byte> key, ucp_rkey_h* unpacked);
  Status open_memory(const RemoteMemory& memory);
  Status open_gpu_memory(const RemoteMemory& memory);
  bool is_inside(std::size_t remote_offset, std::size_t num_bytes);
  void put_gpu(int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes);
  void set_memory_handle(std::span<const std::byte> local, ucp_request_param_t* params) const;
  void write(int channel, std::span<const std::byte> source, std::size_t remote_offset);
  void notify_after(std::uint64_t write, const Message& message);
  void send(const Message& message, std::span<const std::byte> payload = {}) { send(endpoint_, message, payload); }
  void send(ucp_ep_h endpoint, const Message& message, std::span<const std::byte> payload);
  void flush();
  void close(ucp_ep_h* endpoint);

  const Resources& resources_;  // not used by completions, which may run while it is being destroyed
  const Library& library_;
  const Seal seal_;
  const std::uint32_t self_;
  const int rank_;  // of the peer
  ucp_ep_h endpoint_ = nullptr;
  ucp_ep_h bulk_endpoint_ = nullptr;  // to the peer's receiver; null: it has none
  ucp_rkey_h remote_key_ = nullptr;
  ucp_rkey_h gpu_key_ = nullptr;
  PutWay put_way_ = PutWay::kMessages;
  std::uint64_t remote_base_ = 0;  // kWrites
  std::uint64_t gpu_base_ = 0;
  std::byte* mapped_memory_ = nullptr;  // kStores: the peer's
  ucs_status_t failure_ = UCS_OK;
  bool stopped_ = false;

  std::uint64_t num_sent_ = 0;             // messages; also the number of the next
  std::uint64_t num_writes_ = 0;           // also the number of the last write
  std::uint64_t needed_ = 0;               // some message, or the owner, needs all writes up to here to have arrived
  std::uint64_t flush_started_ = 0;        // a flush is in flight, or done, for all writes up to here
  std::uint64_t flushed_ = 0;              // all writes up to here have arrived
  bool flush_wanted_ = false;              // one more flush regardless of the numbers: after the last message
  bool recheck_waiting_ = false;           // some waiting message may be due
  bool sent_ = false;                      // a message that did not have to wait, which advance() has still to tell of
  std::vector<std::uint64_t> last_write_;  // by channel
  std::deque<Waiting> waiting_;
  std::vector<std::uint64_t> fetched_;

  std::size_t num_in_flight_ = 0;
  std::deque<Operation> operations_;  // every operation ever used; their addresses are stable
  std::vector<Operation*> spare_;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_CONNECTION_HPP
