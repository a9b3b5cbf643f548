#ifndef FERRY_TESTS_EMULATED_GPUS_GRAPH_HPP
#define FERRY_TESTS_EMULATED_GPUS_GRAPH_HPP

/// Work recorded from streams, to be queued again and again.

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <vector>

#include "emulator/emulator.hpp"

namespace ferry::emulated {

/// One piece of work of a stream: a grid, a call on the host, or a wait for another piece.
struct Work {
  enum class Kind { kCall, kGrid, kHostFunction };
  Kind kind = Kind::kCall;
  std::function<void()> body;
  emulator::GridShape shape;
};

struct Event;

/// What streams do while they are captured.
struct Capture {
  struct Op {
    Work work;
    int branch = 0;
    int awaited = -1;                ///< op that this one waits for
    const Event* outside = nullptr;  ///< event that it waits for, as of each replay
  };
  std::mutex mutex;
  std::vector<Op> ops;
  int num_branches = 1;
  bool is_spoilt = false;
};

struct Stream;

/// Queues all of it behind what is queued on the stream.
void replay(const Capture& graph, Stream& stream);

/// Whether the calling thread may make a call that cannot be captured. If not, the captures that forbid it are spoilt.
bool may_call_uncaptured();

}  // namespace ferry::emulated

#endif  // FERRY_TESTS_EMULATED_GPUS_GRAPH_HPP
