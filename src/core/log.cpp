#include "core/log.hpp"

// The only file that includes spdlog, because its headers take longer to compile than most files of this library. With
// a {fmt} of its own it would clash with the library's.
#define SPDLOG_HEADER_ONLY
#define SPDLOG_FMT_EXTERNAL
#define SPDLOG_LEVEL_NAMES \
  { "trace", "debug", "info", "warn", "error", "critical", "off" }
#include <fcntl.h>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/forks.hpp"
#include "core/unique_fd.hpp"

namespace ferry {
namespace {

constexpr std::array<std::string_view, 5> kLevelNames = {"off", "error", "warn", "info", "debug"};

/// Keeps errno, which callers of a failed function may not have read yet.
class KeptErrno {
 public:
  KeptErrno() = default;
  ~KeptErrno() { errno = value_; }
  KeptErrno(const KeptErrno&) = delete;
  KeptErrno& operator=(const KeptErrno&) = delete;

 private:
  int value_ = errno;
};

/// Writes each line at once, without a buffer that a forked process would write again. Writes of at most PIPE_BUF bytes
/// do not mix with others, to pipes (pipe(7)) or to files opened for appending.
class LineSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  /// `file`: none for standard error.
  explicit LineSink(UniqueFd file) : file_(std::move(file)) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    std::string_view bytes(line.data(), line.size());
    if (line.size() > PIPE_BUF) {
      line.resize(PIPE_BUF);
      constexpr std::string_view kCut = "...\n";
      std::copy(kCut.begin(), kCut.end(), line.data() + line.size() - kCut.size());
      bytes = {line.data(), line.size()};
    }
    const int fd = file_.valid() ? file_.get() : STDERR_FILENO;
    while (::write(fd, bytes.data(), bytes.size()) < 0 && errno == EINTR) {
    }
  }
  void flush_() override {}

 private:
  UniqueFd file_;
};

/// Values of the variables; empty if they are not set.
struct Settings {
  std::string level;
  std::string file;
  bool operator==(const Settings&) const = default;
};

/// An open log. Never freed, since other threads may be writing to it.
struct Log {
  Settings settings;
  LogLevel level = LogLevel::kOff;
  int num_forks = 0;
  std::unique_ptr<spdlog::logger> logger;  ///< null: the level is kOff
  const Log* before = nullptr;
};

std::atomic<const Log*> current{nullptr};

std::string value_of(const char* variable) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? std::string() : std::string(value);
}

Status refuse(std::string_view variable, std::string_view value, std::string_view expected) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("Group::create: the variable {} is \"{}\", expected {}", variable, value, expected));
}

Result<LogLevel> level_of(const std::string& name) {
  if (name.empty()) return LogLevel::kOff;
  const auto found = std::find(kLevelNames.begin(), kLevelNames.end(), name);
  if (found != kLevelNames.end()) return static_cast<LogLevel>(found - kLevelNames.begin());
  return refuse(kLogVariable, name, "off, error, warn, info or debug");
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return gethostname(name.data(), HOST_NAME_MAX) == 0 && name[0] != '\0' ? std::string(name.data()) : "-";
}

/// Name of the file with this process and host in it.
Result<std::string> expand(const std::string& pattern) {
  std::string path;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '%') {
      path += pattern[i];
      continue;
    }
    const char kind = ++i < pattern.size() ? pattern[i] : '\0';
    if (kind == 'p') {
      path += std::to_string(getpid());
    } else if (kind == 'h') {
      path += host_name();
    } else if (kind == '%') {
      path += '%';
    } else {
      return refuse(kLogFileVariable, pattern,
                    "the path of a file, with %p for the process, %h for the host, %% for %");
    }
  }
  return path;
}

Result<UniqueFd> open_file(const std::string& pattern) {
  if (pattern.empty()) return UniqueFd();
  const Result<std::string> path = expand(pattern);
  if (!path.ok()) return path.status();
  constexpr int kMode = 0644;
  UniqueFd file(::open(path->c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, kMode));
  if (file.valid()) return file;
  const int error = errno;
  return refuse(kLogFileVariable, pattern,
                fmt::format("a file that can be written: opening {} failed: {}", *path, std::strerror(error)));
}

std::unique_ptr<spdlog::logger> make_logger(UniqueFd file) {
  auto sink = std::make_shared<LineSink>(std::move(file));
  std::string host = host_name();
  for (std::size_t at = 0; (at = host.find('%', at)) != std::string::npos; at += 2) host.insert(at, 1, '%');
  sink->set_formatter(
      std::make_unique<spdlog::pattern_formatter>(fmt::format("%Y-%m-%dT%H:%M:%S.%f%z %l {} %P ferry: %v", host)));
  auto logger = std::make_unique<spdlog::logger>("ferry", std::move(sink));
  logger->set_level(spdlog::level::debug);
  logger->set_error_handler([](const std::string&) {});  // spdlog's own prints to standard error
  return logger;
}

bool is_current(const Log* log, const Settings& settings) {
  return log != nullptr && log->settings == settings && log->num_forks == num_forks();
}

Status use(Settings settings) {
  const Result<LogLevel> level = level_of(settings.level);
  if (!level.ok()) return level.status();
  const Log* before = current.load(std::memory_order_acquire);
  if (is_current(before, settings)) return {};
  auto log = std::make_unique<Log>();
  if (*level != LogLevel::kOff) {
    Result<UniqueFd> file = open_file(settings.file);
    if (!file.ok()) return file.status();
    log->logger = make_logger(std::move(*file));
  }
  log->settings = std::move(settings);
  log->level = *level;
  log->num_forks = num_forks();
  do {
    if (is_current(before, log->settings)) return {};  // another thread was faster
    log->before = before;
  } while (!current.compare_exchange_weak(before, log.get(), std::memory_order_acq_rel));
  static_cast<void>(log.release());
  return {};
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kInfo:
      return spdlog::level::info;
    default:
      return spdlog::level::debug;
  }
}

bool changed_nothing(ErrorCode code) {
  return code == ErrorCode::kInvalidArgument || code == ErrorCode::kUnsupported || code == ErrorCode::kCapacity;
}

}  // namespace

Status open_log() {
  const KeptErrno kept;
  return use({value_of(kLogVariable), value_of(kLogFileVariable)});
}

bool logs(LogLevel level) noexcept {
  const Log* const log = current.load(std::memory_order_acquire);
  return log != nullptr && level <= log->level;
}

void write_log(LogLevel level, const LogRank& rank, std::string_view text) noexcept {
  if (!logs(level)) return;
  const KeptErrno kept;
  try {
    const Log* log = current.load(std::memory_order_acquire);
    if (log->num_forks != num_forks()) {
      // A thread may have held the mutex of the sink at the fork, and the file may be one for each process.
      if (!use(log->settings).ok()) return;
      log = current.load(std::memory_order_acquire);
      if (log->logger == nullptr) return;
    }
    std::string line = fmt::format("rank {}/{} {}", rank.rank, rank.num_ranks, text);
    std::replace_if(
        line.begin(), line.end(), [](unsigned char one) { return one < ' ' || one == 0x7F; }, ' ');
    log->logger->log(to_spdlog(level), line);
  } catch (...) {  // out of memory: the caller goes on without the line
  }
}

void log_error(const LogRank& rank, const Status& status) noexcept {
  if (status.ok()) return;
  const LogLevel level = changed_nothing(status.code()) ? LogLevel::kWarn : LogLevel::kError;
  log_line(level, rank, "failed: code={} peer={}: {}", to_string(status.code()), status.peer(), status.message());
}

void ErrorLog::note(const Status& status) noexcept {
  if (status.ok() || !logs(LogLevel::kError)) return;
  try {
    const std::lock_guard lock(mutex_);
    if (!changed_nothing(status.code()) && last_ == status.message()) return;
    last_ = status.message();
  } catch (...) {  // out of memory: an error may be logged twice
  }
  log_error(rank_, status);
}

}  // namespace ferry
