#include "common/forked_ranks.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace ferry::tools {

namespace {

/// Room for the sentence of a failing rank; longer ones are cut.
constexpr std::size_t kMaxMessageBytes = 2048;
/// Parts of the area start on their own cache lines (64 bytes on x86-64 and most AArch64; 128 on some of the latter).
constexpr std::size_t kPartAlignment = 128;

/// How a rank ended, written by the rank and read by the parent once it has reaped it.
struct RankEnd {
  std::int32_t code;
  std::int32_t peer;
  std::array<char, kMaxMessageBytes> message;
};

std::size_t round_up(std::size_t bytes) { return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; }

/// [ barrier | end of rank 0 … R-1 | result of rank 0 … R-1 ]
struct AreaLayout {
  explicit AreaLayout(const RunOptions& options)
      : num_ranks(static_cast<std::size_t>(options.plan.num_ranks)), result_bytes(options.result_bytes) {}
  std::size_t end_offset(std::size_t rank) const {
    return round_up(sizeof(SharedBarrier)) + rank * round_up(sizeof(RankEnd));
  }
  std::size_t result_offset(std::size_t rank) const { return end_offset(num_ranks) + rank * round_up(result_bytes); }
  std::size_t total_bytes() const { return result_offset(num_ranks); }

  std::size_t num_ranks;
  std::size_t result_bytes;
};

RankEnd* rank_end(const SharedArea& area, const RunOptions& options, int rank) {
  const AreaLayout layout(options);
  return reinterpret_cast<RankEnd*>(area.bytes().data() + layout.end_offset(static_cast<std::size_t>(rank)));
}

Status system_error(const char* what) {
  return {ErrorCode::kSystem, fmt::format("{}: {}", what, std::strerror(errno))};
}

/// A socket that listens on a free port of the loopback interface.
struct Listener {
  int fd = -1;
  std::uint16_t port = 0;
};

Result<Listener> listen_on_loopback(int backlog) {
  Listener listener;
  listener.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener.fd < 0) return system_error("cannot make a TCP socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t address_bytes = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener.fd, generic, address_bytes) != 0 || listen(listener.fd, backlog) != 0 ||
      getsockname(listener.fd, generic, &address_bytes) != 0) {
    const Status status = system_error("cannot listen on 127.0.0.1; bring the loopback interface up");
    close(listener.fd);
    return status;
  }
  listener.port = ntohs(address.sin_port);
  return listener;
}

/// 256 random bits in hexadecimal, known to the parent and its children only.
Result<std::string> make_secret() {
  std::array<unsigned char, 32> random{};
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    return system_error("cannot get random bytes for the group's secret");
  }
  std::string secret;
  for (unsigned char byte : random) secret += fmt::format("{:02x}", byte);
  return secret;
}

sigset_t parent_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, signal);
  return signals;
}

/// The children of one run. Whatever happens, none of them outlives this object, and none stays a zombie.
class Children {
 public:
  Children(const RunOptions& options, const SharedArea& area) : options_(options), area_(area) {}
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;
  ~Children() { kill_and_reap(); }

  void add(pid_t pid) { pids_.push_back(pid); }

  /// Wait for all; the Status of the failure that best explains the others.
  Status wait(const sigset_t& signals) {
    while (num_running() > 0 && failure_.cause != Cause::kDied && failure_.cause != Cause::kOwn) {
      siginfo_t info{};
      // A rank that only lost a peer points at another one, whose end follows within this time.
      const timespec grace{0, kGraceNs};
      const int signal =
          failure_.cause == Cause::kNone ? sigwaitinfo(&signals, &info) : sigtimedwait(&signals, &info, &grace);
      if (signal < 0 && errno == EAGAIN) break;
      if (signal > 0 && signal != SIGCHLD) end_by_signal(signal);
      reap_ended();
    }
    return failure_.status;
  }

 private:
  static constexpr pid_t kReaped = -1;
  static constexpr long kGraceNs = 500'000'000;

  /// Why a rank failed, in the order of what explains most.
  enum class Cause { kNone, kPeer, kOwn, kDied };
  struct Failure {
    Cause cause = Cause::kNone;
    Status status;
  };

  std::size_t num_running() const {
    return pids_.size() - static_cast<std::size_t>(std::count(pids_.begin(), pids_.end(), kReaped));
  }

  void reap_ended() {
    for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] == kReaped) continue;
      int wait_status = 0;
      if (waitpid(pids_[rank], &wait_status, WNOHANG) != pids_[rank]) continue;
      pids_[rank] = kReaped;
      Status status = describe_end(static_cast<int>(rank), wait_status);
      if (status) continue;
      const bool of_peer = status.code() == ErrorCode::kPeerLost || status.code() == ErrorCode::kTimeout;
      const Cause cause = WIFSIGNALED(wait_status) ? Cause::kDied : of_peer ? Cause::kPeer : Cause::kOwn;
      if (cause > failure_.cause) failure_ = {cause, std::move(status)};
    }
  }

  Status describe_end(int rank, int wait_status) const {
    if (WIFSIGNALED(wait_status)) {
      const int signal = WTERMSIG(wait_status);
      const char* hint =
          signal == SIGKILL ? "; if nobody killed it, the machine ran out of memory: use fewer tokens" : "";
      return {ErrorCode::kPeerLost,
              fmt::format("rank {} was killed by signal {} ({}){}", rank, signal, strsignal(signal), hint), rank};
    }
    if (WEXITSTATUS(wait_status) == 0) return {};
    const RankEnd* end = rank_end(area_, options_, rank);
    if (end->code == 0) {
      return {ErrorCode::kPeerLost, fmt::format("rank {} exited with code {}", rank, WEXITSTATUS(wait_status)), rank};
    }
    return {static_cast<ErrorCode>(end->code), fmt::format("rank {} failed: {}", rank, end->message.data()), rank};
  }

  void kill_and_reap() {
    for (pid_t pid : pids_) {
      if (pid != kReaped) kill(pid, SIGKILL);
    }
    for (pid_t& pid : pids_) {
      if (pid == kReaped) continue;
      while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
      }
      pid = kReaped;
    }
  }

  /// Ends the ranks, then this process by the same signal, so that a shell sees how it ended.
  [[noreturn]] void end_by_signal(int signal) {
    kill_and_reap();
    std::signal(signal, SIG_DFL);
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, signal);
    raise(signal);
    sigprocmask(SIG_UNBLOCK, &only, nullptr);
    constexpr int kSignalExitBase = 128;  // what shells report for a death by signal
    _exit(kSignalExitBase + signal);
  }

  const RunOptions& options_;
  const SharedArea& area_;
  std::vector<pid_t> pids_;
  Failure failure_;
};

/// Blocks the signals that the parent waits for, and restores the mask at the end of the run.
class SignalBlock {
 public:
  explicit SignalBlock(const sigset_t& signals) { sigprocmask(SIG_BLOCK, &signals, &before_); }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;
  ~SignalBlock() { restore(); }
  void restore() const { sigprocmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

struct RankStart {
  const RunOptions& options;
  const std::function<Status(RankContext&)>& rank_main;
  const SharedArea& area;
  const std::string& secret;
  Listener listener;
};

Status run_as_rank(const RankStart& start, int rank) {
  TcpBootstrapOptions bootstrap_options;
  bootstrap_options.rank = rank;
  bootstrap_options.num_ranks = start.options.plan.num_ranks;
  bootstrap_options.port = start.listener.port;
  bootstrap_options.secret = start.secret;
  bootstrap_options.timeout_ns = start.options.timeout_ns;
  if (rank == 0) {
    bootstrap_options.listen_fd = start.listener.fd;
  } else {
    close(start.listener.fd);
  }
  auto bootstrap = create_tcp_bootstrap(bootstrap_options);
  if (!bootstrap) return bootstrap.status();
  auto* barrier = reinterpret_cast<SharedBarrier*>(start.area.bytes().data());
  RankContext context(*bootstrap, forked_rank_result(start.area, start.options, rank), barrier,
                      start.options.timeout_ns);
  return start.rank_main(context);
}

/// Never returns: a rank must not run the parent's destructors or print what the parent had buffered.
[[noreturn]] void rank_process(const RankStart& start, int rank, pid_t parent, const SignalBlock& block) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // the parent died before the line above
  block.restore();
  Status status;
  try {
    status = run_as_rank(start, rank);
  } catch (const std::bad_alloc&) {
    status =
        Status(ErrorCode::kSystem, "the machine is out of memory; use fewer ranks, fewer tokens or a smaller layer");
  } catch (const std::exception& error) {
    status = Status(ErrorCode::kInternal, error.what());
  }
  if (!status) {
    RankEnd* end = rank_end(start.area, start.options, rank);
    end->peer = status.peer();
    const std::string message = status.to_string();
    message.copy(end->message.data(), kMaxMessageBytes - 1);
    end->code = static_cast<std::int32_t>(status.code());
  }
  std::fflush(stderr);
  _exit(status ? 0 : 1);
}

}  // namespace

std::span<std::byte> forked_rank_result(const SharedArea& area, const RunOptions& options, int rank) {
  const AreaLayout layout(options);
  return area.bytes().subspan(layout.result_offset(static_cast<std::size_t>(rank)), options.result_bytes);
}

Result<SharedArea> run_forked_ranks(const RunOptions& options, const std::function<Status(RankContext&)>& rank_main) {
  auto area = SharedArea::map(AreaLayout(options).total_bytes());
  if (!area) return area.status();
  new (area->bytes().data()) SharedBarrier();
  auto secret = make_secret();
  if (!secret) return secret.status();
  auto listener = listen_on_loopback(options.plan.num_ranks);
  if (!listener) return listener.status();

  const sigset_t signals = parent_signals();
  const SignalBlock block(signals);
  std::signal(SIGCHLD, SIG_DFL);  // whoever started us may have ignored it, which would reap the ranks unseen
  const pid_t parent = getpid();
  const RankStart start{options, rank_main, *area, *secret, *listener};
  std::fflush(nullptr);

  Status status;
  {
    Children children(options, *area);
    for (int rank = 0; rank < options.plan.num_ranks && status; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) rank_process(start, rank, parent, block);
      if (pid < 0) {
        status = system_error("cannot fork a rank; use fewer ranks or raise the limit on processes (ulimit -u)");
      } else {
        children.add(pid);
      }
    }
    close(listener->fd);
    if (status) status = children.wait(signals);
  }
  if (!status) return status;
  return std::move(*area);
}

}  // namespace ferry::tools
