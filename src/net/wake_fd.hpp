#ifndef FERRY_NET_WAKE_FD_HPP
#define FERRY_NET_WAKE_FD_HPP

/// Descriptor with which one thread wakes another from poll(2).

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace ferry::net {

class WakeFd {
 public:
  WakeFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), error_(fd_ < 0 ? errno : 0) {}
  WakeFd(const WakeFd&) = delete;
  WakeFd& operator=(const WakeFd&) = delete;
  ~WakeFd() {
    if (fd_ >= 0) close(fd_);
  }

  /// -1 if it could not be created; error() is then the errno.
  int get() const { return fd_; }
  int error() const { return error_; }

  /// Makes the descriptor readable until the next clear(). Any thread.
  void signal() const {
    const std::uint64_t one = 1;
    // A write fails only if the counter is full, and then the descriptor is readable already.
    [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);
  }
  void clear() const {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fd_, &count, sizeof count);
  }

 private:
  int fd_;
  int error_;
};

}  // namespace ferry::net

#endif  // FERRY_NET_WAKE_FD_HPP
