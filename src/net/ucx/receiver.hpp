#ifndef FERRY_NET_UCX_RECEIVER_HPP
#define FERRY_NET_UCX_RECEIVER_HPP

/// Worker and thread that receive large puts of peers whose bytes the processor copies. Over TCP a core copies each
/// received byte twice and each sent byte once; two threads carry a quarter more than one thread that does both
/// (docs/transport.md). The thread sends no messages, and small messages bypass it, because they would reach the
/// engine's owner one thread later. It has endpoints all the same: UCX answers a connecting peer, and UCX 1.13 ends the
/// process if a worker is destroyed before its answer has left, unless the answer leaves through an endpoint that can
/// be closed.

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "net/ucx/resources.hpp"
#include "net/wake_fd.hpp"

namespace ferry::net::ucx {

/// Minimum size of a message whose put goes to the receiver. It lies between the size of messages that peers wait for
/// and that of ring chunks; no other value was measured.
inline constexpr std::size_t kMinReceiverBytes = std::size_t{32} << 10;

class Receiver {
 public:
  /// Callbacks of the thread.
  struct Calls {
    ucp_am_recv_callback_t receive = nullptr;  ///< called by UCX with each message
    void* argument = nullptr;                  ///< argument of `receive`
    std::function<bool()> may_receive;         ///< false: not now, ask again soon
  };
  /// Descriptors that the receiver needs, together with all connections of an end that has one.
  static std::size_t num_descriptors(std::size_t num_peers);
  /// @errors as Resources::create
  static Result<std::unique_ptr<Receiver>> create(const Resources& scope, std::size_t num_peers, Calls calls);
  ~Receiver() { stop(); }
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  /// Address with which peers reach it.
  const std::vector<std::byte>& address() const { return resources_->address(); }
  /// Allows a peer, given by the address of its worker, to connect. Call before start().
  /// @errors as ucx_status
  Status expect(std::span<const std::byte> address, int rank);
  /// Call once.
  /// @errors kSystem
  Status start();
  /// Ends receiving and all connections. Idempotent.
  void stop();
  void stop_listening(const std::set<SocketName>& known_ends) { resources_->stop_listening(known_ends); }

 private:
  Receiver(std::unique_ptr<Resources> resources, Calls calls)
      : resources_(std::move(resources)), calls_(std::move(calls)) {}
  static void on_failed(void* argument, ucp_ep_h endpoint, ucs_status_t status);
  void run();
  void sleep();
  void close_endpoints();

  std::unique_ptr<Resources> resources_;
  const Calls calls_;
  std::vector<ucp_ep_h> endpoints_;
  WakeFd stop_fd_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_RECEIVER_HPP
