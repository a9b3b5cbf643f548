#include <arpa/inet.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "doctor/finding.hpp"

namespace ferry::tools {

namespace {

/// Closes its descriptor when destroyed.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }

 private:
  int fd_;
};

Finding worked(const char* name, const char* use) { return {Health::kOk, name, fmt::format("works ({})", use), ""}; }

Finding refused(const char* name, const char* advice) {
  return {Health::kMissing, name, fmt::format("refused: {}", std::strerror(errno)), advice};
}

Descriptor make_memfd() { return Descriptor(static_cast<int>(syscall(SYS_memfd_create, "ferry-doctor", 0U))); }

Finding try_memfd() {
  constexpr const char* kName = "memfd_create";
  const Descriptor memory = make_memfd();
  const long page_bytes = sysconf(_SC_PAGESIZE);
  if (!memory.ok() || ftruncate(memory.get(), page_bytes) != 0) {
    return refused(kName, "rank processes cannot share memory; allow it in the container's seccomp profile");
  }
  void* mapped =
      mmap(nullptr, static_cast<std::size_t>(page_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) return refused(kName, "shared mappings are forbidden here; loosen the sandbox");
  munmap(mapped, static_cast<std::size_t>(page_bytes));
  return worked(kName, "shared memory without a name");
}

Finding try_futex() {
  constexpr const char* kName = "futex";
  std::uint32_t word = 0;
  // The word is not 1, so a working futex returns EAGAIN at once.
  const long result = syscall(SYS_futex, &word, FUTEX_WAIT, 1U, nullptr, nullptr, 0);
  if (result == -1 && errno == EAGAIN) return worked(kName, "waiting ranks sleep");
  return refused(kName, "waiting ranks cannot sleep; allow futex in the sandbox");
}

Finding try_pidfd() {
  constexpr const char* kName = "pidfd_open";
  const Descriptor process(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0U)));
  if (process.ok()) return worked(kName, "a dead rank is detected at once");
  Finding finding = refused(kName, "a dead rank is noticed later; needs Linux 5.3 and a sandbox that allows it");
  finding.health = Health::kWarn;
  return finding;
}

/// Sends a descriptor over a Unix socket to this process itself, as ranks send each other their memory.
Finding try_descriptor_passing() {
  constexpr const char* kName = "unix sockets";
  constexpr const char* kAdvice = "rank processes cannot hand each other memory; allow AF_UNIX in the sandbox";
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return refused(kName, kAdvice);
  const Descriptor left(ends[0]);
  const Descriptor right(ends[1]);
  const Descriptor memory = make_memfd();

  char byte = 0;
  iovec payload{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int sent_fd = memory.ok() ? memory.get() : left.get();
  std::memcpy(CMSG_DATA(header), &sent_fd, sizeof sent_fd);
  if (sendmsg(left.get(), &message, MSG_NOSIGNAL) != 1) return refused(kName, kAdvice);
  control.fill(0);
  if (recvmsg(right.get(), &message, MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&message) == nullptr) {
    return refused(kName, kAdvice);
  }
  int received_fd = -1;
  std::memcpy(&received_fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof received_fd);
  const Descriptor received(received_fd);
  return received.ok() ? worked(kName, "memory is handed over") : refused(kName, kAdvice);
}

Finding try_loopback() {
  constexpr const char* kName = "loopback TCP";
  constexpr const char* kAdvice = "ranks cannot find each other; bring it up: ip link set lo up";
  constexpr int kPatienceMs = 2000;
  const Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const Descriptor client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t address_bytes = sizeof address;
  if (!listener.ok() || !client.ok() || bind(listener.get(), generic, address_bytes) != 0 ||
      listen(listener.get(), 1) != 0 || getsockname(listener.get(), generic, &address_bytes) != 0) {
    return refused(kName, kAdvice);
  }
  if (connect(client.get(), generic, address_bytes) != 0 && errno != EINPROGRESS) return refused(kName, kAdvice);
  pollfd arrival{listener.get(), POLLIN, 0};
  if (poll(&arrival, 1, kPatienceMs) != 1) {
    errno = ETIMEDOUT;
    return refused(kName, kAdvice);
  }
  return worked(kName, "the bootstrap");
}

}  // namespace

std::vector<Finding> examine_kernel() {
  return {try_memfd(), try_futex(), try_pidfd(), try_descriptor_passing(), try_loopback()};
}

}  // namespace ferry::tools
