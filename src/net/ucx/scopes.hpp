#ifndef FERRY_NET_UCX_SCOPES_HPP
#define FERRY_NET_UCX_SCOPES_HPP

/// The one or two scopes of an end, driven and waited for together, and their receivers.

#include <array>
#include <cstddef>
#include <memory>
#include <set>
#include <span>

#include "net/engine.hpp"
#include "net/ucx/receiver.hpp"
#include "net/ucx/resources.hpp"

namespace ferry::net::ucx {

class Scopes {
 public:
  Scopes() = default;
  Scopes(const Scopes&) = delete;
  Scopes& operator=(const Scopes&) = delete;
  ~Scopes() { close(); }

  /// Scope of `peer`.
  static Scope of(const EngineOptions& options, int peer);

  /// Handler that UCX calls with each message, and the callbacks of receivers.
  struct Listener {
    ucp_am_recv_callback_t receive = nullptr;
    void* argument = nullptr;
    Receiver::Calls receiver{};
    int wake_fd = -1;  ///< wakes the owner's thread
  };
  /// Opens the scopes that contain peers.
  /// @errors as Resources::create
  Status open(const Library& library, const EngineOptions& options, const Listener& listener);
  /// Starts the receivers' threads.
  Status start_receivers();
  /// Stops them.
  void stop_receivers();
  /// No peer accesses the memory afterwards.
  void close();

  bool is_open() const { return at(Scope::kHost) != nullptr || at(Scope::kNetwork) != nullptr; }
  /// Null if no peer is in the scope.
  Resources* at(Scope scope) const { return resources_[static_cast<std::size_t>(scope)].get(); }
  /// Null if the scope has no receiver.
  Receiver* receiver_at(Scope scope) const { return receivers_[static_cast<std::size_t>(scope)].get(); }
  bool has_receivers() const { return receiver_at(Scope::kHost) != nullptr || receiver_at(Scope::kNetwork) != nullptr; }
  std::span<std::byte> memory() const { return memory_; }
  /// Like Resources::stop_listening.
  void stop_listening(const std::set<SocketName>& known_ends);

  /// Makes progress in both scopes. True if anything happened.
  bool progress();
  int event_fd() const { return event_fd_; }
  /// Like Engine::arm.
  bool arm();

 private:
  Status open_one(const Library& library, const Resources::Params& params, const Listener& listener);
  Status open_event_fd(int wake_fd);

  std::array<std::unique_ptr<Resources>, kNumScopes> resources_;
  std::array<std::unique_ptr<Receiver>, kNumScopes> receivers_;
  std::span<std::byte> memory_;
  int all_fd_ = -1;  // epoll, if there are several
  int event_fd_ = -1;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SCOPES_HPP
