#include "net/ucx/engine.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "net/blob.hpp"
#include "net/ucx/connection.hpp"
#include "net/ucx/message.hpp"
#include "net/ucx/resources.hpp"

namespace ferry::net::ucx {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kName = "ucx";
/// Rounds of progress in one poll: enough to receive a burst, few enough to get back to the owner's orders soon.
constexpr int kMaxProgress = 32;
/// Cancelling is local work, but UCX does it in steps.
constexpr std::chrono::milliseconds kShutGrace{500};
/// Naps while closing: at most this long if UCX wakes the thread (in case it loses a wake-up), and this long if it does
/// not.
constexpr int kLongestNapMs = 5;
constexpr int kShortestNapMs = 1;

struct Peer {
  std::unique_ptr<Connection> connection;  // null for this end itself
  Token token{};
  bool lost = false;      // reported to the owner, or not to be reported
  bool leaving = false;   // it sent a goodbye, and this end's farewell is due or sent
  bool answered = false;  // the farewell is sent
  bool left = false;      // it will put nothing more
};

class UcxEngine final : public Engine {
 public:
  UcxEngine(const EngineOptions& options, const Token& token, std::unique_ptr<Resources> resources)
      : options_(options),
        token_(token),
        resources_(std::move(resources)),
        peers_(static_cast<std::size_t>(options.num_peers)) {
    options_.memory = resources_->memory();
  }
  ~UcxEngine() override { leave(0); }

  Status listen();

  std::string_view name() const override { return kName; }
  std::span<std::byte> memory() const override { return options_.memory; }
  Result<Blob> address() const override;
  Status connect(std::span<const Blob> addresses, EngineEvents events) override;
  void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) override;
  void notify(int peer, int channel, std::uint64_t value) override;
  bool poll() override;
  bool flushed(int peer) const override;
  int event_fd() const override { return resources_->event_fd(); }
  bool arm() override;
  std::vector<Path> paths() const override;
  void limit_close_time(std::int64_t timeout_ns) override {
    options_.timeout_ns = std::min(options_.timeout_ns, timeout_ns);
  }
  void close() override { leave(options_.timeout_ns); }

 private:
  static ucs_status_t on_message(void* engine, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t num_bytes, const ucp_am_recv_param_t* param) noexcept;

  bool usable() const { return connected_ && resources_ != nullptr; }
  const Library& library() const { return resources_->library(); }
  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& at(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }
  Message message_to(const Peer& peer, MessageKind kind) const;
  Status connect_to(int peer, std::span<const std::byte> own_part);
  bool advance();
  bool deliver();
  bool notice_failures();
  void lose(int peer, const Status& why);
  template <typename Done>
  bool poll_until(Clock::time_point deadline, Done done);
  void nap();
  void leave(std::int64_t timeout_ns);
  void drop_connections();

  EngineOptions options_;
  Token token_;
  std::vector<std::unique_ptr<Connection>>
      dropped_;                           // outlive the worker, which may still have to cancel their operations
  std::unique_ptr<Resources> resources_;  // null once closed
  EngineEvents events_;
  std::vector<Peer> peers_;
  std::vector<Message> arrived_;
  bool connected_ = false;
};

Status UcxEngine::listen() {
  ucp_am_handler_param_t params{};
  params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  params.id = kMessageId;
  params.cb = on_message;
  params.arg = this;
  return ucx_status(library().worker_set_am_recv_handler(resources_->worker(), &params), "listening for messages");
}

Result<Blob> UcxEngine::address() const {
  if (resources_ == nullptr) return Status(ErrorCode::kInternal, "network engine ucx: closed; please report this bug");
  BlobWriter own_part;
  own_part.bytes(token_);
  own_part.u64(reinterpret_cast<std::uintptr_t>(resources_->memory().data()));
  own_part.u32(static_cast<std::uint32_t>(resources_->address().size()));
  own_part.bytes(resources_->address());
  own_part.u32(static_cast<std::uint32_t>(resources_->remote_key().size()));
  own_part.bytes(resources_->remote_key());
  return make_blob(kName, options_, own_part.blob());
}

Status UcxEngine::connect(std::span<const Blob> addresses, EngineEvents events) {
  if (resources_ == nullptr || connected_ || addresses.size() != peers_.size()) {
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
  for (int peer = 0; peer < options_.num_peers; ++peer) {
    if (peer == options_.self) continue;
    if (Status status = connect_to(peer, own_parts[static_cast<std::size_t>(peer)]); !status.ok()) {
      drop_connections();
      return status;
    }
  }
  events_ = std::move(events);
  connected_ = true;
  for (Peer& peer : peers_) {
    if (peer.connection != nullptr) peer.connection->notify(0, message_to(peer, MessageKind::kHello));
  }
  return {};
}

Status UcxEngine::connect_to(int peer, std::span<const std::byte> own_part) {
  BlobReader reader(own_part);
  const std::span<const std::byte> token = reader.bytes(token_.size());
  const std::uint64_t base = reader.u64();
  const std::span<const std::byte> address = reader.bytes(reader.u32());
  const std::span<const std::byte> remote_key = reader.bytes(reader.u32());
  if (!reader.finished() || address.empty() || remote_key.empty() != options_.memory.empty()) {
    return Status(
        ErrorCode::kTransport,
        fmt::format(
            "network engine ucx: rank {} published an address with parts of the wrong length; run the same build "
            "on every rank",
            options_.rank_of(peer)),
        options_.rank_of(peer));
  }
  std::ranges::copy(token, at(peer).token.begin());
  auto connection = std::make_unique<Connection>(*resources_, options_.rank_of(peer), options_.num_channels);
  Status opened = connection->open(address, remote_key, base);
  at(peer).connection = std::move(connection);
  return opened;
}

void UcxEngine::put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) {
  if (!usable() || at(peer).lost || at(peer).connection == nullptr) return;
  at(peer).connection->put(channel, local_offset, remote_offset, num_bytes);
}

void UcxEngine::notify(int peer, int channel, std::uint64_t value) {
  if (!usable() || at(peer).lost || at(peer).connection == nullptr) return;
  Message message = message_to(at(peer), MessageKind::kNotify);
  message.channel = static_cast<std::uint32_t>(channel);
  message.value = value;
  at(peer).connection->notify(channel, message);
}

bool UcxEngine::poll() {
  if (!usable()) return false;
  bool moved = advance();
  for (int round = 0; round < kMaxProgress && library().worker_progress(resources_->worker()) != 0; ++round)
    moved = true;
  moved |= deliver();
  moved |= notice_failures();
  // Send what a completed flush has made due now: the owner may sleep after this.
  moved |= advance();
  return moved;
}

bool UcxEngine::advance() {
  bool moved = false;
  for (Peer& peer : peers_) {
    if (peer.connection == nullptr) continue;
    if (peer.leaving && !peer.answered && peer.connection->quiet()) {
      peer.answered = true;
      peer.connection->send_last(message_to(peer, MessageKind::kFarewell));
    }
    moved |= peer.connection->advance();
  }
  return moved;
}

/// Runs outside callbacks, which only collect messages: their receivers may want to send.
bool UcxEngine::deliver() {
  if (arrived_.empty()) return false;
  for (const Message& message : std::exchange(arrived_, {})) {
    const int sender = static_cast<int>(message.sender);
    Peer& peer = at(sender);
    if (message.kind == MessageKind::kNotify) {
      if (!peer.lost && events_.notified) {
        events_.notified(sender, static_cast<int>(message.channel), message.value);
      }
    } else if (message.kind == MessageKind::kGoodbye) {
      peer.left = true;
      peer.leaving = true;
      peer.connection->stop();
      peer.connection->begin_flush();
      lose(sender, Status(ErrorCode::kPeerLost,
                          fmt::format("network engine ucx: rank {} has closed its end of the network",
                                      options_.rank_of(sender)),
                          options_.rank_of(sender)));
    } else if (message.kind == MessageKind::kFarewell) {
      peer.left = true;
    }
  }
  return true;
}

bool UcxEngine::notice_failures() {
  bool any = false;
  for (int index = 0; index < options_.num_peers; ++index) {
    Peer& peer = at(index);
    if (peer.connection == nullptr || peer.connection->failure() == UCS_OK || peer.connection->is_shut()) continue;
    peer.connection->shut();
    peer.left = true;
    any = true;
    const int rank = options_.rank_of(index);
    lose(index, ucx_status(peer.connection->failure(), fmt::format("the connection to rank {}", rank),
                           "that process or its host has died or is unreachable", rank));
  }
  return any;
}

void UcxEngine::lose(int peer, const Status& why) {
  if (std::exchange(at(peer).lost, true)) return;
  if (events_.lost) events_.lost(peer, why);
}

bool UcxEngine::flushed(int peer) const {
  const Connection* connection = at(peer).connection.get();
  return connection == nullptr || at(peer).lost || connection->quiet();
}

bool UcxEngine::arm() {
  if (!usable()) return true;
  return library().worker_arm(resources_->worker()) == UCS_OK;
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

/// The wait for an unreachable peer lasts as long as the deadline allows and should not keep a core busy.
void UcxEngine::nap() {
  pollfd wakes{event_fd(), POLLIN, 0};
  const bool will_be_woken = arm();
  (void)::poll(&wakes, will_be_woken ? 1 : 0, will_be_woken ? kLongestNapMs : kShortestNapMs);
}

/// Peers write to this end's memory as long as they believe it exists, with some transports without involving this
/// process or the kernel. So close is a handshake: a goodbye, and the peer's answer that it has stopped.
void UcxEngine::leave(std::int64_t timeout_ns) {
  if (resources_ == nullptr) return;
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
      peer.connection->send_last(message_to(peer, MessageKind::kGoodbye));
      peer.leaving = false;  // the goodbye replaces a farewell
    }
    poll_until(deadline, [](const Peer& peer) { return peer.left && peer.connection->quiet(); });
  }
  drop_connections();
  resources_ = nullptr;
  peers_.clear();
  peers_.resize(static_cast<std::size_t>(options_.num_peers));
}

/// Cancels whatever is still in flight.
void UcxEngine::drop_connections() {
  for (Peer& peer : peers_) {
    if (peer.connection != nullptr) peer.connection->shut();
  }
  const auto deadline = Clock::now() + kShutGrace;
  const auto all_shut = [this] {
    return std::ranges::all_of(
        peers_, [](const Peer& peer) { return peer.connection == nullptr || peer.connection->is_shut(); });
  };
  while (!all_shut() && Clock::now() < deadline) library().worker_progress(resources_->worker());
  for (Peer& peer : peers_) {
    if (peer.connection == nullptr) continue;
    peer.connection->release_key();
    dropped_.push_back(std::move(peer.connection));
  }
}

Message UcxEngine::message_to(const Peer& peer, MessageKind kind) const {
  Message message;
  message.kind = kind;
  message.receiver = peer.token;
  message.sender = static_cast<std::uint32_t>(options_.self);
  return message;
}

ucs_status_t UcxEngine::on_message(void* engine, const void* header, std::size_t header_bytes, void* /*data*/,
                                   std::size_t /*num_bytes*/, const ucp_am_recv_param_t* /*param*/) noexcept {
  auto* self = static_cast<UcxEngine*>(engine);
  Message message;
  if (header_bytes != sizeof message) return UCS_OK;
  std::memcpy(&message, header, sizeof message);
  const EngineOptions& options = self->options_;
  if (message.magic != kMessageMagic || message.receiver != self->token_) return UCS_OK;
  if (message.sender >= static_cast<std::uint32_t>(options.num_peers) ||
      message.sender == static_cast<std::uint32_t>(options.self) ||
      message.channel >= static_cast<std::uint32_t>(options.num_channels)) {
    return UCS_OK;
  }
  self->arrived_.push_back(message);
  return UCS_OK;
}

}  // namespace

Status probe() { return library().status(); }

Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options) {
  Result<const Library*> table = library();
  if (!table.ok()) return table.status();
  Result<Token> token = make_token();
  if (!token.ok()) return token.status();
  Result<std::unique_ptr<Resources>> resources = Resources::create(**table, options.memory, options.memory_bytes);
  if (!resources.ok()) return resources.status();
  auto engine = std::make_unique<UcxEngine>(options, *token, std::move(*resources));
  if (Status status = engine->listen(); !status.ok()) return status;
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace ferry::net::ucx
