/// Destinations of the command's output: files and standard streams of every kind, and paths that cannot be written.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

/// Smallest runs with a report: demo, bench.
constexpr const char* kDemo = "\"$FERRY\" demo --backend cpu --ranks 1 --tokens 4 --scale 64 --model mixtral-8x7b";
constexpr const char* kBench =
    "\"$FERRY\" bench --backend cpu --ranks 1 --tokens 4 --hidden 64 --topk 2 --experts 4 --iterations 1 --warmup 0 "
    "--op dispatch";

std::string demo(const std::string& options) { return std::string(kDemo) + " " + options; }
std::string bench(const std::string& options) { return std::string(kBench) + " " + options; }

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool is_report(const std::string& text) { return json::accept(text) && json::parse(text).is_object(); }

mode_t mode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(lstat(path.c_str(), &status), 0) << path;
  return status.st_mode;
}

/// Runs scripts in a folder of its own, $D. Devices are reached through links in it: a command that replaced the file
/// at its path would, as root, replace the machine's devices.
class Output : public ::testing::Test {
 protected:
  CommandEnd run(const std::string& script) const {
    return run_script("D='" + folder_.path() + "'; cd \"$D\"; " + script);
  }
  std::string in_folder(const std::string& name) const { return folder_.path() + "/" + name; }
  std::size_t num_entries() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()));
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(Output, OfEveryCommandReplacesAFileAndKeepsItsPermissions) {
  for (const std::string& command : {demo("--report r"), bench("--json r"), demo("--picture r")}) {
    const CommandEnd end = run("printf old > r; chmod 640 r; " + command);
    EXPECT_EQ(end.exit_code, 0) << command << end.standard_error;
    const std::string content = content_of(in_folder("r"));
    EXPECT_TRUE(is_report(content) || content.starts_with("<?xml")) << content;
    EXPECT_EQ(mode_of(in_folder("r")) & 07777U, 0640U);
    EXPECT_EQ(num_entries(), 1U) << "other files are left in the folder";
  }
}

TEST_F(Output, FollowsSymbolicLinks) {
  const CommandEnd end =
      run("mkdir there; printf old > there/target; ln -s there/target near; ln -s \"$D/near\" far; " +
          demo("--report far"));
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(S_ISLNK(mode_of(in_folder("far"))));
  EXPECT_TRUE(S_ISLNK(mode_of(in_folder("near"))));
  EXPECT_TRUE(is_report(content_of(in_folder("there/target"))));
}

TEST_F(Output, FollowsASymbolicLinkToAFileThatDoesNotExist) {
  const CommandEnd end = run("mkdir there; ln -s there/new link; " + demo("--report link"));
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(S_ISLNK(mode_of(in_folder("link"))));
  EXPECT_TRUE(is_report(content_of(in_folder("there/new"))));
}

TEST_F(Output, KeepsHardLinks) {
  const CommandEnd end = run("printf old > a; ln a b; " + demo("--report a"));
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(is_report(content_of(in_folder("b"))));
}

TEST_F(Output, GoesIntoAPipe) {
  const CommandEnd end =
      run("mkfifo pipe; cat pipe > copy & " + demo("--report pipe") + " > text; code=$?; wait; exit $code");
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(S_ISFIFO(mode_of(in_folder("pipe"))));
  EXPECT_TRUE(is_report(content_of(in_folder("copy"))));
}

TEST_F(Output, GoesToADevice) {
  const CommandEnd end = run("ln -s /dev/null sink; " + demo("--report sink --picture /dev/fd/7 7> picture"));
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(S_ISCHR(mode_of("/dev/null")));
  EXPECT_TRUE(S_ISLNK(mode_of(in_folder("sink"))));
  EXPECT_TRUE(content_of(in_folder("picture")).starts_with("<?xml"));
}

TEST_F(Output, GoesToOpenDescriptors) {
  const CommandEnd numbered =
      run("printf 'before\\n' > copy; " + demo("--report /dev/fd/5 5>> copy") + "; printf after >> copy");
  EXPECT_EQ(numbered.exit_code, 0) << numbered.standard_error;
  const std::string content = content_of(in_folder("copy"));
  EXPECT_TRUE(content.starts_with("before\n{")) << content;
  EXPECT_TRUE(content.ends_with("}\nafter")) << content;

  const CommandEnd standard = run("ln -s /dev/stdout out; " + demo("--report out"));
  EXPECT_EQ(standard.exit_code, 0) << standard.standard_error;
  EXPECT_NE(standard.standard_output.find("verified: "), std::string::npos) << standard.standard_output;
  EXPECT_TRUE(standard.standard_output.ends_with("}\n")) << standard.standard_output;

  const CommandEnd substituted = run(demo("--report >(cat > through)") + "; wait $!");
  EXPECT_EQ(substituted.exit_code, 0) << substituted.standard_error;
  EXPECT_TRUE(is_report(content_of(in_folder("through"))));
}

TEST_F(Output, ThatCannotBeWrittenIsRefusedBeforeTheRun) {
  for (const char* path : {"missing/r", "folder", "folder/", "missing/", "loop", "/dev/fd/77", "/dev/stdin/r"}) {
    for (const std::string& command :
         {demo("--report "), bench("--json "), demo("--picture "), std::string("\"$FERRY\" doctor --json ")}) {
      const CommandEnd end = run("mkdir -p folder; ln -sf loop loop; " + command + path);
      EXPECT_EQ(end.exit_code, 2) << command << path << end.standard_error;
      EXPECT_EQ(end.standard_output, "") << command << path;
      EXPECT_NE(end.standard_error.find(path), std::string::npos) << end.standard_error;
    }
  }
  const CommandEnd same = run(demo("--report r --picture r"));
  EXPECT_EQ(same.exit_code, 2) << same.standard_error;
}

TEST_F(Output, OnAFullDiskIsAFailure) {
  for (const std::string& command :
       {demo("--report full"), demo("--picture full"), bench("--json full"), demo("> /dev/full"), bench("> /dev/full"),
        demo("--report - > /dev/full"), bench("--json - > /dev/full"), std::string("\"$FERRY\" --help > /dev/full"),
        std::string("\"$FERRY\" --version > /dev/full"), std::string("\"$FERRY\" doctor > /dev/full")}) {
    const CommandEnd end = run("ln -sf /dev/full full; " + command);
    EXPECT_EQ(end.exit_code, 1) << command << end.standard_error;
    EXPECT_NE(end.standard_error.find("No space left on device"), std::string::npos) << command << end.standard_error;
  }
}

TEST_F(Output, OnAFullDiskLeavesTheOldFile) {
  // The limit on file size stands for a full disk, without a mount.
  const CommandEnd end = run("printf old > r; trap '' XFSZ; ulimit -f 1; " + demo("--picture r"));
  EXPECT_EQ(end.exit_code, 1) << end.standard_error;
  EXPECT_EQ(content_of(in_folder("r")), "old");
  EXPECT_EQ(num_entries(), 1U);
}

TEST_F(Output, OnAClosedStreamIsAFailureOrOfNoMatter) {
  const CommandEnd out = run(demo(">&-"));
  EXPECT_EQ(out.exit_code, 1) << out.standard_error;
  EXPECT_NE(out.standard_error.find("Bad file descriptor"), std::string::npos) << out.standard_error;
  EXPECT_EQ(run(demo("2>&-")).exit_code, 0);
  EXPECT_EQ(run(demo("2> /dev/full")).exit_code, 0);
  EXPECT_EQ(run(demo("--report r <&- 2>&-")).exit_code, 0);
  EXPECT_EQ(run("\"$FERRY\" demo --ranks 0 2> /dev/full").exit_code, 2);
}

}  // namespace
}  // namespace ferry::testing
