#include "cuda/call/routing.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <string>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/driver.hpp"
#include "node/futex.hpp"
#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

/// Multiple of the timeout after the stream has reached the route. The deadlines of the kernels expire first.
constexpr std::int64_t kStartedDeadlines = 3;
/// Multiple of the timeout until the stream has reached the route: far more work than a program queues.
constexpr std::int64_t kQueueDeadlines = 10;

std::uint64_t load_acquire(const std::uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/// Count in a word that has arrived.
std::int64_t count_in(std::uint64_t word) { return static_cast<std::int64_t>(word & (RouteWords::kThere - 1)); }

template <typename Counts>
void copy_counts(const std::uint64_t* words, std::size_t num_words, Counts& counts) {
  counts.resize(num_words);
  std::transform(words, words + num_words, counts.begin(),
                 [](std::uint64_t word) { return static_cast<typename Counts::value_type>(count_in(word)); });
}

}  // namespace

HostResult HostResult::at(std::byte* base, std::size_t num_ranks, std::size_t num_local_experts) {
  plan::Carver carver(base);
  HostResult host;
  host.result = carver.take<RouteResult>(1);
  host.fault = carver.take<FaultReport>(1);
  host.from_rank = carver.take<std::int64_t>(num_ranks);
  host.to_rank = carver.take<std::int64_t>(num_ranks);
  host.rows_per_expert = carver.take<std::int32_t>(num_local_experts);
  host.row_offsets = carver.take<std::int64_t>(num_local_experts + 1);
  host.size_bytes = carver.used_bytes();
  return host;
}

HostResult HostResult::of_words(std::byte* base, std::size_t num_words) {
  plan::Carver carver(base);
  HostResult host;
  host.result = carver.take<RouteResult>(1);
  host.fault = carver.take<FaultReport>(1);
  host.words = carver.take<std::uint64_t>(num_words);
  host.num_words = num_words;
  host.size_bytes = carver.used_bytes();
  return host;
}

void HostResult::clear() const {
  *result = {};
  fault->state = 0;
  fault->latency = 0;
  std::fill_n(words, num_words, 0);
}

std::uint64_t HostResult::state() const {
  const std::uint64_t state = load_acquire(&result->state);
  if (state == RouteResult::kRefusedBySome) return RouteResult::kRefused;
  if (state != RouteResult::kValid) return state;
  if (words == nullptr) return 1;
  // Words and `started` arrive in any order; all must have arrived before this memory is given back.
  if (!started()) return 0;
  for (std::size_t i = 0; i < num_words; ++i) {
    if ((load_acquire(&words[i]) & RouteWords::kThere) == 0) return 0;
  }
  return 1;
}

bool HostResult::started() const { return load_acquire(&result->started) != 0; }

CountsDeadline::CountsDeadline(const HostResult& host, std::int64_t timeout_ns)
    : host_(host), timeout_ns_(timeout_ns), deadline_ns_(node::monotonic_ns() + kQueueDeadlines * timeout_ns) {}

bool CountsDeadline::expired() {
  const std::int64_t now_ns = node::monotonic_ns();
  if (!started_ && host_.started()) {
    started_ = true;
    deadline_ns_ = now_ns + kStartedDeadlines * timeout_ns_;
  }
  return now_ns >= deadline_ns_;
}

Status check_not_latency(const RoutingState& routing, std::string_view operation) {
  if (routing.latency_phase == LatencyPhase::kNone) return {};
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("{}: the Routing was made by latency_dispatch, expected one of route; backend \"cuda\" does "
                  "not use one for both; call latency_combine on it, or route",
                  operation));
}

CountsBlock::~CountsBlock() {
  if (is_written) {
    memory->give(data, size_bytes);
  } else {
    owner->after_calls([to = memory, block = data, bytes = size_bytes] { to->give(block, bytes); });
  }
}

Status mark_not_routed(std::string_view operation, RouteSummary* summary, cudaStream_t own_stream) {
  const std::string clearing = fmt::format("{}: clearing a captured Routing", operation);
  const RelaxedCapture relaxed;
  RouteSummary empty{};
  empty.fault = static_cast<std::int32_t>(Fault::kNotRouted);
  Status status =
      runtime_status(cudaMemcpyAsync(summary, &empty, sizeof(empty), cudaMemcpyHostToDevice, own_stream), clearing);
  if (!status.ok()) return status;
  return runtime_status(cudaStreamSynchronize(own_stream), clearing);
}

Status CudaRouting::take_pinned_data(const CountsMemory& counts, std::size_t bytes, std::int64_t deadline_ns) {
  Result<std::byte*> data = counts.pinned->take(bytes, false);
  if (!data.ok()) {
    // Memory of Routings that are gone may suffice.
    counts.owner->release_finished();
    data = counts.pinned->take(bytes, false);
  }
  if (!data.ok()) return data.status();
  pinned = counts.pinned;
  pinned_data = std::make_shared<CountsBlock>();
  pinned_data->owner = counts.owner;
  pinned_data->memory = counts.pinned;
  pinned_data->data = *data;
  pinned_data->size_bytes = bytes;
  timeout_ns = deadline_ns;
  report = counts.report;
  return {};
}

Result<RouteResultTables> CudaRouting::expect_counts(const CountsMemory& counts, int num_ranks,
                                                     std::int64_t deadline_ns) {
  const auto size = to_size(num_ranks);
  const std::size_t num_local = local_expert_ids.size();
  const std::size_t bytes = HostResult::at(nullptr, size, num_local).size_bytes;
  if (Status status = take_pinned_data(counts, bytes, deadline_ns); !status.ok()) return status;
  host = HostResult::at(pinned_data->data, size, num_local);
  host.clear();
  num_rows_from_rank.resize(size);
  RouteResultTables seen;
  seen.result = pinned->on_device(host.result);
  seen.from_rank = pinned->on_device(host.from_rank);
  seen.to_rank = pinned->on_device(host.to_rank);
  seen.rows_per_expert = pinned->on_device(host.rows_per_expert);
  seen.row_offsets = pinned->on_device(host.row_offsets);
  return seen;
}

RouteWords CudaRouting::words_of_host() const {
  return {host.words, static_cast<int>(num_rows_from_rank.size()), static_cast<int>(local_expert_ids.size())};
}

Result<RouteWords> CudaRouting::expect_words(const CountsMemory& counts, int num_ranks, std::int64_t deadline_ns) {
  const auto size = to_size(num_ranks);
  const std::size_t num_words = RouteWords::count(size, local_expert_ids.size(), layout != Layout::kTokens);
  const std::size_t bytes = HostResult::of_words(nullptr, num_words).size_bytes;
  if (Status status = take_pinned_data(counts, bytes, deadline_ns); !status.ok()) return status;
  host = HostResult::of_words(pinned_data->data, num_words);
  host.clear();
  num_rows_from_rank.resize(size);
  RouteWords seen = words_of_host();
  seen.words = pinned->on_device(host.words);
  return seen;
}

void CudaRouting::settle() const {
  const std::lock_guard lock(settle_mutex);
  if (pinned_data == nullptr || gave_up) return;
  CountsDeadline deadline(host, timeout_ns);
  while (host.state() == 0 && load_acquire(&report->lost.state) == 0 && !deadline.expired()) sched_yield();
  gave_up = host.state() == 0;  // readers keep the values that they have seen
  // The object is not const; only its readers see it as const.
  if (!gave_up) const_cast<CudaRouting*>(this)->adopt_result();
}

std::uint64_t CudaRouting::counts_state() const {
  // A thread that settles may hold the mutex until the counts are known.
  const std::unique_lock lock(settle_mutex, std::try_to_lock);
  if (!lock.owns_lock() || gave_up) return 0;
  return pinned_data == nullptr ? adopted_state : host.state();
}

void CudaRouting::count_calls_apart() {
  unsettled = std::make_shared<UnsettledCalls>();
  unsettled->look = [owner = pinned_data, result = host.result] {
    switch (load_acquire(&result->state)) {
      case 0:
        return RouteOutcome::kUnknown;
      case RouteResult::kRefusedBySome:
        return RouteOutcome::kSomeMakeCalls;
      default:
        return RouteOutcome::kAllMakeCalls;
    }
  };
}

void CudaRouting::adopt_result() {
  adopted_state = host.state();
  if (adopted_state == 1) {
    const std::size_t num_ranks = num_rows_from_rank.size();
    const std::size_t num_local = local_expert_ids.size();
    if (host.words != nullptr) {
      const RouteWords words = words_of_host();
      num_used_rows = count_in(*words.used_rows());
      may_repeat_experts = count_in(*words.repeats()) != 0;
      copy_counts(words.from_rank(), num_ranks, num_rows_from_rank);
      copy_counts(words.to_rank(), num_ranks, num_rows_to_rank);
      copy_counts(words.rows_per_expert(), num_local, num_rows_per_local_expert);
      if (layout != Layout::kTokens) copy_counts(words.row_offsets(), num_local + 1, expert_row_offsets);
    } else {
      num_used_rows = host.result->num_used_rows;
      may_repeat_experts = host.result->repeats != 0;
      num_rows_from_rank.assign(host.from_rank, host.from_rank + num_ranks);
      num_rows_to_rank.assign(host.to_rank, host.to_rank + num_ranks);
      num_rows_per_local_expert.assign(host.rows_per_expert, host.rows_per_expert + num_local);
      if (layout != Layout::kTokens) expert_row_offsets.assign(host.row_offsets, host.row_offsets + num_local + 1);
    }
    source = ConstTensorView(source.data, DType::kInt32, {num_used_rows, 2});
  }
  pinned_data->is_written = true;
  pinned_data.reset();
}

}  // namespace ferry::cuda
