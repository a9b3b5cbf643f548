#include "failing_calls.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <new>

namespace ferry::test {
namespace {

struct Plan {
  FailingCall call = FailingCall::kNumCalls;
  int num_left = 0;
  bool has_failed = false;
};

thread_local Plan plan;

bool is_in_ucx(const void* code) {
  Dl_info info{};
  if (dladdr(code, &info) == 0 || info.dli_fname == nullptr) return false;
  return std::string_view(info.dli_fname).find("/libuc") != std::string_view::npos;
}

/// Counts a call from `caller`. True if it has to fail, with errno set.
bool fails(FailingCall call, const void* caller, int error) {
  if (plan.call != call || is_in_ucx(caller) || --plan.num_left != 0) return false;
  plan.has_failed = true;
  errno = error;
  return true;
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

std::string_view name_of(FailingCall call) {
  constexpr std::array<std::string_view, static_cast<std::size_t>(FailingCall::kNumCalls)> kNames = {
      "pthread_create", "new",       "mmap",       "memfd_create", "ftruncate",  "socket", "bind",  "listen",
      "connect",        "accept4",   "getsockopt", "sendmsg",      "recvmsg",    "poll",   "ppoll", "eventfd",
      "epoll_create1",  "epoll_ctl", "fcntl",      "getrandom",    "getifaddrs", "statvfs"};
  return kNames[static_cast<std::size_t>(call)];
}

void fail_call(FailingCall call, int n) { plan = {call, n, false}; }

bool stop_failing() {
  plan.call = FailingCall::kNumCalls;
  return plan.has_failed;
}

}  // namespace ferry::test

using ferry::test::FailingCall;
using ferry::test::fails;
using ferry::test::next;

void* operator new(std::size_t num_bytes) {
  const bool refused = fails(FailingCall::kNew, __builtin_return_address(0), ENOMEM);
  void* const memory = refused ? nullptr : std::malloc(num_bytes > 0 ? num_bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t /*num_bytes*/) noexcept { std::free(memory); }

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) noexcept {
  if (fails(FailingCall::kPthreadCreate, __builtin_return_address(0), EAGAIN)) return EAGAIN;
  static auto* const real = next<decltype(pthread_create)>("pthread_create");
  return real(thread, attributes, body, argument);
}

void* mmap(void* address, std::size_t num_bytes, int protection, int flags, int fd, off_t offset) noexcept {
  if (fails(FailingCall::kMmap, __builtin_return_address(0), ENOMEM)) return MAP_FAILED;
  static auto* const real = next<decltype(mmap)>("mmap");
  return real(address, num_bytes, protection, flags, fd, offset);
}

int memfd_create(const char* name, unsigned flags) noexcept {
  if (fails(FailingCall::kMemfdCreate, __builtin_return_address(0), EMFILE)) return -1;
  static auto* const real = next<decltype(memfd_create)>("memfd_create");
  return real(name, flags);
}

int ftruncate(int fd, off_t num_bytes) noexcept {
  if (fails(FailingCall::kFtruncate, __builtin_return_address(0), ENOSPC)) return -1;
  static auto* const real = next<decltype(ftruncate)>("ftruncate");
  return real(fd, num_bytes);
}

int socket(int domain, int type, int protocol) noexcept {
  if (fails(FailingCall::kSocket, __builtin_return_address(0), EMFILE)) return -1;
  static auto* const real = next<decltype(socket)>("socket");
  return real(domain, type, protocol);
}

int bind(int fd, const sockaddr* address, socklen_t num_bytes) noexcept {
  if (fails(FailingCall::kBind, __builtin_return_address(0), EADDRINUSE)) return -1;
  static auto* const real = next<decltype(bind)>("bind");
  return real(fd, address, num_bytes);
}

int listen(int fd, int backlog) noexcept {
  if (fails(FailingCall::kListen, __builtin_return_address(0), EADDRINUSE)) return -1;
  static auto* const real = next<decltype(listen)>("listen");
  return real(fd, backlog);
}

int connect(int fd, const sockaddr* address, socklen_t num_bytes) {
  if (fails(FailingCall::kConnect, __builtin_return_address(0), ENOMEM)) return -1;
  static auto* const real = next<decltype(connect)>("connect");
  return real(fd, address, num_bytes);
}

int accept4(int fd, sockaddr* address, socklen_t* num_bytes, int flags) {
  if (fails(FailingCall::kAccept4, __builtin_return_address(0), EMFILE)) return -1;
  static auto* const real = next<decltype(accept4)>("accept4");
  return real(fd, address, num_bytes, flags);
}

int getsockopt(int fd, int level, int name, void* value, socklen_t* num_bytes) noexcept {
  if (fails(FailingCall::kGetsockopt, __builtin_return_address(0), ENOBUFS)) return -1;
  static auto* const real = next<decltype(getsockopt)>("getsockopt");
  return real(fd, level, name, value, num_bytes);
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  if (fails(FailingCall::kSendmsg, __builtin_return_address(0), ENOBUFS)) return -1;
  static auto* const real = next<decltype(sendmsg)>("sendmsg");
  return real(fd, message, flags);
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  if (fails(FailingCall::kRecvmsg, __builtin_return_address(0), ENOMEM)) return -1;
  static auto* const real = next<decltype(recvmsg)>("recvmsg");
  return real(fd, message, flags);
}

int poll(pollfd* entries, nfds_t count, int timeout_ms) {
  if (fails(FailingCall::kPoll, __builtin_return_address(0), ENOMEM)) return -1;
  static auto* const real = next<decltype(poll)>("poll");
  return real(entries, count, timeout_ms);
}

int ppoll(pollfd* entries, nfds_t count, const timespec* timeout, const sigset_t* mask) {
  if (fails(FailingCall::kPpoll, __builtin_return_address(0), ENOMEM)) return -1;
  static auto* const real = next<decltype(ppoll)>("ppoll");
  return real(entries, count, timeout, mask);
}

int eventfd(unsigned value, int flags) noexcept {
  if (fails(FailingCall::kEventfd, __builtin_return_address(0), EMFILE)) return -1;
  static auto* const real = next<decltype(eventfd)>("eventfd");
  return real(value, flags);
}

int epoll_create1(int flags) noexcept {
  if (fails(FailingCall::kEpollCreate1, __builtin_return_address(0), EMFILE)) return -1;
  static auto* const real = next<decltype(epoll_create1)>("epoll_create1");
  return real(flags);
}

int epoll_ctl(int fd, int operation, int target, epoll_event* event) noexcept {
  if (fails(FailingCall::kEpollCtl, __builtin_return_address(0), ENOSPC)) return -1;
  static auto* const real = next<decltype(epoll_ctl)>("epoll_ctl");
  return real(fd, operation, target, event);
}

int fcntl(int fd, int command, ...) {
  std::va_list list;
  va_start(list, command);
  void* const argument = va_arg(list, void*);
  va_end(list);
  if (command == F_DUPFD_CLOEXEC && fails(FailingCall::kFcntl, __builtin_return_address(0), EMFILE)) return -1;
  static auto* const real = next<decltype(fcntl)>("fcntl");
  return real(fd, command, argument);
}

ssize_t getrandom(void* bytes, std::size_t count, unsigned flags) {
  if (fails(FailingCall::kGetrandom, __builtin_return_address(0), ENOSYS)) return -1;
  static auto* const real = next<decltype(getrandom)>("getrandom");
  return real(bytes, count, flags);
}

int getifaddrs(ifaddrs** all) noexcept {
  if (fails(FailingCall::kGetifaddrs, __builtin_return_address(0), ENOMEM)) return -1;
  static auto* const real = next<decltype(getifaddrs)>("getifaddrs");
  return real(all);
}

int statvfs(const char* path, struct statvfs* facts) noexcept {
  if (fails(FailingCall::kStatvfs, __builtin_return_address(0), EACCES)) return -1;
  static auto* const real = next<decltype(statvfs)>("statvfs");
  return real(path, facts);
}

}  // extern "C"
