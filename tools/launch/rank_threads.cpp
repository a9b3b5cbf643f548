#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "launch/ranks.hpp"

namespace ferry::launch {

Result<std::vector<RankEnd>> run_rank_threads(int num_ranks, std::int64_t run_timeout_ns, const RankMain& rank_main) {
  auto bootstraps = create_in_process_bootstraps(num_ranks);
  if (!bootstraps) return bootstraps.status();
  const auto num_threads = static_cast<std::size_t>(num_ranks);
  std::vector<RankEnd> ends(num_threads);
  std::mutex mutex;
  std::condition_variable finished;
  std::vector<bool> is_running(num_threads, true);
  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  Status start_error;
  for (std::size_t rank = 0; rank < num_threads && start_error.ok(); ++rank) {
    try {
      threads.emplace_back([&, rank] {
        ends[rank].report = rank_main(static_cast<int>(rank), (*bootstraps)[rank]);
        const std::lock_guard lock(mutex);
        is_running[rank] = false;
        finished.notify_one();
      });
    } catch (const std::system_error& error) {
      start_error = {
          ErrorCode::kSystem,
          fmt::format("cannot start a thread for rank {} of {}: {}; start fewer ranks, or raise the limit of "
                      "threads (ulimit -u)",
                      rank, num_ranks, error.what())};
      // The ranks that run lose those that do not, and end.
      for (std::size_t missing = rank; missing < num_threads; ++missing) (*bootstraps)[missing].reset();
      const std::lock_guard lock(mutex);
      std::fill(is_running.begin() + static_cast<std::ptrdiff_t>(rank), is_running.end(), false);
    }
  }
  {
    std::unique_lock lock(mutex);
    const auto all_done = [&] { return std::find(is_running.begin(), is_running.end(), true) == is_running.end(); };
    // Half of kNoTimeout, because the wait adds the present time to it.
    const std::chrono::nanoseconds timeout(std::min(run_timeout_ns, kNoTimeout / 2));
    if (!finished.wait_for(lock, timeout, all_done)) {
      std::string ranks;
      for (std::size_t rank = 0; rank < num_threads; ++rank) {
        if (is_running[rank]) ranks += fmt::format(" {}", rank);
      }
      const double timeout_s = static_cast<double>(run_timeout_ns) / static_cast<double>(kNsPerSecond);
      fmt::print(stderr, "watchdog: after {} s these ranks still run:{}\n", timeout_s, ranks);
      std::fflush(stderr);
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (!start_error.ok()) return start_error;
  return ends;
}

}  // namespace ferry::launch
