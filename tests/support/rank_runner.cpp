#include "support/rank_runner.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <thread>

#include "support/loopback_listener.hpp"

namespace ferry::test {
namespace {

using Clock = std::chrono::steady_clock;

/// A broken backend fails at every element; the first few say what there is to say.
constexpr std::size_t kMaxFailuresPerRank = 8;

void run_body(const RankBody& body, RankContext& context) {
  try {
    body(context);
  } catch (const std::exception& error) {
    context.fail(fmt::format("threw: {}", error.what()));
  } catch (...) {
    context.fail("threw something that is no std::exception");
  }
}

std::string named(int rank, std::string_view text) { return fmt::format("rank {}: {}", rank, text); }

// ---- threads ----

std::vector<std::string> run_threads(const RankRun& run, const RankBody& body) {
  auto bootstraps = create_in_process_bootstraps(run.num_ranks);
  if (!bootstraps.ok()) return {bootstraps.status().to_string()};
  std::vector<RankContext> contexts;
  for (int rank = 0; rank < run.num_ranks; ++rank)
    contexts.emplace_back(rank, run.num_ranks, std::move((*bootstraps)[static_cast<std::size_t>(rank)]));

  std::mutex mutex;
  std::condition_variable finished;
  std::vector<int> running(static_cast<std::size_t>(run.num_ranks), 1);
  std::vector<std::thread> threads;
  for (RankContext& context : contexts) {
    threads.emplace_back([&] {
      run_body(body, context);
      const std::lock_guard lock(mutex);
      running[static_cast<std::size_t>(context.rank())] = 0;
      finished.notify_one();
    });
  }
  {
    std::unique_lock lock(mutex);
    const auto all_done = [&] { return std::count(running.begin(), running.end(), 1) == 0; };
    if (!finished.wait_for(lock, run.deadline, all_done)) {
      std::string text = fmt::format("watchdog: after {} s these ranks still run:", run.deadline.count());
      for (std::size_t rank = 0; rank < running.size(); ++rank)
        if (running[rank] != 0) text += fmt::format(" {}", rank);
      std::fprintf(stderr, "%s\n", text.c_str());
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();

  std::vector<std::string> failures;
  for (const RankContext& context : contexts)
    for (const std::string& text : context.failures()) failures.push_back(named(context.rank(), text));
  return failures;
}

// ---- processes ----

struct Child {
  int rank = 0;
  pid_t pid = -1;
  int pipe_fd = -1;
  std::string report;
};

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

/// Failures travel as text, each ended by a zero byte.
[[noreturn]] void run_child(int rank, const RankRun& run, const RankBody& body, TcpBootstrapOptions options,
                            int report_fd) {
  std::string report;
  options.rank = rank;
  if (rank != 0) {
    close(options.listen_fd);
    options.listen_fd = -1;
  }
  auto bootstrap = create_tcp_bootstrap(options);
  if (!bootstrap.ok()) {
    report = bootstrap.status().to_string() + '\0';
  } else {
    RankContext context(rank, run.num_ranks, std::move(*bootstrap));
    run_body(body, context);
    for (const std::string& text : context.failures()) report += text + '\0';
  }
  if (::testing::Test::HasFailure()) report += std::string("a GoogleTest assertion failed in this process") + '\0';
  const bool sent = write_all(report_fd, report);
  std::fflush(nullptr);
  _exit(sent && report.empty() ? 0 : 1);
}

/// Reads what the children say until all have closed their pipes. False when the deadline came first.
bool read_reports(std::vector<Child>& children, Clock::time_point deadline) {
  for (;;) {
    std::vector<pollfd> polls;
    std::vector<Child*> owners;
    for (Child& child : children) {
      if (child.pipe_fd < 0) continue;
      polls.push_back({child.pipe_fd, POLLIN, 0});
      owners.push_back(&child);
    }
    if (polls.empty()) return true;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    if (poll(polls.data(), polls.size(), static_cast<int>(left)) < 0 && errno != EINTR) return false;
    for (std::size_t i = 0; i < polls.size(); ++i) {
      if (polls[i].revents == 0) continue;
      std::array<char, 4096> buffer;
      const ssize_t count = read(polls[i].fd, buffer.data(), buffer.size());
      if (count > 0) {
        owners[i]->report.append(buffer.data(), static_cast<std::size_t>(count));
      } else if (count == 0 || errno != EINTR) {
        close(owners[i]->pipe_fd);
        owners[i]->pipe_fd = -1;
      }
    }
  }
}

void add_child_failures(const Child& child, int wait_status, bool hung, std::vector<std::string>& failures) {
  std::size_t begin = 0;
  std::size_t num_failures = 0;
  for (std::size_t end = 0; (end = child.report.find('\0', begin)) != std::string::npos; begin = end + 1) {
    failures.push_back(named(child.rank, child.report.substr(begin, end - begin)));
    ++num_failures;
  }
  if (hung) {
    failures.push_back(named(child.rank, "watchdog: still ran at the deadline and was killed"));
  } else if (WIFSIGNALED(wait_status)) {
    failures.push_back(named(child.rank, fmt::format("died of signal {}", WTERMSIG(wait_status))));
  } else if (WEXITSTATUS(wait_status) != 0 && num_failures == 0) {
    failures.push_back(named(child.rank, fmt::format("exited with {}", WEXITSTATUS(wait_status))));
  }
}

/// Fork copies the calling thread alone; another one's locks would stay locked for ever in the child.
bool is_single_threaded() {
#ifdef __SANITIZE_THREAD__
  return true;  // the sanitizer runs a thread of its own, which knows about fork
#else
  std::error_code error;
  const std::filesystem::directory_iterator tasks("/proc/self/task", error);
  return error || std::distance(begin(tasks), end(tasks)) == 1;
#endif
}

std::vector<std::string> run_processes(const RankRun& run, const RankBody& body) {
  if (!is_single_threaded()) return {"this process has several threads: it cannot fork ranks"};
  TcpBootstrapOptions options;
  options.num_ranks = run.num_ranks;
  options.timeout_ns = std::chrono::nanoseconds(run.deadline).count();
  auto secret = make_random_secret();
  if (!secret.ok()) return {secret.status().to_string()};
  options.secret = *secret;
  auto listener = listen_on_loopback(&options.port);
  if (!listener.ok()) return {listener.status().to_string()};
  options.listen_fd = *listener;

  const Clock::time_point deadline = Clock::now() + run.deadline;
  std::vector<std::string> failures;
  std::vector<Child> children;
  std::fflush(nullptr);
  for (int rank = 0; rank < run.num_ranks; ++rank) {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) {
      failures.push_back(named(rank, fmt::format("pipe2: {}", std::strerror(errno))));
      break;
    }
    const pid_t pid = fork();
    if (pid == 0) {
      close(ends[0]);
      // A sibling's pipe held open here would hide that sibling's end.
      for (const Child& sibling : children) close(sibling.pipe_fd);
      run_child(rank, run, body, options, ends[1]);
    }
    close(ends[1]);
    if (pid < 0) {
      close(ends[0]);
      failures.push_back(named(rank, fmt::format("fork: {}", std::strerror(errno))));
      break;
    }
    children.push_back({rank, pid, ends[0], {}});
  }
  close(options.listen_fd);

  const bool in_time = failures.empty() && read_reports(children, deadline);
  for (Child& child : children) {
    const bool hung = !in_time && child.pipe_fd >= 0;
    if (hung) kill(child.pid, SIGKILL);
    if (child.pipe_fd >= 0) close(child.pipe_fd);
    int wait_status = 0;
    while (waitpid(child.pid, &wait_status, 0) < 0 && errno == EINTR) {
    }
    add_child_failures(child, wait_status, hung, failures);
  }
  return failures;
}

}  // namespace

void RankContext::fail(std::string text) {
  if (failures_.size() < kMaxFailuresPerRank) failures_.push_back(std::move(text));
}

bool RankContext::expect(bool held, std::string_view what) {
  if (!held) fail(std::string(what));
  return held;
}

bool RankContext::expect_ok(const Status& status, std::string_view what) {
  if (!status.ok()) fail(fmt::format("{}: {}", what, status.to_string()));
  return status.ok();
}

bool RankContext::expect_code(const Status& status, ErrorCode code, std::string_view what) {
  if (status.code() != code)
    fail(fmt::format("{}: expected {}, got {}", what, ferry::to_string(code), status.to_string()));
  return status.code() == code;
}

std::vector<std::string> collect_rank_failures(const RankRun& run, const RankBody& body) {
  return run.kind == RankKind::kThreads ? run_threads(run, body) : run_processes(run, body);
}

void run_ranks(const RankRun& run, const RankBody& body) {
  for (const std::string& text : collect_rank_failures(run, body)) ADD_FAILURE() << text;
}

}  // namespace ferry::test
