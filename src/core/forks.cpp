#include "core/forks.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace ferry {
namespace {

std::atomic<int> counted{0};

/// Counts forks, in every child before fork returns there.
[[maybe_unused]] const int watched =
    pthread_atfork(nullptr, nullptr, [] { counted.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int num_forks() { return counted.load(std::memory_order_relaxed); }

Status refuse_copy(std::string_view operation) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: it was created by the process from which this one, {}, was forked; fork first, "
                            "then create it in the process that uses it",
                            operation, getpid()));
}

}  // namespace ferry
