#ifndef FERRY_TESTS_TRAP_MEMORY_HPP
#define FERRY_TESTS_TRAP_MEMORY_HPP

/// Memory that makes a rank fail at an exact place, in the middle of reading its own input. Its second half cannot be
/// read; the fault handler then kills the process, stops it, or blocks it until it is released.

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ferry::test {

enum class Fate {
  kKilled,   ///< SIGKILL: no destructor runs, nothing is sent to any rank
  kStalled,  ///< the process stays alive but makes no progress
  kStopped,  ///< SIGSTOP for all threads of the process; once continued, it can read all of the memory
};

/// Words shared by the rank processes of a test.
struct SharedWords {
  std::atomic<unsigned> num_survivors_done{0};
  std::atomic<std::int64_t> processor_time_ns{0};  ///< for tests that add up the time of all ranks
};

/// Allocates words that ranks forked later share. They live as long as the test process.
SharedWords* make_shared_words();

/// `size_bytes` zeroed bytes, an even number of pages, of which the second half cannot be read. On the first read
/// there, this process suffers `fate`; a stalled process exits quietly once `num_survivors` ranks are done.
std::byte* make_trap_memory(std::size_t size_bytes, Fate fate, SharedWords* words, unsigned num_survivors);

/// Called by each survivor when it has finished its checks.
void report_survivor_done(SharedWords* words);

/// Blocks until `num_survivors` ranks are done.
void wait_for_survivors(SharedWords* words, unsigned num_survivors);

}  // namespace ferry::test

#endif  // FERRY_TESTS_TRAP_MEMORY_HPP
