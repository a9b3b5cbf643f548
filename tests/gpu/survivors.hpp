#ifndef FERRY_TESTS_GPU_SURVIVORS_HPP
#define FERRY_TESTS_GPU_SURVIVORS_HPP

/// Parts shared by tests of lost GPU ranks: the cases that ranks exchange, the interrupted call, words through which
/// ranks meet when the bootstrap no longer works, and checks of what survivors can still do.

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
/// One dispatch and one weighted combine, small by default.
PreparedCase prepare_fault_case(const FaultCase& one);

/// Makes the calls before `interrupted`; returns the Routing that it needs.
Routing run_up_to(RankContext& context, Group& group, const PreparedCase& prepared, Operation interrupted);

/// Makes the call and waits for its outcome on this rank. `before` runs when its tensors are ready and the stream is
/// idle.
Status make_call(
    RankContext& context, Group& group, const PreparedCase& prepared, const Routing& routing, Operation operation,
    const std::function<void()>& before = [] {});

/// Expects that no kernel remains that blocks other work of the GPU.
void expect_gpu_copies(RankContext& context);

/// Expects that the GPU still copies, and that the ranks other than `victim` can route, dispatch and combine in a new
/// group. Call after the old group is destroyed.
void go_on_without(int victim, RankContext& context, const PreparedCase& without_victim, const Meeting& meeting);

/// Words that the ranks of one test share, whether they are threads or processes.
struct SharedScene {
  static constexpr int kMaxRanks = 8;
  static constexpr std::size_t kTextBytes = 1024;

  std::atomic<int> victim_process{0};
  std::atomic<unsigned> num_under_way{0};                       ///< ranks whose interrupted call is on the GPU
  std::atomic<unsigned> num_rounds{0};                          ///< rounds that the victim has finished
  std::atomic<unsigned> num_told{0};                            ///< survivors that have their error
  std::atomic<std::int64_t> began_ns{0};                        ///< time when rank 0 made its call
  std::atomic<std::int64_t> lost_ns{0};                         ///< time when the victim was lost
  std::array<std::array<char, kTextBytes>, kMaxRanks> texts{};  ///< published by num_told
};
/// Allocates a scene in memory that ranks forked later share. Valid as long as the test process.
SharedScene* make_shared_scene();

/// Polls until `there()` returns true; throws after a time longer than any test may take.
void await(const std::function<bool()>& there, std::string_view what);

/// Kills another process; returns when it has ended, as its parent could see.
void kill_and_await(pid_t process);

/// Calls `report` once there is work on the stream, which must be idle now. Uses a separate thread, because the call
/// that puts the work there may not return before the work is done.
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
