#ifndef FERRY_NET_UCX_CONNECTION_HPP
#define FERRY_NET_UCX_CONNECTION_HPP

/// Connection to one peer: an endpoint, access to its memory, and the operations in flight. Used only by the engine's
/// thread.
///
/// A put takes the first of these ways that works:
///   stores    memory of this host that UCX has mapped here: a copy
///   writes    a network card that writes into the peer's memory by itself: UCX's puts
///   messages  in all other cases: the peer copies the payload into its memory (net/ucx/inbound.hpp). Puts emulated by
///             UCX do the same, but their receiver answers each, and aborts if it cannot. Large messages go to the
///             peer's receiver (net/ucx/receiver.hpp), if it has one, through a separate endpoint.
///
/// Order. Stores are complete when put() returns, and messages are numbered, so a message may follow both at once.
/// Writes are numbered too: a message waits for the last write before it on its channel, until a flush that began after
/// that write has completed; UCX reports that when the bytes are in the peer's memory. One flush serves all writes
/// before it, so there is at most one per poll; several may be in flight.
///
/// Where the peer's GPU does not see cards' writes in order, the flush is followed by a read of its memory through the
/// same card. A read does not pass earlier writes on their way from the card to the GPU (PCI Express Base
/// Specification, "Transaction Ordering"), so they are in its memory once the read returns.
///
/// Writes into GPU memory are also ordered among themselves (order_puts): they are held until a flush of those before
/// them has completed. A fence of UCX, which sends nothing, takes the place of that if the program says that cards keep
/// the order (EngineOptions::cards_keep_order), a single lane reaches the peer, and the peer reads no writes back; not
/// run with a card.
///
/// A small put that a notify follows may be one message with it, whichever way other puts take: put_with().
///
/// GPU memory is probed before anything else is said (connection_probe.cpp): this end's card writes a little of the
/// peer's, from host memory and from its own GPU memory, and reads back what it wrote. Only then does the hello leave.
/// Notifies wait until the other's hello has come, so an end that hears from a peer knows that both cards work.
///
/// UCX callbacks only record events. advance() sends the operations that had to wait.

#include <algorithm>
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
#include "net/ucx/waiting.hpp"

namespace ferry::net::ucx {

/// Peers whose connections have work or news for the next poll of the engine, each once.
class Attention {
 public:
  explicit Attention(std::size_t num_peers) : is_listed_(num_peers, 0) { listed_.reserve(num_peers); }

  /// Allocates no memory.
  void add(std::uint32_t peer) noexcept {
    if (std::exchange(is_listed_[peer], char{1}) == 0) listed_.push_back(peer);
  }
  std::span<const std::uint32_t> listed() const { return listed_; }
  void clear() {
    for (const std::uint32_t peer : listed_) is_listed_[peer] = 0;
    listed_.clear();
  }

 private:
  std::vector<std::uint32_t> listed_;
  std::vector<char> is_listed_;  // by peer
};

class Connection {
 public:
  /// `self`: index of this end, which its messages carry.
  Connection(const Resources& resources, Seal seal, std::uint32_t self, int rank, int num_channels);
  /// Must run after the worker's destructor: the worker may call back as long as it lives.
  ~Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// Enters `peer`, the index of this connection's, in `attention` whenever advance(), failure() or take_done() has
  /// something for the engine.
  void report_to(Attention* attention, std::uint32_t peer) {
    attention_ = attention;
    peer_ = peer;
    if (failure_ != UCS_OK) attend();  // found while connecting
  }

  /// Memory of the peer. `key` is as UCX packed it there; empty: this end cannot write.
  struct RemoteMemory {
    std::span<const std::byte> key{};
    std::uint64_t base = 0;
    // For GPU memory:
    bool read_back = false;         ///< EngineOptions::read_back_gpu_writes of the peer
    bool cards_keep_order = false;  ///< EngineOptions::cards_keep_order of this end
    std::size_t num_ends = 0;       ///< ends that have a part of it for probes (gpu_probe_bytes)
    std::uint64_t probe_word = 0;   ///< what this end's probe writes, unlike what others before it wrote
  };
  /// Addresses of the peer's workers, as UCX packed them. The second may be empty.
  struct Addresses {
    std::span<const std::byte> worker{};
    std::span<const std::byte> receiver{};
  };
  /// @errors kUnsupported: this end has GPU memory, and no card reaches that of the peer, or several do and their
  ///         writes must be read back
  Status open(const Addresses& addresses, const RemoteMemory& memory, const RemoteMemory& gpu_memory);

  void put(int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes);
  /// Puts from any memory of this process of the same kind, which must not change until a later flush has completed.
  void put_from(int channel, std::span<const std::byte> source, std::size_t remote_offset);
  /// Sends a put and a message after it as one message; the `kind` of `message` names its other half. False if that
  /// takes two: puts are stores, or writes of more than kMaxOneMessageBytes, or something must arrive before.
  bool put_with(const Message& message, std::span<const std::byte> source);
  /// As put_with() for a put from this memory and a notify, which may overtake waiting messages of other channels.
  bool put_notify(const Message& message, std::size_t local_offset, std::size_t num_bytes);
  /// False if the peer must be asked for the bytes by a message. Otherwise take_done() returns the ticket when the
  /// bytes are there.
  bool get(std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket);
  /// take_done() returns the ticket when the sources of all earlier puts may change.
  void release(std::uint64_t ticket);
  /// Whether the sources of all earlier puts may change.
  bool is_released() const { return num_latest_sends_ == 0 && releases_.empty(); }
  /// Exchanges the tickets of gets and releases that are complete for `done`, which is emptied before.
  void take_done(std::vector<std::uint64_t>* done) {
    done->clear();
    done_.swap(*done);
  }
  // As those of Engine.
  void order_puts();
  bool shows_puts() const { return !reads_back_; }
  /// Sends `message` after all earlier puts on `channel`.
  void notify(int channel, const Message& message);
  /// Sends `message` after all earlier puts and messages.
  void notify_after_all(const Message& message);
  /// Sends `message` at once. The payload must not change until it has left.
  void answer(const Message& message, std::span<const std::byte> payload = {});
  /// Sends a hello through each endpoint, once the peer's GPU memory has been probed.
  void greet();
  /// The peer's hello has come.
  void greeted() {
    is_greeted_ = true;
    recheck_waiting();
  }
  /// True from greet() until the probe has read back what it wrote. A failure meanwhile is most likely the probe's.
  bool is_probing() const { return probe_ != Probe::kNone && probe_ != Probe::kDone; }
  /// Failure of a connection whose probe is the reason.
  Status probe_failure() const;
  /// True if puts are messages over TCP, with no faster way.
  bool puts_over_tcp() const;
  /// True if large puts go to a receiver.
  bool has_receiver() const { return bulk_endpoint_ != nullptr; }
  /// Sends `message` after all earlier puts and messages, followed by a flush of its own.
  void send_last(const Message& message);
  /// Accepts no further operations. Unsent messages are discarded.
  void stop();
  /// Starts a flush that covers all puts given so far.
  void begin_flush() { need(num_writes_); }

  /// True if the next poll has something to do even if nothing happens until then.
  bool needs_attention() const {
    const bool has_due = sent_ || is_flush_due() || to_read_back_ > read_back_started_ || recheck_waiting_ ||
                         flush_wanted_ || hello_due_ || (probe_ == Probe::kWriting && flushed_ >= probe_write_);
    return (has_due && usable()) || !done_.empty() || (failure_ != UCS_OK && !is_shut());
  }
  /// Sends due operations. True if it sent any, or if notify() has sent a message since the last call.
  bool advance();
  /// Whether the network still writes the memory of a get.
  bool is_reading() const { return num_reads_ > 0; }
  /// True if no operation waits or is in flight.
  bool quiet() const { return waiting_.empty() && num_in_flight_ == 0 && needed_ <= flushed_ && !flush_wanted_; }
  /// UCS_OK, or the reason for which the connection failed.
  ucs_status_t failure() const { return failure_; }
  /// Marks the connection as failed, unless it had failed before.
  void fail(ucs_status_t status);

  /// Cancels operations in flight and closes the endpoint; later progress of the worker completes this. Idempotent.
  void shut();
  /// Releases the key to the peer's memory. Call before the worker is destroyed.
  void release_key();
  bool is_shut() const { return endpoint_ == nullptr && bulk_endpoint_ == nullptr && num_in_flight_ == 0; }

  /// Transports that UCX chose for this peer; `peer`: its index in the engine.
  Path path(int peer) const;

 private:
  enum class PutWay { kMessages, kStores, kWrites };
  enum class Kind { kWrite, kRead, kFlush, kReadBack, kProbe, kMessage, kClose };
  enum class Probe { kNone, kWriting, kReading, kDone };
  struct Operation {
    Connection* connection = nullptr;
    Kind kind = Kind::kWrite;
    std::uint64_t covers = 0;   // kFlush, kReadBack: the number of the last write before the flush
    std::uint64_t ticket = 0;   // kRead
    Message message;            // kMessage: must not move until sent
    std::uint64_t release = 0;  // kWrite, kMessage: number of the next release
  };

  /// noexcept: UCX calls this from C code, through which no exception may propagate.
  static void on_completed(void* request, ucs_status_t status, void* operation) noexcept;
  static void on_failed(void* connection, ucp_ep_h endpoint, ucs_status_t status);

  bool usable() const { return endpoint_ != nullptr && failure_ == UCS_OK; }
  Operation* take_operation(Kind kind);
  static ucp_request_param_t params_of(Operation* operation);
  static bool is_send(Kind kind) { return kind == Kind::kWrite || kind == Kind::kMessage; }
  void end_send(const Operation& operation);
  void complete_releases();
  void started(Operation* operation, ucs_status_ptr_t request);
  void complete(Operation* operation, ucs_status_t status);
  Status create_endpoint(std::span<const std::byte> address, ucp_ep_h* endpoint);
  Status unpack(std::span<const std::byte> key, ucp_rkey_h* unpacked);
  Status open_memory(const RemoteMemory& memory);
  Status open_gpu_memory(const RemoteMemory& memory);
  bool is_inside(std::size_t remote_offset, std::size_t num_bytes);
  bool is_inside_gpu(std::size_t offset, std::size_t num_bytes) const;
  void put_gpu(int channel, std::span<const std::byte> source, std::size_t offset);
  void set_memory_handle(std::span<const std::byte> local, ucp_request_param_t* params) const;
  bool send_with(const Message& message, std::span<const std::byte> source, std::size_t most);
  /// A write, which completes for its caller only when it was begun.
  struct Write {
    Operation* operation = nullptr;
    ucp_request_param_t params{};
    std::span<const std::byte> source{};
    std::uint64_t remote = 0;
    ucp_rkey_h key = nullptr;
    std::uint64_t number = 0;
    std::uint64_t behind = 0;  ///< writes up to this number must have arrived
  };
  void write(int channel, std::span<const std::byte> source, std::size_t remote_offset);
  void begin(int channel, Write write);
  void begin_now(const Write& write);
  void begin_held();
  void drop_held();
  bool is_held_due() const { return !held_.empty() && held_.front().behind <= flushed_; }
  bool is_flush_due() const { return std::min(needed_, num_begun_writes_) > flush_started_; }
  void notify_after(std::uint64_t write, const Message& message);
  void send(const Message& message, std::span<const std::byte> payload = {}) { send(endpoint_, message, payload); }
  void send(ucp_ep_h endpoint, const Message& message, std::span<const std::byte> payload);
  void flush();
  void read_back();
  void arrived(std::uint64_t write);
  void attend() noexcept {
    if (attention_ != nullptr) attention_->add(peer_);
  }
  /// All writes up to this number must arrive, for a message or the owner.
  void need(std::uint64_t write) {
    needed_ = std::max(needed_, write);
    attend();
  }
  void recheck_waiting() {
    recheck_waiting_ = !waiting_.empty();
    if (recheck_waiting_) attend();
  }
  /// True while notifies wait for the probes of both ends.
  bool holds_notifies() const { return probe_ != Probe::kNone && (probe_ != Probe::kDone || !is_greeted_); }
  ucp_request_param_t gpu_params_of(Operation* operation, ucs_memory_type_t type) const;
  void begin_probe();
  void read_probe();
  void check_probe();
  void send_hellos();
  void close(ucp_ep_h* endpoint);

  const Resources& resources_;  // not used by completions, which may run while it is being destroyed
  const Library& library_;
  const Seal seal_;
  const std::uint32_t self_;
  const int rank_;  // rank of the peer
  ucp_ep_h endpoint_ = nullptr;
  ucp_ep_h bulk_endpoint_ = nullptr;  // to the peer's receiver; null: it has none
  ucp_rkey_h remote_key_ = nullptr;
  ucp_rkey_h gpu_key_ = nullptr;
  PutWay put_way_ = PutWay::kMessages;
  std::uint64_t remote_base_ = 0;  // kWrites
  std::uint64_t gpu_base_ = 0;
  std::size_t num_probed_ends_ = 0;     // RemoteMemory::num_ends
  std::string gpu_path_;                // of GPU memory, for errors
  bool reads_back_ = false;             // RemoteMemory::read_back
  bool has_ordered_card_ = false;       // a fence orders writes into GPU memory
  std::byte* mapped_memory_ = nullptr;  // kStores: memory of the peer
  ucs_status_t failure_ = UCS_OK;
  bool stopped_ = false;

  std::uint64_t num_sent_ = 0;             // messages sent; also the number of the next one
  std::uint64_t num_writes_ = 0;           // writes given; also the number of the last one
  std::uint64_t num_begun_writes_ = 0;     // of these, those not held
  std::uint64_t order_after_ = 0;          // later writes into GPU memory wait until those up to this have arrived
  std::uint64_t needed_ = 0;               // all writes up to this number must arrive for a message or the owner
  std::uint64_t flush_started_ = 0;        // a flush is in flight or complete for all writes up to this number
  std::uint64_t flushed_ = 0;              // all writes up to this number have arrived
  std::uint64_t last_gpu_write_ = 0;       // number of the last write into GPU memory
  std::uint64_t to_read_back_ = 0;         // a flush is complete for all writes up to this number, a read is due
  std::uint64_t read_back_started_ = 0;    // such a read is in flight or complete for all writes up to this number
  std::uint64_t read_word_ = 0;            // destination of these reads; the value means nothing
  bool flush_wanted_ = false;              // one more flush is due after the last message, regardless of the numbers
  bool recheck_waiting_ = false;           // a waiting message may be due
  bool sent_ = false;                      // notify() sent a message at once, which the next advance() reports
  std::vector<std::uint64_t> last_write_;  // by channel
  std::deque<Write> held_;
  WaitingMessages waiting_;
  std::vector<std::uint64_t> done_;

  /// A release that waits for sends: writes and messages.
  struct Release {
    std::uint64_t ticket = 0;
    std::size_t num_sends = 0;  ///< in flight, begun since the release before it
  };
  std::deque<Release> releases_;
  std::uint64_t first_release_ = 0;   ///< number of the first of these
  std::size_t num_latest_sends_ = 0;  ///< sends in flight, begun since the last release

  Probe probe_ = Probe::kNone;
  bool is_greeted_ = false;
  bool hello_due_ = false;
  bool probe_differs_ = false;     // it read other bytes than it wrote
  std::uint64_t probe_write_ = 0;  // number of its last write
  std::uint64_t probe_word_ = 0;   // RemoteMemory::probe_word
  std::uint64_t probe_read_word_ = 0;

  Attention* attention_ = nullptr;
  std::uint32_t peer_ = 0;

  std::size_t num_in_flight_ = 0;
  std::size_t num_reads_ = 0;         ///< of these, gets: their memory is still written
  std::deque<Operation> operations_;  // every operation ever used; their addresses are stable
  std::vector<Operation*> spare_;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_CONNECTION_HPP
