#include "net/ucx/scopes.hpp"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "net/ucx/limits.hpp"

namespace ferry::net::ucx {

Scope Scopes::of(const EngineOptions& options, int peer) {
  const auto index = static_cast<std::size_t>(peer);
  return index < options.on_this_host.size() && options.on_this_host[index] ? Scope::kHost : Scope::kNetwork;
}

Status Scopes::open(const Library& library, const EngineOptions& options, const Listener& listener) {
  memory_ = options.memory;
  std::array<std::size_t, kNumScopes> num_peers{};
  for (int peer = 0; peer < options.num_peers; ++peer) {
    if (options.uses(peer)) ++num_peers[static_cast<std::size_t>(of(options, peer))];
  }
  for (const Scope scope : {Scope::kHost, Scope::kNetwork}) {
    const std::size_t num_here = num_peers[static_cast<std::size_t>(scope)];
    // An end without peers still has memory and an address.
    if (num_here == 0 && (scope == Scope::kHost || is_open())) continue;
    const Resources::Params params{.scope = scope,
                                   .devices = options.net_devices,
                                   .num_peers = num_here,
                                   .memory = memory_,
                                   .memory_bytes = memory_.empty() ? options.memory_bytes : 0,
                                   .gpu_memory = options.gpu_memory,
                                   .cards = scope == Scope::kNetwork ? options.cards : CardSettings{},
                                   .cards_keep_order = options.cards_keep_order};
    if (Status status = open_one(library, params, listener); !status.ok()) return status;
    const Resources& resources = *at(scope);
    if (num_here == 0 || !options.may_start_receiver || !resources.may_receive_puts()) continue;
    // If the system has no room for a receiver, the scope's own worker receives everything.
    if (!check_descriptors(Receiver::num_descriptors(num_here)).ok()) continue;
    if (auto created = Receiver::create(resources, num_here, listener.receiver); created.ok()) {
      receivers_[static_cast<std::size_t>(scope)] = std::move(*created);
    }
  }
  return open_event_fd(listener.wake_fd);
}

Status Scopes::start_receivers() {
  for (const auto& receiver : receivers_) {
    if (receiver == nullptr) continue;
    if (Status status = receiver->start(); !status.ok()) return status;
  }
  return {};
}

void Scopes::stop_receivers() {
  for (const auto& receiver : receivers_) {
    if (receiver != nullptr) receiver->stop();
  }
}

void Scopes::stop_listening(const std::set<SocketName>& known_ends) {
  for (const Scope scope : {Scope::kHost, Scope::kNetwork}) {
    if (at(scope) != nullptr) at(scope)->stop_listening(known_ends);
    if (receiver_at(scope) != nullptr) receiver_at(scope)->stop_listening(known_ends);
  }
}

Status Scopes::open_one(const Library& library, const Resources::Params& params, const Listener& listener) {
  Result<std::unique_ptr<Resources>> created = Resources::create(library, params);
  if (!created.ok()) return created.status();
  memory_ = (*created)->memory();
  const std::unique_ptr<Resources>& opened = resources_[static_cast<std::size_t>(params.scope)] = std::move(*created);
  return opened->listen(listener.receive, listener.argument);
}

Status Scopes::open_event_fd(int wake_fd) {
  std::vector<int> descriptors;
  for (const auto& resources : resources_) {
    if (resources != nullptr) descriptors.push_back(resources->event_fd());
  }
  if (has_receivers()) descriptors.push_back(wake_fd);
  event_fd_ = descriptors.front();
  if (descriptors.size() == 1) return {};
  all_fd_ = epoll_create1(EPOLL_CLOEXEC);
  for (const int descriptor : descriptors) {
    epoll_event readable{.events = EPOLLIN, .data = {}};
    if (all_fd_ < 0 || epoll_ctl(all_fd_, EPOLL_CTL_ADD, descriptor, &readable) != 0) {
      return Status(ErrorCode::kSystem,
                    fmt::format("network engine ucx: no descriptor to wait on: {}", std::strerror(errno)));
    }
  }
  event_fd_ = all_fd_;
  return {};
}

void Scopes::close() {
  event_fd_ = -1;
  if (all_fd_ >= 0) (void)::close(std::exchange(all_fd_, -1));
  for (auto& receiver : receivers_) receiver = nullptr;
  // The network scope may have registered memory that the host scope allocated.
  for (const Scope scope : {Scope::kNetwork, Scope::kHost}) resources_[static_cast<std::size_t>(scope)] = nullptr;
}

bool Scopes::progress() {
  bool moved = false;
  for (const auto& resources : resources_) {
    if (resources != nullptr) moved |= resources->library().worker_progress(resources->worker()) != 0;
  }
  return moved;
}

bool Scopes::arm() {
  return std::ranges::all_of(resources_, [](const auto& resources) {
    return resources == nullptr || resources->library().worker_arm(resources->worker()) == UCS_OK;
  });
}

}  // namespace ferry::net::ucx
