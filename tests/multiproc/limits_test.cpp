/// Process limits that are too low cause errors and do not end the process.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ferry/ferry.hpp"

namespace ferry::test {
namespace {

TEST(FileSizeLimit, BelowTheArenaIsATypedError) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit limit{1 << 20, 1 << 20};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(2);
    const Status status = Group::create(create_in_process_bootstraps(1).value()[0], {.backend = "cpu"}).status();
    const bool named = status.message().find("ulimit -f") != std::string_view::npos;
    _exit(status.code() == ErrorCode::kSystem && named ? 0 : 1);
  }
  int ended = -1;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0) << "2 << 8: setrlimit; 25: SIGXFSZ";
}

}  // namespace
}  // namespace ferry::test
