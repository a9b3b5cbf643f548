#include "ucx_card/wires.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace ferry::ucx_card {
namespace {

constexpr int kBacklog = 256;
constexpr unsigned kGenerationBits = 16;

/// Abstract address of a process, which leaves no file.
socklen_t address_of(std::uint64_t process, sockaddr_un* address) {
  address->sun_family = AF_UNIX;
  const int length = std::snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "ferry-ucx-card-%llu",
                                   static_cast<unsigned long long>(process));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1) + static_cast<socklen_t>(length);
}

int open_socket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); }

}  // namespace

void Wires::open(Events events) {
  events_ = std::move(events);
  process_ = (static_cast<std::uint64_t>(getpid()) << kGenerationBits) + ++num_opened_;
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  is_woken_ = false;
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un address{};
  const socklen_t num_bytes = address_of(process_, &address);
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), num_bytes) != 0 ||
      listen(listener_, kBacklog) != 0) {
    std::perror("the stand-in for a card cannot listen");
  }
}

void Wires::close() {
  for (const auto& [fd, wire] : wires_) ::close(fd);
  wires_.clear();
  ::close(std::exchange(listener_, -1));
  ::close(std::exchange(wake_fd_, -1));
}

bool Wires::connect(std::uint64_t process) {
  const std::lock_guard lock(mutex_);
  const auto is_to = [process](const auto& entry) { return entry.second.process == process; };
  if (std::ranges::any_of(wires_, is_to)) return true;
  const int fd = open_socket();
  sockaddr_un address{};
  const socklen_t num_bytes = address_of(process, &address);
  if (fd < 0 || ::connect(fd, reinterpret_cast<const sockaddr*>(&address), num_bytes) != 0) {
    if (fd >= 0) ::close(fd);
    return false;
  }
  wires_[fd].process = process;
  wake_thread();
  return true;
}

bool Wires::send(std::uint64_t process, const Frame& frame, Payload payload) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(wires_, [&](const auto& entry) { return entry.second.process == process; });
  if (found == wires_.end()) return false;
  append(&found->second, frame, payload);
  return true;
}

void Wires::answer(int wire, const Frame& frame, Payload payload) {
  const std::lock_guard lock(mutex_);
  if (const auto found = wires_.find(wire); found != wires_.end()) append(&found->second, frame, payload);
}

void Wires::send_to_all(const Frame& frame) {
  const std::lock_guard lock(mutex_);
  for (auto& [fd, wire] : wires_) append(&wire, frame, {});
}

void Wires::append(Wire* wire, const Frame& frame, Payload payload) {
  Frame sent = frame;
  sent.process = process_;
  sent.payload_bytes = payload.size();
  const auto bytes = std::as_bytes(std::span(&sent, 1));
  wire->out.insert(wire->out.end(), bytes.begin(), bytes.end());
  wire->out.insert(wire->out.end(), payload.begin(), payload.end());
  wake_thread();
}

void Wires::wake() {
  const std::lock_guard lock(mutex_);
  wake_thread();
}

void Wires::wake_thread() {
  if (std::exchange(is_woken_, true)) return;
  const std::uint64_t one = 1;
  (void)!::write(wake_fd_, &one, sizeof one);
}

void Wires::wait() {
  std::vector<pollfd> entries{{wake_fd_, POLLIN, 0}, {listener_, POLLIN, 0}};
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [fd, wire] : wires_) {
      entries.push_back({fd, static_cast<short>(wire.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    }
  }
  (void)::poll(entries.data(), entries.size(), -1);
  if (entries[0].revents != 0) {
    const std::lock_guard lock(mutex_);
    is_woken_ = false;
    std::uint64_t count = 0;
    (void)!::read(wake_fd_, &count, sizeof count);
  }
  if (entries[1].revents != 0) accept_all();
  for (std::size_t i = 2; i < entries.size(); ++i) {
    const pollfd& entry = entries[i];
    if (entry.revents == 0) continue;
    const bool is_open = ((entry.revents & POLLOUT) == 0 || write_to(entry.fd)) &&
                         ((entry.revents & (POLLIN | POLLHUP | POLLERR)) == 0 || read_from(entry.fd));
    if (!is_open) drop(entry.fd);
  }
}

void Wires::accept_all() {
  const std::lock_guard lock(mutex_);
  for (int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC); fd >= 0;
       fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) {
    wires_[fd] = {};
  }
}

/// False once the other process has closed the wire.
bool Wires::read_from(int fd) {
  std::array<std::byte, 1 << 16> bytes;
  const ssize_t count = recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  std::unique_lock lock(mutex_);
  std::vector<std::byte>& in = wires_[fd].in;
  lock.unlock();
  in.insert(in.end(), bytes.begin(), bytes.begin() + count);
  std::size_t done = 0;
  while (in.size() - done >= sizeof(Frame)) {
    Frame frame;
    std::memcpy(&frame, in.data() + done, sizeof frame);
    if (in.size() - done - sizeof frame < frame.payload_bytes) break;
    events_.received(fd, frame, Payload(in).subspan(done + sizeof frame, frame.payload_bytes));
    done += sizeof frame + frame.payload_bytes;
  }
  in.erase(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(done));
  return count > 0;
}

bool Wires::write_to(int fd) {
  const std::lock_guard lock(mutex_);
  std::vector<std::byte>& out = wires_[fd].out;
  const ssize_t count = ::send(fd, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  out.erase(out.begin(), out.begin() + count);
  return true;
}

void Wires::drop(int fd) {
  std::uint64_t process = 0;
  {
    const std::lock_guard lock(mutex_);
    process = wires_[fd].process;
    wires_.erase(fd);
  }
  ::close(fd);
  if (process != 0) events_.lost(process);
}

}  // namespace ferry::ucx_card
