#ifndef FERRY_TESTS_EMULATED_GPUS_GRAPH_HPP
#define FERRY_TESTS_EMULATED_GPUS_GRAPH_HPP

/// Work recorded from streams, for repeated replay.

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <vector>

#include "emulator/emulator.hpp"

namespace ferry::emulated {

/// One piece of a stream's work: a grid, a call on the host, or a wait for another piece.
struct Work {
  enum class Kind { kCall, kGrid, kHostFunction };
  Kind kind = Kind::kCall;
  std::function<void()> body;
  emulator::GridShape shape;
};

struct Event;

/// Work recorded from streams while they are captured.
struct Capture {
  struct Op {
    Work work;
    int branch = 0;
    int awaited = -1;                ///< op that this one waits for
    const Event* outside = nullptr;  ///< event that it waits for, in its state at each replay
  };
  std::mutex mutex;
  std::vector<Op> ops;
  int num_branches = 1;
  bool is_spoilt = false;
};

struct Stream;

/// Queues the whole graph after the work queued on the stream.
void replay(const Capture& graph, Stream& stream);

/// Whether the calling thread may make a call that cannot be captured. If not, invalidates the captures that forbid it.
bool may_call_uncaptured();

}  // namespace ferry::emulated

#endif  // FERRY_TESTS_EMULATED_GPUS_GRAPH_HPP
