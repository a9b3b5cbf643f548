#ifndef FERRY_TESTS_GPU_GROUP_HPP
#define FERRY_TESTS_GPU_GROUP_HPP

/// Groups on GPUs, and one rank's tensors for a whole round of calls without a wait in between.

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "support/device_memory.hpp"
#include "support/exchange_check.hpp"
#include "support/gpu_ranks.hpp"

namespace ferry::test {

/// How GoogleTest names tests by the kind of their ranks. The names matter: only tests with "rocesses" in theirs fork.
const char* kind_name(RankKind kind);
inline void PrintTo(RankKind kind, std::ostream* out) { *out << kind_name(kind); }

GroupOptions gpu_group_options();

/// Returns when all ranks have called it.
void meet(RankContext& context);

/// A stream of this rank, which all ranks make together. A kernel has run on it: on a GPU that ranks share the first of
/// a stream may not begin while kernels of other ranks wait there for it.
class RankStream {
 public:
  explicit RankStream(RankContext& context);
  Stream get() const { return stream_.get(); }

 private:
  OwnedStream stream_;
};

/// Runs `body` on every rank with a new group, then destroys the group.
void run_gpu_group(RankKind kind, int num_ranks, const std::function<void(RankContext&, Group&)>& body);

/// Delays in front of the calls of a round, in microseconds; 0: none.
struct RoundDelays {
  int before_route = 0;
  int before_dispatch = 0;
  int before_combine = 0;
};

/// Route, dispatch and combine of one case on one rank, in this order on one stream. The caller of `start` waits for
/// the stream before it calls `expect_received`.
class Round {
 public:
  Round(RankContext& context, Group& group, const PreparedCase& prepared);

  /// False if a call failed at once, which is reported. The Routing is dropped while its work may still be under way.
  bool start(RankContext& context, Group& group, Stream stream, const RoundDelays& delays = {});
  void expect_received(RankContext& context) const;
  /// The same tensors for a case of equal shapes.
  void refill(const RankContext& context, const PreparedCase& prepared);

  /// Of the latest `start`, kept on request.
  bool keep_routing = false;
  Routing routing;
  KernelOptions kernel;

 private:
  const PreparedCase* prepared_;
  RouteArguments arguments_;
  DispatchTensors dispatch_;
  CombineTensors combine_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_GROUP_HPP
