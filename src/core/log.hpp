#ifndef FERRY_CORE_LOG_HPP
#define FERRY_CORE_LOG_HPP

/// Log for the people who run a program: what a group chose when it was created, and the errors that its calls
/// returned. One line each, off unless the variable FERRY_LOG names a level:
///
///   2026-11-29T14:23:10.250117+00:00 info node1 4711 ferry: rank 3/8 create: backend=cuda gpu=3 ...
///
/// Threads and processes may write to one file: a line is one write. Nothing here throws or changes errno. Calls that
/// succeed write nothing.

#include <fmt/format.h>

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "ferry/status.hpp"

namespace ferry {

inline constexpr const char* kLogVariable = "FERRY_LOG";
inline constexpr const char* kLogFileVariable = "FERRY_LOG_FILE";

enum class LogLevel { kOff, kError, kWarn, kInfo, kDebug };

/// Rank that a line is about.
struct LogRank {
  int rank = 0;
  int num_ranks = 1;
};

/// Reads the two variables, and opens the file if they have changed since the last call, or if the process has forked.
/// @errors kInvalidArgument: a wrong value, or a file that cannot be opened; the log stays as it was
Status open_log();

/// Whether lines of this level are written.
bool logs(LogLevel level) noexcept;

/// Writes a line if its level is written. Control characters become blanks, and long lines are cut.
void write_log(LogLevel level, const LogRank& rank, std::string_view text) noexcept;

/// As write_log, formatted only if the line is written.
template <typename... Args>
void log_line(LogLevel level, const LogRank& rank, fmt::format_string<Args...> format, Args&&... args) noexcept {
  if (!logs(level)) return;
  try {
    write_log(level, rank, fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {  // out of memory: the caller goes on without the line
  }
}

/// Logs an error that a call returns: as a warning if it changed nothing, else as an error.
void log_error(const LogRank& rank, const Status& status) noexcept;

/// Errors of a group's calls. A broken group returns one error again and again, which is logged once.
class ErrorLog {
 public:
  explicit ErrorLog(LogRank rank) : rank_(rank) {}
  void note(const Status& status) noexcept;

 private:
  const LogRank rank_;
  std::mutex mutex_;  // of last_: calls that may run at the same time as others fail too
  std::string last_;
};

/// Logs the duration of a part of a creation when it ends, at level debug.
class LogPhase {
 public:
  LogPhase(LogRank rank, std::string_view name) : rank_(rank), name_(name), begin_(std::chrono::steady_clock::now()) {}
  ~LogPhase() {
    const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - begin_;
    log_line(LogLevel::kDebug, rank_, "{}: took_ms={:.3f}", name_, passed.count());
  }
  LogPhase(const LogPhase&) = delete;
  LogPhase& operator=(const LogPhase&) = delete;

 private:
  LogRank rank_;
  std::string_view name_;  // a literal
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace ferry

#endif  // FERRY_CORE_LOG_HPP
