#ifndef FERRY_NET_UCX_RECEIVER_HPP
#define FERRY_NET_UCX_RECEIVER_HPP

/// A worker and a thread that take large puts of peers whose bytes the processor copies. Over TCP a core copies each
/// byte that comes twice and each that goes once; two threads carry a quarter more than one that does both
/// (docs/transport.md). Nothing is sent from here, and small messages do not come here: they would reach the engine's
/// owner one thread later. It has endpoints all the same: UCX answers who connects, and 1.13 ends the process where a
/// worker goes whose answer has not left, unless it leaves by an endpoint that can be closed.

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

/// Puts of messages from here on come here. Between what others wait for and the chunks of rings; no other number was
/// measured.
inline constexpr std::size_t kMinReceiverBytes = std::size_t{32} << 10;

class Receiver {
 public:
  /// All are called by the thread.
  struct Calls {
    ucp_am_recv_callback_t receive = nullptr;  ///< by UCX, with each message
    void* argument = nullptr;                  ///< for it
    std::function<bool()> may_receive;         ///< false: not now, ask again soon
  };
  /// That it needs, and all connections of an end that has one.
  static std::size_t num_descriptors(std::size_t num_peers);
  /// @errors as Resources::create
  static Result<std::unique_ptr<Receiver>> create(const Resources& scope, std::size_t num_peers, Calls calls);
  ~Receiver() { stop(); }
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  /// How peers reach it.
  const std::vector<std::byte>& address() const { return resources_->address(); }
  /// Before start(): a peer, by the address of its worker, may connect.
  /// @errors as ucx_status
  Status expect(std::span<const std::byte> address, int rank);
  /// Once.
  /// @errors kSystem
  Status start();
  /// Afterwards nothing is received, and all who had connected are not any more. Idempotent.
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
