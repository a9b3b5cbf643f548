#ifndef FERRY_NET_UCX_SCOPES_HPP
#define FERRY_NET_UCX_SCOPES_HPP

/// The one or two scopes of an end, driven and waited for as if they were one.

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "net/engine.hpp"
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

  /// Opens those that some peer is in. `receive` and `receiver`: what UCX calls with each message.
  /// @errors as Resources::create
  Status open(const Library& library, const EngineOptions& options, ucp_am_recv_callback_t receive, void* receiver);
  /// Afterwards no peer accesses the memory.
  void close();

  bool is_open() const { return at(Scope::kHost) != nullptr || at(Scope::kNetwork) != nullptr; }
  /// Null if no peer is in it.
  Resources* at(Scope scope) const { return resources_[static_cast<std::size_t>(scope)].get(); }
  std::span<std::byte> memory() const { return memory_; }

  /// Moves what can be moved, in both. True if anything was.
  bool progress();
  int event_fd() const { return event_fd_; }
  /// As Engine::arm.
  bool arm();

 private:
  Status open_one(const Library& library, const Resources::Params& params, ucp_am_recv_callback_t receive,
                  void* receiver);
  Status open_event_fd();

  std::array<std::unique_ptr<Resources>, kNumScopes> resources_;
  std::span<std::byte> memory_;
  int both_fd_ = -1;  // epoll, where there are two
  int event_fd_ = -1;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_SCOPES_HPP
