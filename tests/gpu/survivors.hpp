#ifndef FERRY_TESTS_GPU_SURVIVORS_HPP
#define FERRY_TESTS_GPU_SURVIVORS_HPP

/// What tests of lost GPU ranks share: the cases that ranks exchange, the call that is interrupted, words by which
/// ranks meet where the bootstrap cannot help any more, and what survivors can still do.

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <thread>

#include "core/agreement.hpp"
#include "gpu/gpu_group.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::test {

struct FaultCase {
  int num_ranks = 4;
  bool bounded = false;
  MemoryKind memory = MemoryKind::kSymmetric;
  std::int64_t max_tokens = 64;
  std::int64_t hidden = 512;
};
/// One dispatch and one weighted combine, small unless asked for more.
PreparedCase prepare_fault_case(const FaultCase& one);

/// The calls before `interrupted`; the Routing that it needs.
Routing run_up_to(RankContext& context, Group& group, const PreparedCase& prepared, Operation interrupted);

/// The call, until this rank knows how it ended. `before` runs when its tensors are ready and the stream is idle.
Status make_call(
    RankContext& context, Group& group, const PreparedCase& prepared, const Routing& routing, Operation operation,
    const std::function<void()>& before = [] {});

/// No kernel was left behind that keeps the GPU from other work.
void expect_gpu_copies(RankContext& context);

/// The GPU still copies, and the ranks other than `victim` route, dispatch and combine in a new group. After the old
/// group is gone.
void go_on_without(int victim, RankContext& context, const PreparedCase& without_victim, const Meeting& meeting);

/// Words that the ranks of one test share, whether they are threads or processes.
struct SharedScene {
  static constexpr int kMaxRanks = 8;
  static constexpr std::size_t kTextBytes = 1024;

  std::atomic<int> victim_process{0};
  std::atomic<unsigned> num_under_way{0};                       ///< ranks whose interrupted call is on the GPU
  std::atomic<unsigned> num_rounds{0};                          ///< that the victim has finished
  std::atomic<unsigned> num_told{0};                            ///< survivors that have their error
  std::atomic<std::int64_t> began_ns{0};                        ///< when rank 0 made its call
  std::atomic<std::int64_t> lost_ns{0};                         ///< when the victim was gone
  std::array<std::array<char, kTextBytes>, kMaxRanks> texts{};  ///< published by num_told
};
/// In memory that ranks forked later share. Valid as long as the test process.
SharedScene* make_shared_scene();

/// Polls until `there()`; throws if that takes as long as no test may.
void await(const std::function<bool()>& there, std::string_view what);

/// Kills another process; returns when it has ended, as its parent could see.
void kill_and_await(pid_t process);

/// Calls `report` once there is work on the stream, which must be idle now, from a thread of its own: the call that
/// puts the work there may not return before it is done.
class UnderWay {
 public:
  UnderWay(Stream stream, std::function<void()> report);
  ~UnderWay();
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_SURVIVORS_HPP
