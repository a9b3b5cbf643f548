#include "gpu/gpu_group.hpp"

#include <chrono>

#include "cuda/driver/empty_kernel.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kTimeoutNs = 30 * kNsPerSecond;
constexpr std::size_t kArenaBytes = std::size_t{2} << 30;
constexpr std::chrono::seconds kDeadline{240};

void delay(Stream stream, int microseconds) {
  if (microseconds > 0) enqueue_delay(stream, std::chrono::microseconds(microseconds));
}

}  // namespace

const char* kind_name(RankKind kind) { return kind == RankKind::kThreads ? "threads" : "processes"; }

GroupOptions gpu_group_options() { return {.backend = "cuda", .arena_bytes = kArenaBytes, .timeout_ns = kTimeoutNs}; }

void meet(RankContext& context) {
  context.expect_ok(context.bootstrap()->all_gather({}, kTimeoutNs).status(), "all ranks meet");
}

RankStream::RankStream(RankContext& context) {
  const cudaError_t error = cuda::run_empty_kernel(static_cast<cudaStream_t>(stream_.get().handle));
  context.expect(error == cudaSuccess, "the first kernel of a stream");
  meet(context);
}

void run_gpu_group(RankKind kind, int num_ranks, const std::function<void(RankContext&, Group&)>& body) {
  run_gpu_ranks({kind, num_ranks, kDeadline}, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), gpu_group_options());
    if (!context.expect_ok(group.status(), "Group::create")) return;
    body(context, **group);
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

Round::Round(RankContext& context, Group& group, const PreparedCase& prepared)
    : prepared_(&prepared),
      arguments_(context, group, prepared),
      dispatch_(context, group, prepared, 0),
      combine_(context, group, prepared, 0) {}

bool Round::start(RankContext& context, Group& group, Stream stream, const RoundDelays& delays) {
  const std::string& name = prepared_->spec.name;
  dispatch_.options.kernel = combine_.options.kernel = kernel;
  delay(stream, delays.before_route);
  Result<Routing> routed = group.route(arguments_.input(), arguments_.options(), stream);
  if (!context.expect_ok(routed.status(), name + ": route")) return false;
  delay(stream, delays.before_dispatch);
  Status status = group.dispatch(*routed, dispatch_.in, dispatch_.out, stream, dispatch_.options);
  if (!context.expect_ok(status, name + ": dispatch")) return false;
  delay(stream, delays.before_combine);
  status = group.combine(*routed, combine_.in, combine_.out, stream, combine_.options);
  if (keep_routing) routing = *routed;
  return context.expect_ok(status, name + ": combine");
}

void Round::expect_received(RankContext& context) const {
  dispatch_.expect_received(context, prepared_->spec.name + ": dispatch: ");
  combine_.expect_received(context, prepared_->spec.name + ": combine: ");
}

void Round::refill(const RankContext& context, const PreparedCase& prepared) {
  prepared_ = &prepared;
  arguments_.refill(context, prepared);
  dispatch_.refill(context, prepared, 0);
  combine_.refill(context, prepared, 0);
}

}  // namespace ferry::test
