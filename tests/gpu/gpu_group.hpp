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

/// Suffix of GoogleTest names for a kind of ranks. The names matter: only tests with "rocesses" in theirs fork.
const char* kind_name(RankKind kind);
inline void PrintTo(RankKind kind, std::ostream* out) { *out << kind_name(kind); }

GroupOptions gpu_group_options();

/// Returns after all ranks have called it.
void meet(RankContext& context);

/// A stream of this rank, which all ranks create together. A kernel has run on it: on a GPU that ranks share, a
/// stream's first kernel may not begin while kernels of other ranks wait on that GPU for it.
class RankStream {
 public:
  explicit RankStream(RankContext& context);
  Stream get() const { return stream_.get(); }

 private:
  OwnedStream stream_;
};

/// Runs `body` on every rank with a new group, then destroys the group.
void run_gpu_group(RankKind kind, int num_ranks, const std::function<void(RankContext&, Group&)>& body);

/// Delays before the calls of a round, in microseconds; 0: none.
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

  /// Returns false if a call failed at once, which is reported. The Routing is destroyed while its work may be in
  /// progress.
  bool start(RankContext& context, Group& group, Stream stream, const RoundDelays& delays = {});
  void expect_received(RankContext& context) const;
  /// Fills the same tensors for a case of equal shapes.
  void refill(const RankContext& context, const PreparedCase& prepared);

  /// Whether to keep the Routing of the latest `start`.
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
