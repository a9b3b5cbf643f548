/// Polls of the engine: what is due is sent, what has arrived is reported.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "net/ucx/serve.hpp"
#include "net/ucx/ucx_engine.hpp"

namespace ferry::net::ucx {
namespace {

/// Rounds of progress in one poll: enough to receive a burst, few enough to return to the owner's orders soon.
constexpr int kMaxProgress = 32;

}  // namespace

bool UcxEngine::poll() {
  if (!usable()) return false;
  bool moved = advance();
  // A receiver's message may have come since the last poll.
  const bool was_due = is_due_.exchange(false);
  // A round without events costs a system call, for which an arrived message need not wait.
  for (int round = 0; round < kMaxProgress && !is_due_ && scopes_.progress(); ++round) moved = true;
  const bool any_message = was_due || is_due_;
  moved |= deliver_done();
  if (any_message) moved |= deliver_messages();
  moved |= notice_failures(any_message);
  if (!admission_.is_closed()) {
    moved |= admission_.advance(peers_, scopes_);
    if (admission_.is_closed()) descriptors_.give_back();
  }
  // Send the operations that a completed flush has made due: the owner may sleep after this.
  moved |= advance();
  end_attention();
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
  if (any_goodbye_) answer_goodbyes();
  bool moved = false;
  // By index: the callbacks of an operation may enter peers.
  for (std::size_t i = 0; i < attention_.listed().size(); ++i) {
    moved |= peers_[attention_.listed()[i]].connection->advance();
  }
  return moved;
}

/// Leaves those in attention_ that have something for the next poll.
void UcxEngine::end_attention() {
  listed_.assign(attention_.listed().begin(), attention_.listed().end());
  attention_.clear();
  for (const std::uint32_t peer : listed_) {
    if (peers_[peer].connection->needs_attention()) attention_.add(peer);
  }
}

void UcxEngine::lose_leaving(int peer) {
  const int rank = options_.rank_of(peer);
  lose(peer, Status(ErrorCode::kPeerLost,
                    fmt::format("network engine ucx: rank {} has closed its end of the network", rank), rank));
}

void UcxEngine::answer_goodbyes() {
  any_goodbye_ = false;
  for (int idx = 0; idx < options_.num_peers; ++idx) {
    Peer& peer = at(idx);
    if (peer.connection == nullptr || !peer.leaving || peer.answered) continue;
    if (!peer.connection->is_reading()) lose_leaving(idx);
    if (peer.connection->quiet()) {
      peer.answered = true;
      peer.connection->send_last({.kind = MessageKind::kFarewell});
    } else {
      any_goodbye_ = true;
    }
  }
}

bool UcxEngine::deliver_done() {
  bool any = false;
  for (const std::uint32_t peer : attention_.listed()) {
    peers_[peer].connection->take_done(&done_);
    for (const std::uint64_t ticket : done_) {
      any = true;
      if (!peers_[peer].lost && events_.completed) events_.completed(static_cast<int>(peer), ticket, 0);
    }
  }
  return any;
}

/// Delivers collected messages outside UCX's callbacks: the callbacks of the owner may want to send.
bool UcxEngine::deliver_messages() {
  bool any = false;
  for (int sender = 0; sender < options_.num_peers; ++sender) {
    Inbound* inbound = at(sender).inbound.get();
    if (inbound == nullptr || !inbound->has_due()) continue;
    any = true;
    inbound->take_due(&due_);
    for (const Message& message : due_) deliver(sender, message);
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
  } else if (message.kind == MessageKind::kPutNotify) {
    if (!peer.lost && events_.notified) events_.notified(sender, static_cast<int>(message.channel), message.operand);
  } else if (message.kind == MessageKind::kHello) {
    peer.greeted = true;
    peer.connection->greeted();
    peer.uses_receiver = peer.uses_receiver || message.operand != 0;
    peer.connection->answer({.kind = MessageKind::kReached, .value = message.value});
  } else if (message.kind == MessageKind::kReached) {
    (message.value == 0 ? peer.reached : peer.receiver_reached) = true;
  } else if (message.kind == MessageKind::kGoodbye) {
    peer.left = true;
    peer.leaving = any_goodbye_ = true;
    peer.connection->stop();
    peer.connection->begin_flush();
    // A card still writes the memory of gets, which the peer waits for.
    if (!peer.connection->is_reading()) lose_leaving(sender);
  } else if (message.kind == MessageKind::kFarewell) {
    peer.left = true;
  } else if (message.kind == MessageKind::kSocket) {
    peer.sockets.insert(message.value);
  } else if (message.kind == MessageKind::kSettled) {
    peer.settled = true;
  }
}

/// `any_message`: one may have broken the rules, of any peer.
bool UcxEngine::notice_failures(bool any_message) {
  bool any = false;
  if (any_message) {
    for (int peer = 0; peer < options_.num_peers; ++peer) any |= notice_failure(peer);
  } else {
    for (std::size_t i = 0; i < attention_.listed().size(); ++i) {
      any |= notice_failure(static_cast<int>(attention_.listed()[i]));
    }
  }
  return any;
}

bool UcxEngine::notice_failure(int index) {
  Peer& peer = at(index);
  if (peer.connection == nullptr || peer.connection->is_shut()) return false;
  const bool broke_rules = peer.inbound->broken();
  if (broke_rules) peer.connection->fail(UCS_ERR_REJECTED);
  if (peer.connection->failure() == UCS_OK) return false;
  peer.connection->shut();
  peer.inbound->end();
  peer.left = true;
  const int rank = options_.rank_of(index);
  if (broke_rules) {
    lose(index,
         Status(ErrorCode::kTransport,
                fmt::format("network engine ucx: rank {} sent a malformed message; run the same build on every rank",
                            rank),
                rank));
  } else {
    const Status why = ucx_status(peer.connection->failure(), fmt::format("the connection to rank {}", rank),
                                  "that process or its host has died or is unreachable", rank);
    const bool may_be_probe = peer.connection->is_probing() && why.code() != ErrorCode::kPeerLost;
    lose(index, may_be_probe ? peer.connection->probe_failure() : why);
  }
  return true;
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

}  // namespace ferry::net::ucx
