#ifndef FERRY_NET_UCX_SCOPES_HPP
#define FERRY_NET_UCX_SCOPES_HPP

/// The one or two scopes of an end, driven and waited for as if they were one, and their receivers.

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

  /// Which scope `peer` is in.
  static Scope of(const EngineOptions& options, int peer);

  /// What UCX calls with each message, and what receivers need.
  struct Listener {
    ucp_am_recv_callback_t receive = nullptr;
    void* argument = nullptr;
    Receiver::Calls receiver{};
    int wake_fd = -1;  ///< by which their threads wake the owner's
  };
  /// Opens those that some peer is in.
  /// @errors as Resources::create
  Status open(const Library& library, const EngineOptions& options, const Listener& listener);
  /// From now on receivers receive.
  Status start_receivers();
  /// They do no more.
  void stop_receivers();
  /// Afterwards no peer accesses the memory.
  void close();

  bool is_open() const { return at(Scope::kHost) != nullptr || at(Scope::kNetwork) != nullptr; }
  /// Null if no peer is in it.
  Resources* at(Scope scope) const { return resources_[static_cast<std::size_t>(scope)].get(); }
  /// Null if the scope has none.
  Receiver* receiver_at(Scope scope) const { return receivers_[static_cast<std::size_t>(scope)].get(); }
  bool has_receivers() const { return receiver_at(Scope::kHost) != nullptr || receiver_at(Scope::kNetwork) != nullptr; }
  std::span<std::byte> memory() const { return memory_; }
  /// As Resources.
  void stop_listening(const std::set<SocketName>& known_ends);

  /// Moves what can be moved, in both. True if anything was.
  bool progress();
  int event_fd() const { return event_fd_; }
  /// As Engine::arm.
  bool arm();

 private:
  Status open_one(const Library& library, const Resources::Params& params, const Listener& listener);
  Status open_event_fd(int wake_fd);

  std::array<std::unique_ptr<Resources>, kNumScopes> resources_;
  std::array<std::unique_ptr<Receiver>, kNumScopes> receivers_;
  std::span<std::byte> memory_;
  int all_fd_ = -1;  // epoll, where there are several
  int event_fd_ = -1;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SCOPES_HPP
