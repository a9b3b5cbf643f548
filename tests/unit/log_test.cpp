/// The log that the variables FERRY_LOG and FERRY_LOG_FILE turn on. CTest runs each case in a process of its own.

#include "core/log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class Log : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }

  /// Lines of this level and worse go to a new file, which is returned.
  std::filesystem::path turn_on(const std::string& level, const std::string& name = "log") {
    setenv(kLogVariable, level.c_str(), 1);
    setenv(kLogFileVariable, (folder_ / name).c_str(), 1);
    return folder_ / name;
  }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::filesystem::path folder_ = [] {
    std::string pattern = ::testing::TempDir() + "ferry-log-XXXXXX";
    return std::filesystem::path(mkdtemp(pattern.data()));
  }();
};

std::vector<std::string> lines_of(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> lines_with(const std::filesystem::path& file, const std::string& text) {
  std::vector<std::string> found;
  for (const std::string& line : lines_of(file)) {
    if (line.find(text) != std::string::npos) found.push_back(line);
  }
  return found;
}

/// Time, level, host, process, rank.
bool is_whole(const std::string& line) {
  static const std::regex form(R"(^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}[+-]\d\d:\d\d (error|warn|info|debug) \S+ \d+ )"
                               R"(ferry: rank \d+/\d+ \S)");
  return std::regex_search(line, form, std::regex_constants::match_continuous);
}

GroupOptions on_cpus(int ranks_per_node = 0) {
  GroupOptions options{.backend = "cpu"};
  options.ranks_per_node = ranks_per_node;
  options.transport = "loopback";
  return options;
}

Status create_alone() {
  Status status;
  run_ranks({.num_ranks = 1},
            [&](RankContext& context) { status = Group::create(context.bootstrap(), on_cpus()).status(); });
  return status;
}

/// Two ranks create a group and make a refused call; the second leaves, which breaks the group, and the first makes
/// three calls.
void fail_in_two_ways() {
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    GroupOptions options = on_cpus();
    options.timeout_ns = 20 * kNsPerSecond;
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "create")) return;
    const std::vector<std::int64_t> ids(4, 99);
    const TensorView view(const_cast<std::int64_t*>(ids.data()), DType::kInt64, {2, 2});
    RouteOptions route;
    route.num_experts = 4;
    context.expect_code((*group)->route({view, {}}, route).status(), ErrorCode::kInvalidArgument, "id 99");
    if (context.rank() == 1) return;
    for (int i = 0; i < 3; ++i) {
      context.expect_code((*group)->route({view, {}}, route).status(), ErrorCode::kPeerLost, "rank 1 has left");
    }
  });
}

TEST_F(Log, IsOffUnlessAVariableTurnsItOn) {
  unsetenv(kLogVariable);
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  fail_in_two_ways();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_FALSE(logs(LogLevel::kError));
}

TEST_F(Log, GoesToStandardErrorUnlessAFileIsNamed) {
  setenv(kLogVariable, "info", 1);
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(create_alone().ok());
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr(" ferry: rank 0/1 create: version=" + std::string(version())));
}

TEST_F(Log, NamesWhatAGroupChose) {
  const std::filesystem::path file = turn_on("info");
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    auto group = Group::create(context.bootstrap(), on_cpus(1));
    if (context.expect_ok(group.status(), "create")) context.expect_ok((*group)->destroy(), "destroy");
  });
  for (const std::string& line : lines_of(file)) EXPECT_TRUE(is_whole(line)) << line;
  EXPECT_THAT(lines_with(file, "version="),
              AllOf(SizeIs(2), Each(AllOf(HasSubstr(std::string("commit=") + commit()), HasSubstr("backend=cpu"),
                                          HasSubstr("nodes=2"), HasSubstr("timeout_s=600")))));
  EXPECT_THAT(lines_with(file, "rank 1/2 create: engine=loopback"), SizeIs(1));
  EXPECT_THAT(lines_with(file, "create: rings memory=host num_chunks="), SizeIs(2));
  EXPECT_THAT(lines_with(file, "rank 0/2 create: peer=1 node=1 route="), SizeIs(1));
  EXPECT_THAT(lines_with(file, "create: memory control_bytes="), SizeIs(2));
  EXPECT_THAT(lines_with(file, "destroy: all ranks are done"), SizeIs(2));
  EXPECT_THAT(lines_with(file, "took_ms="), IsEmpty()) << "of level debug";
}

TEST_F(Log, TimesThePhasesOfACreation) {
  const std::filesystem::path file = turn_on("debug");
  EXPECT_TRUE(create_alone().ok());
  EXPECT_THAT(lines_with(file, "create: agreement on options: took_ms="), SizeIs(1));
  EXPECT_THAT(lines_with(file, "create: all: took_ms="), SizeIs(1));
}

TEST_F(Log, HasEachRefusalAndTheErrorOfABrokenGroupOnce) {
  const std::filesystem::path file = turn_on("warn");
  fail_in_two_ways();
  for (const std::string& line : lines_of(file)) EXPECT_TRUE(is_whole(line)) << line;
  EXPECT_THAT(lines_with(file, " warn "), AllOf(SizeIs(2), Each(HasSubstr("failed: code=kInvalidArgument"))));
  EXPECT_THAT(lines_with(file, " error "), AllOf(SizeIs(1), Each(HasSubstr("rank 0/2 failed: code=kPeerLost peer=1"))));
  EXPECT_THAT(lines_with(file, " info "), IsEmpty());
}

TEST_F(Log, HasACreationThatFails) {
  const std::filesystem::path file = turn_on("warn");
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    GroupOptions options = on_cpus();
    options.ranks_per_node = 1 + context.rank();
    context.expect_code(Group::create(context.bootstrap(), options).status(), ErrorCode::kInvalidArgument, "create");
  });
  EXPECT_THAT(lines_with(file, "ranks disagree: rank 0 has ranks_per_node=1"), SizeIs(2));
}

TEST_F(Log, HasErrorsOfOneSidedCalls) {
  const std::filesystem::path file = turn_on("info");
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    OneSidedOptions options;
    options.backend = "cpu";
    options.heap_bytes = std::size_t{1} << 20;
    auto memory = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(memory.status(), "create")) return;
    std::uint64_t word = 0;
    context.expect_code((*memory)->put(7, &word, &word, sizeof(word)), ErrorCode::kInvalidArgument, "rank 7");
    context.expect_code((*memory)->fetch_add(7, &word, 1).status(), ErrorCode::kInvalidArgument, "rank 7");
    context.expect_code((*memory)->free(&word), ErrorCode::kInvalidArgument, "no block");
    context.expect_ok((*memory)->destroy(), "destroy");
  });
  EXPECT_THAT(lines_with(file, "create: one-sided version="), SizeIs(2));
  for (const char* call : {"put: ", "fetch_add: ", "free: "}) {
    EXPECT_THAT(lines_with(file, std::string("failed: code=kInvalidArgument peer=-1: ") + call), SizeIs(2)) << call;
  }
}

TEST_F(Log, RefusesWrongValues) {
  setenv(kLogVariable, "loud", 1);
  Status status = create_alone();
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "Group::create: the variable FERRY_LOG is \"loud\", expected off, error, warn, info or debug");
  for (const char* path : {"%q", "x%", "missing/log", ""}) {
    const bool is_folder = *path == '\0';
    turn_on("info", path);
    status = create_alone();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << path;
    EXPECT_THAT(std::string(status.message()), HasSubstr(kLogFileVariable)) << is_folder;
  }
  turn_on("off", "%q");
  EXPECT_TRUE(create_alone().ok()) << "the file of a log that is off does not matter";
}

TEST_F(Log, FollowsTheVariables) {
  const std::filesystem::path first = turn_on("info", "first");
  EXPECT_TRUE(create_alone().ok());
  const std::size_t num_lines = lines_of(first).size();
  const std::filesystem::path second = turn_on("info", "second");
  EXPECT_TRUE(create_alone().ok());
  EXPECT_EQ(lines_of(first).size(), num_lines);
  EXPECT_THAT(lines_of(second), SizeIs(num_lines));
}

constexpr int kProcesses = 4;
constexpr int kThreads = 3;
constexpr int kLines = 600;

/// Forked processes, each with several threads, write lines of many lengths. Returns false if one failed.
bool write_from_processes() {
  std::vector<pid_t> children;
  for (int process = 0; process < kProcesses; ++process) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    {
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([process, thread] {
          for (int i = 0; i < kLines; ++i) {
            const std::string text(static_cast<std::size_t>(37 * i % 3000), static_cast<char>('a' + thread));
            log_line(LogLevel::kInfo, {process, kProcesses}, "<{}>", text);
          }
        });
      }
    }
    _exit(0);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    good = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0 && good;
  }
  return good;
}

TEST_F(Log, KeepsLinesOfThreadsAndProcessesApart) {
  const std::filesystem::path file = turn_on("info");
  ASSERT_TRUE(open_log().ok());
  ASSERT_TRUE(write_from_processes());
  const std::vector<std::string> lines = lines_of(file);
  EXPECT_THAT(lines, SizeIs(kProcesses * kThreads * kLines));
  for (const std::string& line : lines) {
    const std::size_t begin = line.find('<') + 1;
    const bool is_of_one = line.find_first_not_of(line[begin], begin) >= line.size() - 1;
    EXPECT_TRUE(is_whole(line) && is_of_one && line.ends_with('>')) << line;
  }
}

TEST_F(Log, HasAFileForEachProcess) {
  turn_on("info", "log-%p-%%");
  ASSERT_TRUE(open_log().ok());
  ASSERT_TRUE(write_from_processes());
  int num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder())) {
    const std::vector<std::string> lines = lines_of(entry.path());
    if (lines.empty()) continue;  // of this process
    ++num_files;
    EXPECT_THAT(lines, SizeIs(kThreads * kLines));
    const std::string pid = std::regex_replace(entry.path().filename().string(), std::regex("log-(.*)-%"), "$1");
    EXPECT_THAT(lines, Each(HasSubstr(" " + pid + " ferry: ")));
  }
  EXPECT_EQ(num_files, kProcesses);
}

TEST_F(Log, CutsLongLinesAndKeepsOthersOnOneLine) {
  const std::filesystem::path file = turn_on("info");
  ASSERT_TRUE(open_log().ok());
  errno = 42;
  write_log(LogLevel::kInfo, {1, 2}, "first\nsecond\tthird {} %v");
  write_log(LogLevel::kInfo, {1, 2}, std::string(2 * PIPE_BUF, 'x'));
  EXPECT_EQ(errno, 42);
  const std::vector<std::string> lines = lines_of(file);
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_THAT(lines[0], ::testing::EndsWith("rank 1/2 first second third {} %v"));
  EXPECT_EQ(lines[1].size(), static_cast<std::size_t>(PIPE_BUF) - 1);
  EXPECT_THAT(lines[1], ::testing::EndsWith("xxx..."));
}

TEST_F(Log, LosesLinesThatCannotBeWritten) {
  turn_on("info");
  setenv(kLogFileVariable, "/dev/full", 1);
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(create_alone().ok());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace ferry::test
