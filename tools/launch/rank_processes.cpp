#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "launch/clock.hpp"
#include "launch/meeting_point.hpp"
#include "launch/ranks.hpp"

namespace ferry::launch {

namespace {

/// While it lives, this thread receives the ends of children, and requests to end this process, through `fd`.
class Signals {
 public:
  static Result<Signals> open() {
    Signals signals;
    sigset_t wanted;
    sigemptyset(&wanted);
    for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&wanted, signal);
    signals.fd_ = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals.fd_ < 0) {
      return Status(ErrorCode::kSystem, fmt::format("cannot make a signal descriptor: {}", std::strerror(errno)));
    }
    sigprocmask(SIG_BLOCK, &wanted, &signals.before_);
    return signals;
  }
  Signals(Signals&& other) noexcept : fd_(std::exchange(other.fd_, -1)), before_(other.before_) {}
  Signals& operator=(Signals&&) = delete;
  ~Signals() { restore(); }

  int fd() const { return fd_; }
  /// Next signal; 0 if none is pending.
  int next() const {
    signalfd_siginfo info{};
    return read(fd_, &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }
  void restore() {
    if (fd_ < 0) return;
    sigprocmask(SIG_SETMASK, &before_, nullptr);
    close(std::exchange(fd_, -1));
  }

 private:
  Signals() = default;
  int fd_ = -1;
  sigset_t before_{};
};

/// Ends this process as `signal` does by default, so that a shell sees the cause.
[[noreturn]] void die_by(int signal) {
  std::signal(signal, SIG_DFL);
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, signal);
  raise(signal);
  sigprocmask(SIG_UNBLOCK, &only, nullptr);
  constexpr int kSignalExitBase = 128;  // exit code that shells report for a death by signal, minus the signal
  _exit(kSignalExitBase + signal);
}

std::int64_t add_without_overflow(std::int64_t time_ns, std::int64_t duration_ns) {
  return duration_ns > kNoTimeout - time_ns ? kNoTimeout : time_ns + duration_ns;
}

/// Processes of one run.
class Family {
 public:
  explicit Family(const RankProcesses& run)
      : run_(run),
        ends_(static_cast<std::size_t>(run.num_ranks)),
        deadline_ns_(add_without_overflow(now_ns(), run.run_timeout_ns)) {}

  Status start(const RankMain& rank_main, const MeetingPoint& meeting, Signals& signals) {
    for (int rank = 0; rank < run_.num_ranks; ++rank) {
      auto child = ChildProcess::start([&](const ReportPipe& pipe) {
        signals.restore();
        for (const ChildProcess& sibling : children_) close(sibling.report_fd());
        if (rank != 0) meeting.close_listener();
        const auto options = meeting.options(rank, run_.num_ranks, run_.bootstrap_timeout_ns);
        const std::string report = rank_main(rank, create_tcp_bootstrap(options));
        return pipe.send(report) && report.empty() ? 0 : 1;
      });
      if (!child) {
        return {child.status().code(), fmt::format("cannot start rank {} of {}: {}, or use fewer ranks", rank,
                                                   run_.num_ranks, child.status().message())};
      }
      children_.push_back(std::move(*child));
    }
    return {};
  }

  std::vector<RankEnd> wait(const Signals& signals) {
    reap_ended();  // starting a child discards a pending SIGCHLD of earlier children
    while (num_running() > 0) {
      const std::int64_t left_ns = std::min(deadline_ns_, give_up_ns_) - now_ns();
      if (left_ns <= 0) break;
      wait_for_news(signals.fd(), left_ns);
      while (const int signal = signals.next()) {
        if (signal == SIGCHLD) continue;
        children_.clear();
        die_by(signal);
      }
      for (ChildProcess& child : children_) child.drain_report();
      reap_ended();
    }
    end_the_rest();
    return std::move(ends_);
  }

 private:
  std::size_t num_running() const {
    return static_cast<std::size_t>(
        std::count_if(children_.begin(), children_.end(), [](const auto& child) { return child.pid() > 0; }));
  }

  /// Returns on a signal, on a piece of a report, or at the deadline.
  void wait_for_news(int signal_fd, std::int64_t left_ns) const {
    std::vector<pollfd> polled = {{signal_fd, POLLIN, 0}};
    for (const ChildProcess& child : children_) {
      if (child.report_fd() >= 0) polled.push_back({child.report_fd(), POLLIN, 0});
    }
    constexpr std::int64_t kMaxWaitNs = 3600 * kNsPerSecond;
    const std::int64_t wait_ns = std::min(left_ns, kMaxWaitNs);
    const timespec timeout{static_cast<time_t>(wait_ns / kNsPerSecond), static_cast<long>(wait_ns % kNsPerSecond)};
    ppoll(polled.data(), polled.size(), &timeout, nullptr);
  }

  void reap_ended() {
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      if (children_[rank].pid() < 0) continue;
      const auto end = children_[rank].poll_end();
      if (!end) continue;
      ends_[rank].process = *end;
      ends_[rank].report = children_[rank].report();
      if (!run_.patience_ns) continue;
      give_up_ns_ = add_without_overflow(now_ns(), run_.patience_ns(static_cast<int>(rank), ends_[rank]));
    }
  }

  void end_the_rest() {
    const bool is_late = now_ns() >= deadline_ns_;
    for (const ChildProcess& child : children_) child.send_signal(SIGKILL);
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      if (children_[rank].pid() < 0) continue;
      ends_[rank].process = children_[rank].kill();
      ends_[rank].report = children_[rank].report();
      ends_[rank].timed_out = is_late;
      ends_[rank].stopped = !is_late;
    }
  }

  const RankProcesses& run_;
  std::vector<RankEnd> ends_;
  std::vector<ChildProcess> children_;
  std::int64_t deadline_ns_;
  std::int64_t give_up_ns_ = kNoTimeout;
};

}  // namespace

Result<std::vector<RankEnd>> run_rank_processes(const RankProcesses& run, const RankMain& rank_main) {
  auto signals = Signals::open();
  if (!signals) return signals.status();
  auto meeting = MeetingPoint::open();
  if (!meeting) return meeting.status();
  Family family(run);
  const Status status = family.start(rank_main, *meeting, *signals);
  meeting->close_listener();
  if (!status) return status;
  return family.wait(*signals);
}

}  // namespace ferry::launch
