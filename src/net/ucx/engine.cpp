#include "net/ucx/engine.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <utility>

#include "net/blob.hpp"
#include "net/ucx/address.hpp"
#include "net/ucx/admission.hpp"
#include "net/ucx/connection.hpp"
#include "net/ucx/inbound.hpp"
#include "net/ucx/limits.hpp"
#include "net/ucx/message.hpp"
#include "net/ucx/peer.hpp"
#include "net/ucx/scopes.hpp"
#include "net/ucx/serve.hpp"
#include "net/wake_fd.hpp"

namespace ferry::net::ucx {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kName = "ucx";
/// Rounds of progress in one poll: enough to receive a burst, few enough to return to the owner's orders soon.
constexpr int kMaxProgress = 32;
/// Time for peers to finish connecting, and for UCX to cancel operations. Cancelling is local work, but UCX does it in
/// steps.
constexpr std::chrono::milliseconds kShutGrace{500};
/// Naps while closing: at most kLongestNapMs if UCX wakes the thread (it may lose a wake-up), otherwise kShortestNapMs.
constexpr int kLongestNapMs = 5;
constexpr int kShortestNapMs = 1;

class UcxEngine final : public Engine {
 public:
  UcxEngine(const EngineOptions& options, const Token& token, KeyPair keys)
      : options_(options), token_(token), keys_(std::move(keys)), peers_(static_cast<std::size_t>(options.num_peers)) {}
  ~UcxEngine() override { leave(0); }

  Status open(const Library& library);

  std::string_view name() const override { return kName; }
  std::string_view version() const override { return version_; }
  std::span<std::byte> memory() const override { return options_.memory; }
  Result<Blob> address() const override;
  Status connect(std::span<const Blob> addresses, EngineEvents events) override;
  void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) override;
  void notify(int peer, int channel, std::uint64_t value) override;
  void put_from(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset) override;
  void get(int peer, std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) override;
  void atomic(int peer, int channel, const AtomicOp& op, std::uint64_t ticket) override;
  void put_atomic(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset,
                  const AtomicOp& op) override;
  void flush(int peer, std::uint64_t ticket) override;
  void forget(std::uint64_t ticket) override;
  bool poll() override;
  bool flushed(int peer) const override;
  int event_fd() const override { return scopes_.event_fd(); }
  bool arm() override;
  std::vector<Path> paths() const override;
  CardSettings card_settings() const override {
    const Resources* const network = scopes_.at(Scope::kNetwork);
    return network == nullptr ? CardSettings{} : network->card_settings();
  }
  void limit_close_time(std::int64_t timeout_ns) override {
    options_.timeout_ns = std::min(options_.timeout_ns, timeout_ns);
  }
  void close() override { leave(options_.timeout_ns); }

 private:
  template <Way way>
  static ucs_status_t on_message(void* engine, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t num_bytes, const ucp_am_recv_param_t* param) noexcept;

  std::size_t num_descriptors_for(std::span<const std::span<const std::byte>> own_parts) const;
  bool usable() const { return connected_ && scopes_.is_open(); }
  bool can_send(int peer) const { return usable() && !at(peer).lost && at(peer).connection != nullptr; }
  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& at(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }
  void receive(std::span<const std::byte> header, std::span<const std::byte> payload, Way way);
  bool is_receiver_ahead() const;
  bool advance();
  bool deliver();
  void deliver(int sender, const Message& message);
  bool notice_failures();
  void lose(int peer, const Status& why);
  template <typename Done>
  bool poll_until(Clock::time_point deadline, Done done);
  void nap();
  void leave(std::int64_t timeout_ns);
  void let_peers_connect();
  void drop_connections();

  EngineOptions options_;
  Token token_;
  KeyPair keys_;
  std::string_view version_;
  std::vector<std::unique_ptr<Connection>>
      dropped_;  // outlive the workers, which may still have to cancel their operations
  Scopes scopes_;
  EngineEvents events_;
  std::vector<Peer> peers_;
  Admission admission_;
  ReservedDescriptors descriptors_;  // for connections that are being established
  // Receivers wake the thread that sleeps on event_fd() through it. Only arm() clears it: other threads may poll, and
  // have left when the next message arrives.
  WakeFd wake_;
  std::atomic<bool> wants_wake_{false};
  std::atomic<bool> is_due_{false};      // a message to be delivered has arrived
  mutable bool has_been_asked_ = false;  // for its address: peers may connect
  bool connected_ = false;
};

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
  return make_blob(kName, options_, encode_address(address));
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
    Result<std::span<const std::byte>> own_part = parse_blob(addresses[index], kName, options_, peer);
    if (!own_part.ok()) return own_part.status();
    own_parts[index] = *own_part;
  }
  // UCX ends the process if it runs out of descriptors while it connects.
  if (Status status = descriptors_.reserve(num_descriptors_for(own_parts)); !status.ok()) return status;
  const OwnEnd own{options_, scopes_, token_, keys_};
  Status status;
  for (int peer = 0; peer < options_.num_peers && status.ok(); ++peer) {
    if (peer != options_.self) status = connect_peer(own, peer, own_parts[static_cast<std::size_t>(peer)], &at(peer));
  }
  if (status.ok()) status = scopes_.start_receivers();
  if (!status.ok()) return status;
  events_ = std::move(events);
  connected_ = true;
  for (Peer& peer : peers_) {
    if (peer.connection != nullptr) peer.connection->greet();
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

bool UcxEngine::poll() {
  if (!usable()) return false;
  bool moved = advance();
  // A round without events costs a system call, for which an arrived message need not wait.
  is_due_ = false;
  for (int round = 0; round < kMaxProgress && !is_due_ && scopes_.progress(); ++round) moved = true;
  moved |= deliver();
  moved |= notice_failures();
  moved |= admission_.advance(peers_, scopes_);
  if (admission_.is_closed()) descriptors_.give_back();
  // Send the operations that a completed flush has made due: the owner may sleep after this.
  moved |= advance();
  return moved;
}

bool UcxEngine::arm() {
  if (!usable()) return true;
  if (scopes_.has_receivers()) {
    // The bytes that a receiver stored before it sees this flag are visible here.
    wake_.clear();
    wants_wake_.store(true, std::memory_order_seq_cst);
    const auto has_news = [](const Peer& peer) {
      return peer.connection != nullptr &&
             (peer.inbound->has_due() || (peer.inbound->broken() && !peer.connection->is_shut()));
    };
    if (std::ranges::any_of(peers_, has_news)) return false;
  }
  return scopes_.arm();
}

bool UcxEngine::advance() {
  bool moved = false;
  for (Peer& peer : peers_) {
    if (peer.connection == nullptr) continue;
    if (peer.leaving && !peer.answered && peer.connection->quiet()) {
      peer.answered = true;
      peer.connection->send_last({.kind = MessageKind::kFarewell});
    }
    moved |= peer.connection->advance();
  }
  return moved;
}

/// Delivers collected messages outside UCX's callbacks: the callbacks of the owner may want to send.
bool UcxEngine::deliver() {
  bool any = false;
  for (int sender = 0; sender < options_.num_peers; ++sender) {
    Inbound* inbound = at(sender).inbound.get();
    if (inbound == nullptr) continue;
    for (const std::uint64_t ticket : at(sender).connection->take_fetched()) {
      any = true;
      if (!at(sender).lost && events_.completed) events_.completed(sender, ticket, 0);
    }
    if (!inbound->has_due()) continue;
    any = true;
    for (const Message& message : inbound->take_due()) deliver(sender, message);
  }
  return any;
}

void UcxEngine::deliver(int sender, const Message& message) {
  Peer& peer = at(sender);
  if (serve(message, options_.memory, events_, *peer.connection)) return;
  if (message.kind == MessageKind::kAnswer) {
    if (!peer.lost && events_.completed) events_.completed(sender, message.ticket, message.value);
  } else if (message.kind == MessageKind::kNotify) {
    if (!peer.lost && events_.notified) events_.notified(sender, static_cast<int>(message.channel), message.value);
  } else if (message.kind == MessageKind::kHello) {
    peer.greeted = true;
    peer.uses_receiver = peer.uses_receiver || message.operand != 0;
    peer.connection->answer({.kind = MessageKind::kReached, .value = message.value});
  } else if (message.kind == MessageKind::kReached) {
    (message.value == 0 ? peer.reached : peer.receiver_reached) = true;
  } else if (message.kind == MessageKind::kGoodbye) {
    peer.left = true;
    peer.leaving = true;
    peer.connection->stop();
    peer.connection->begin_flush();
    const int rank = options_.rank_of(sender);
    lose(sender, Status(ErrorCode::kPeerLost,
                        fmt::format("network engine ucx: rank {} has closed its end of the network", rank), rank));
  } else if (message.kind == MessageKind::kFarewell) {
    peer.left = true;
  } else if (message.kind == MessageKind::kSocket) {
    peer.sockets.insert(message.value);
  } else if (message.kind == MessageKind::kSettled) {
    peer.settled = true;
  }
}

bool UcxEngine::notice_failures() {
  bool any = false;
  for (int index = 0; index < options_.num_peers; ++index) {
    Peer& peer = at(index);
    if (peer.connection == nullptr || peer.connection->is_shut()) continue;
    const bool broke_rules = peer.inbound->broken();
    if (broke_rules) peer.connection->fail(UCS_ERR_REJECTED);
    if (peer.connection->failure() == UCS_OK) continue;
    peer.connection->shut();
    peer.inbound->end();
    peer.left = true;
    any = true;
    const int rank = options_.rank_of(index);
    if (broke_rules) {
      lose(index, Status(ErrorCode::kTransport,
                         fmt::format("network engine ucx: rank {} sent a malformed message; run the same "
                                     "build on every rank",
                                     rank),
                         rank));
    } else {
      lose(index, ucx_status(peer.connection->failure(), fmt::format("the connection to rank {}", rank),
                             "that process or its host has died or is unreachable", rank));
    }
  }
  return any;
}

void UcxEngine::lose(int peer, const Status& why) {
  if (std::exchange(at(peer).lost, true)) return;
  // A closing peer still answers this end's gets, and the owner may free their memory as soon as the loss is reported.
  if (at(peer).inbound != nullptr) at(peer).inbound->forget_gets();
  if (events_.lost) events_.lost(peer, why);
}

/// True if the receiver is ahead of any peer's messages: the owner's thread delivers the missing ones, and it never
/// waits for the receiver.
bool UcxEngine::is_receiver_ahead() const {
  return std::ranges::any_of(
      peers_, [](const Peer& peer) { return peer.inbound != nullptr && peer.inbound->is_receiver_ahead(); });
}

bool UcxEngine::flushed(int peer) const {
  const Connection* connection = at(peer).connection.get();
  return connection == nullptr || at(peer).lost || connection->quiet();
}

std::vector<Path> UcxEngine::paths() const {
  std::vector<Path> paths;
  for (int peer = 0; peer < options_.num_peers; ++peer) {
    if (at(peer).connection != nullptr) paths.push_back(at(peer).connection->path(peer));
  }
  return paths;
}

template <typename Done>
bool UcxEngine::poll_until(Clock::time_point deadline, Done done) {
  while (!std::ranges::all_of(peers_, [&done](Peer& peer) {
    return peer.connection == nullptr || peer.connection->failure() != UCS_OK || done(peer);
  })) {
    const bool moved = poll();
    if (Clock::now() >= deadline) return false;
    if (!moved) nap();
  }
  return true;
}

/// Sleeps between polls while closing: an unreachable peer may take the whole deadline, during which no core should be
/// busy.
void UcxEngine::nap() {
  pollfd wakes{event_fd(), POLLIN, 0};
  const bool will_be_woken = arm();
  (void)::poll(&wakes, will_be_woken ? 1 : 0, will_be_woken ? kLongestNapMs : kShortestNapMs);
}

/// Peers write to this end's memory as long as they believe that it exists, with some transports without involving this
/// process or the kernel. So close is a handshake: a goodbye, and the peer's answer that it has stopped.
void UcxEngine::leave(std::int64_t timeout_ns) {
  if (!scopes_.is_open()) return;
  events_ = {};
  if (connected_) {
    const auto room = Clock::time_point::max() - Clock::now();
    const auto deadline = Clock::now() + std::min<Clock::duration>(std::chrono::nanoseconds(timeout_ns), room);
    for (Peer& peer : peers_) {
      if (peer.connection != nullptr) peer.connection->begin_flush();
    }
    poll_until(deadline, [](const Peer& peer) { return peer.connection->quiet(); });
    for (Peer& peer : peers_) {
      if (peer.connection == nullptr || peer.answered) continue;
      peer.connection->send_last({.kind = MessageKind::kGoodbye});
      peer.leaving = false;  // the goodbye replaces a farewell
    }
    poll_until(deadline, [](const Peer& peer) { return peer.left && peer.connection->quiet(); });
  } else if (has_been_asked_) {
    let_peers_connect();
  }
  scopes_.stop_receivers();
  drop_connections();
  scopes_.close();
  peers_.clear();
  peers_.resize(static_cast<std::size_t>(options_.num_peers));
}

/// Lets peers finish the connections that they have begun to an end that does not connect itself: UCX may end a process
/// whose peer closes its sockets meanwhile. Does not if descriptors are short: UCX ends this process if those for the
/// peers' connections run out.
void UcxEngine::let_peers_connect() {
  descriptors_.give_back();
  if (!descriptors_.reserve(descriptors_of_connections(peers_.size() - 1)).ok()) return;
  const auto deadline =
      Clock::now() + std::min<Clock::duration>(kShutGrace, std::chrono::nanoseconds(options_.timeout_ns));
  while (Clock::now() < deadline) {
    if (!scopes_.progress()) nap();
  }
}

/// Cancels all operations in flight.
void UcxEngine::drop_connections() {
  descriptors_.give_back();
  for (Peer& peer : peers_) {
    if (peer.connection != nullptr) peer.connection->shut();
  }
  const auto deadline = Clock::now() + kShutGrace;
  const auto all_shut = [this] {
    return std::ranges::all_of(
        peers_, [](const Peer& peer) { return peer.connection == nullptr || peer.connection->is_shut(); });
  };
  while (!all_shut() && Clock::now() < deadline) scopes_.progress();
  for (Peer& peer : peers_) {
    if (peer.connection == nullptr) continue;
    peer.connection->release_key();
    dropped_.push_back(std::move(peer.connection));
  }
}

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

}  // namespace

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
