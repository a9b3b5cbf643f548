#ifndef FERRY_NET_UCX_UCX_ENGINE_HPP
#define FERRY_NET_UCX_UCX_ENGINE_HPP

/// The engine: its calls are in engine.cpp, its polls in engine_poll.cpp, its end in engine_close.cpp.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "net/blob.hpp"
#include "net/engine.hpp"
#include "net/ucx/admission.hpp"
#include "net/ucx/connection.hpp"
#include "net/ucx/inbound.hpp"
#include "net/ucx/limits.hpp"
#include "net/ucx/message.hpp"
#include "net/ucx/peer.hpp"
#include "net/ucx/scopes.hpp"
#include "net/wake_fd.hpp"

namespace ferry::net::ucx {

inline constexpr std::string_view kEngineName = "ucx";

class UcxEngine final : public Engine {
 public:
  UcxEngine(const EngineOptions& options, const Token& token, KeyPair keys)
      : options_(options),
        token_(token),
        keys_(std::move(keys)),
        attention_(static_cast<std::size_t>(options.num_peers)),
        peers_(static_cast<std::size_t>(options.num_peers)) {}
  ~UcxEngine() override { leave(0); }

  Status open(const Library& library);

  std::string_view name() const override { return kEngineName; }
  std::string_view version() const override { return version_; }
  std::span<std::byte> memory() const override { return options_.memory; }
  Result<Blob> address() const override;
  Status connect(std::span<const Blob> addresses, EngineEvents events) override;
  void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) override;
  void notify(int peer, int channel, std::uint64_t value) override;
  void put_notify(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes,
                  std::uint64_t value) override;
  void put_from(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset) override;
  void get(int peer, std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) override;
  void atomic(int peer, int channel, const AtomicOp& op, std::uint64_t ticket) override;
  void put_atomic(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset,
                  const AtomicOp& op) override;
  void order_puts(int peer) override {
    if (can_send(peer)) at(peer).connection->order_puts();
  }
  bool shows_puts(int peer) const override { return !can_send(peer) || at(peer).connection->shows_puts(); }
  void flush(int peer, std::uint64_t ticket) override;
  void release(int peer, std::uint64_t ticket) override;
  bool is_released(int peer) const override { return can_send(peer) && at(peer).connection->is_released(); }
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
  void end_attention();
  void lose_leaving(int peer);
  void answer_goodbyes();
  bool deliver_done();
  bool deliver_messages();
  void deliver(int sender, const Message& message);
  bool notice_failures(bool any_message);
  bool notice_failure(int peer);
  void lose(int peer, const Status& why);
  template <typename Done>
  bool poll_until(std::chrono::steady_clock::time_point deadline, Done done);
  void nap();
  void leave(std::int64_t timeout_ns);
  void let_peers_connect();
  void drop_connections();

  EngineOptions options_;
  Token token_;
  KeyPair keys_;
  std::string_view version_;
  Attention attention_;
  std::vector<std::unique_ptr<Connection>>
      dropped_;  // outlive the workers, which may still have to cancel their operations
  Scopes scopes_;
  EngineEvents events_;
  std::vector<Peer> peers_;
  bool any_goodbye_ = false;  // a peer leaves that has no farewell yet
  // Used by end_attention(), deliver_messages() and deliver_done() alone; kept for their memory.
  std::vector<std::uint32_t> listed_;
  std::vector<Message> due_;
  std::vector<std::uint64_t> done_;
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

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_UCX_ENGINE_HPP
