#include "cuda/far/link.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "call/kernel_rings.hpp"
#include "core/create_together.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/memory/card_memory.hpp"
#include "net/gpu_direct.hpp"
#include "net/threads.hpp"
#include "node/futex.hpp"
#include "node/page_heap.hpp"
#include "plan/to_size.hpp"
#include "rail/network.hpp"

namespace ferry::cuda {
namespace {

/// Time to send what was posted to peers that may not answer.
constexpr std::int64_t kLastWordsNs = 1'000'000'000;

/// Exchange of the ranks: succeeds on all or fails on all. `failure` is set too where it is not null: the creation then
/// goes on.
Status meet(const BackendContext& context, const Status& mine, Status* failure) {
  const std::int64_t timeout_ns = context.options.timeout_ns;
  if (failure == nullptr) return gather_or_fail(*context.bootstrap, mine, {}, timeout_ns).status();
  const Result<Attempt> attempt = gather_attempt(*context.bootstrap, mine, {}, timeout_ns);
  if (!attempt.ok()) return attempt.status();
  *failure = attempt->failure;
  return attempt->failure;
}

/// Pinned memory of a rank: first what the network addresses by offsets, an inbox and what words and records leave
/// from. Inbox and outbox are not here if they are in GPU memory; a word for atomics that change nothing then comes
/// first.
struct FarMemory {
  std::byte* inbox = nullptr;
  std::byte* staging = nullptr;
  std::size_t network_bytes = 0;
  FarPost* posts = nullptr;
  std::uint64_t* done = nullptr;
  std::uint64_t* left = nullptr;
  std::uint64_t* granted = nullptr;
  std::byte* outbox = nullptr;
  std::size_t size_bytes = 0;

  static FarMemory at(std::byte* base, const FarLayout& layout) {
    const std::size_t num_ranks = to_size(layout.num_ranks);
    plan::Carver carver(base);
    FarMemory memory;
    memory.inbox = carver.take<std::byte>(layout.in_gpu ? sizeof(std::uint64_t) : to_size(layout.inbox_bytes));
    memory.staging = carver.take<std::byte>(FarSource::num_staging_bytes(layout));
    memory.network_bytes = carver.used_bytes();
    // Posts take whole pairs of cache lines.
    carver.take<std::byte>((alignof(FarPost) - carver.used_bytes() % alignof(FarPost)) % alignof(FarPost));
    memory.posts = carver.take<FarPost>(kFarMessages * num_ranks);
    memory.done = carver.take<std::uint64_t>(to_size(kFarKinds) * kMaxCallBlocks);
    memory.left = carver.take<std::uint64_t>(kFarMessages * num_ranks);
    memory.granted = carver.take<std::uint64_t>(to_size(kFarKinds) * kFarGrantSlots);
    memory.outbox = carver.take<std::byte>(layout.in_gpu ? 0 : to_size(layout.outbox_bytes));
    memory.size_bytes = carver.used_bytes();
    return memory;
  }
};

/// Every rank begins with a grant of each of its sets, as in the window. `grants`: those of an inbox.
void write_first_grants(const FarLayout& layout, std::uint64_t* granted, std::uint64_t* grants) {
  for (int kind = 0; kind < kFarKinds; ++kind) {
    for (std::uint64_t number = 1; number <= kFarSets; ++number) {
      const std::uint64_t word = number << 32 | (number - 1);
      granted[to_size(kind) * kFarGrantSlots + number % kFarGrantSlots] = word;
      for (int rank = 0; rank < layout.num_ranks; ++rank) {
        grants[to_size(layout.grant_at(kind, rank, number) - layout.grants) / sizeof(word)] = word;
      }
    }
  }
}

/// GPU memory that cards read, which has one address.
Result<PinnedBlock> take_gpu_block(int device, std::size_t num_bytes, std::string_view operation) {
  Result<std::shared_ptr<std::byte>> memory = take_card_memory(device, num_bytes, operation);
  if (!memory.ok()) return memory.status();
  std::byte* const data = memory->get();
  return PinnedBlock{std::move(*memory), data};
}

}  // namespace

/// Tells that a rank has answered.
class FarLink::Answer final : public one_sided::Completion {
 public:
  void done(std::uint64_t /*value*/) override { is_here_.store(true, std::memory_order_release); }
  void lost(int /*peer*/) override {}
  bool is_here() const { return is_here_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> is_here_{false};
};

std::size_t FarLink::memory_bytes(const FarLayout& layout) { return FarMemory::at(nullptr, layout).size_bytes; }

std::size_t FarLink::gpu_memory_bytes(const FarLayout& layout) {
  if (!layout.in_gpu) return 0;
  // With what the engine needs for its probes.
  return node::round_up_to_page(to_size(layout.inbox_bytes + layout.outbox_bytes)) +
         net::gpu_probe_bytes(to_size(layout.num_ranks));
}

Status FarLink::take_memory(const BackendContext& context, const Parts& parts, const FarLayout& layout) {
  constexpr std::string_view kClearing = "Group::create: preparing latency mode between nodes";
  Result<PinnedBlock> block = take_pinned(memory_bytes(layout));
  if (!block.ok()) return block.status();
  block_ = std::move(*block);
  held_bytes_.store(memory_bytes(layout), std::memory_order_relaxed);
  device_ = parts.device;
  const std::size_t gpu_bytes = gpu_memory_bytes(layout);
  if (layout.in_gpu) {
    Result<std::shared_ptr<std::byte>> memory = take_card_memory(parts.device, gpu_bytes);
    if (!memory.ok()) return memory.status();
    gpu_ = std::move(*memory);
    held_bytes_.fetch_add(gpu_bytes, std::memory_order_relaxed);
  }
  Result<std::shared_ptr<std::byte>> state = parts.memory->take(sizeof(FarState));
  if (!state.ok()) return state.status();
  state_ = std::move(*state);

  const FarMemory memory = FarMemory::at(block_.data.get(), layout);
  std::vector<std::uint64_t> grants(to_size(kFarKinds * layout.num_ranks) * kFarGrantSlots);
  write_first_grants(layout, memory.granted, grants.data());
  const std::size_t grants_bytes = grants.size() * sizeof(grants[0]);
  const RelaxedCapture relaxed;
  cudaStream_t stream = parts.stream->get();
  Status status = runtime_status(cudaMemsetAsync(state_.get(), 0, sizeof(FarState), stream), kClearing);
  if (layout.in_gpu) {
    if (status.ok()) {
      status = runtime_status(cudaMemsetAsync(gpu_.get(), 0, to_size(layout.inbox_bytes), stream), kClearing);
    }
    if (status.ok()) {
      status = runtime_status(
          cudaMemcpyAsync(gpu_.get() + layout.grants, grants.data(), grants_bytes, cudaMemcpyHostToDevice, stream),
          kClearing);
    }
  } else {
    std::memcpy(memory.inbox + layout.grants, grants.data(), grants_bytes);
  }
  if (status.ok()) status = runtime_status(cudaStreamSynchronize(stream), kClearing);
  if (!status.ok()) return status;

  const FarMemory kernels = FarMemory::at(block_.kernel_view, layout);
  params_.layout = layout;
  params_.inbox = layout.in_gpu ? gpu_.get() : kernels.inbox;
  params_.outbox = layout.in_gpu ? gpu_.get() + layout.inbox_bytes : kernels.outbox;
  params_.outbox_of_network = reinterpret_cast<std::uintptr_t>(layout.in_gpu ? params_.outbox : memory.outbox);
  params_.inbox_of_network = layout.in_gpu ? static_cast<std::int64_t>(net::kGpuOffset) : 0;
  params_.posts = kernels.posts;
  params_.done = kernels.done;
  params_.left = kernels.left;
  params_.granted = kernels.granted;
  params_.state = reinterpret_cast<FarState*>(state_.get());
  params_.found = parts.rail_link->found_of_kernels(RailLink::FaultOf::kLatency);
  params_.rank = context.topology.rank;

  options_.layout = layout;
  options_.rank = context.topology.rank;
  options_.posts = memory.posts;
  options_.staging = memory.staging;
  options_.done = memory.done;
  options_.left = memory.left;
  options_.granted = memory.granted;
  const int rank = context.topology.rank;
  options_.copy_record = [log = *parts.call_log, rank](std::int64_t number, CallRecord* record) {
    return log.copy(rank, number, record);
  };
  options_.poll_ns = context.options.network_poll_ns;
  return {};
}

Result<std::unique_ptr<FarLink>> FarLink::create(const BackendContext& context, const Parts& parts,
                                                 const FarLayout& layout, const Status& my_status) {
  Status failure;
  const bool may_fail = layout.in_gpu && context.options.ring_memory != "gpu";
  std::unique_ptr<FarLink> link(new FarLink());
  const Status status = link->open(context, parts, layout, my_status, may_fail ? &failure : nullptr);
  if (!failure.ok()) return std::unique_ptr<FarLink>();
  if (!status.ok()) return status;
  link->is_open_ = true;
  parts.sync->state().watch_others([raw = link.get()] { return raw->find_lost(); });
  return link;
}

/// `failure`: see rail::NetworkParams::failed_attempt.
Status FarLink::open(const BackendContext& context, const Parts& parts, const FarLayout& layout,
                     const Status& my_status, Status* failure) {
  const Result<bool> keeps_order = net::cards_keep_order();
  Status status = my_status.ok() ? keeps_order.status() : my_status;
  if (status.ok()) status = take_memory(context, parts, layout);
  net::ReservedThreads threads;
  if (status.ok()) status = rail::reserve_threads(context.topology, &threads);
  // Ranks may share a limit: all keep their threads until all have enough.
  if (status = meet(context, status, failure); !status.ok()) return status;
  threads.give_back();
  std::vector<int> ranks;
  for (int rank = 0; rank < context.topology.num_ranks; ++rank) ranks.push_back(rank);
  // Every rank is an end, as in the one-sided layer.
  rail::NetworkParams params;
  params.engine.self = context.topology.rank;
  params.engine.num_peers = context.topology.num_ranks;
  params.engine.num_channels = one_sided::Driver::kNumChannels;
  params.engine.memory = {block_.data.get(), FarMemory::at(nullptr, layout).network_bytes};
  params.engine.gpu_memory = {gpu_.get(), gpu_memory_bytes(layout)};
  params.engine.cards_keep_order = *keeps_order;
  params.engine.read_back_gpu_writes = parts.rail_link->reads_back_writes();
  params.engine.timeout_ns = context.options.timeout_ns;
  params.engine.ranks = ranks;
  for (const int rank : ranks) params.engine.unused.push_back(!layout.is_far(rank));
  params.places = parts.sync->places();
  params.gpu_pci_address = parts.gpu_pci_address;
  params.failed_attempt = failure;
  sync_ = parts.sync.get();
  Result<rail::Network> network = rail::open_network(context, params, {});
  if (!network.ok()) return network.status();
  source_ = std::make_unique<FarSource>(options_);
  driver_ = std::make_unique<one_sided::Driver>(std::move(network->engine), network->options, [] {});
  status = driver_->start(network->addresses);
  if (!status.ok()) {
    status = Status(status.code(),
                    fmt::format("Group::create: connecting over {}: {}", network->describe(), status.message()),
                    status.peer());
  }
  if (status = meet(context, status, failure); !status.ok()) return status;
  if (layout.in_gpu) {
    status = await_answers(call::longest_attempt_ns(context.options.timeout_ns));
    if (!sync_->broken().ok()) return sync_->broken();
    if (status = meet(context, status, failure); !status.ok()) return status;
  }
  driver_->attach(source_.get());
  return {};
}

/// Issues a request to each far rank, by `end_ns` where it cannot be issued at once.
FarLink::Answers FarLink::ask_all(one_sided::NetworkRequest request, std::int64_t end_ns) {
  Answers answers;
  for (int idx = 0; idx < params_.layout.num_far(); ++idx) {
    request.peer = params_.layout.far_rank(idx);
    request.completion = answers.emplace_back(std::make_unique<Answer>()).get();
    while (!driver_->try_issue(request) && node::monotonic_ns() < end_ns) driver_->progress();
  }
  return answers;
}

/// Waits until each far rank has answered: its card then reaches this rank's GPU memory, and this rank's card its.
Status FarLink::await_answers(std::int64_t limit_ns) {
  const FarLayout& layout = params_.layout;
  // The first operation to a rank can be issued. This one changes nothing.
  const net::AtomicOp nothing{.kind = net::AtomicOp::Kind::kAdd, .offset = 0};
  const Answers answers = ask_all({.kind = one_sided::NetworkRequest::Kind::kAtomic, .op = nothing}, 0);
  call::GroupState& state = sync_->state();
  const std::int64_t begin_ns = node::monotonic_ns();
  Status status;
  state.expect_wait(begin_ns);
  driver_->begin_wait();
  for (int idx = 0; idx < layout.num_far() && status.ok();) {
    const int rank = layout.far_rank(idx);
    if (answers[to_size(idx)]->is_here()) {
      ++idx;
    } else if (status = driver_->peer_status(rank); status.ok()) {
      if (!driver_->progress()) std::this_thread::yield();
      const std::int64_t now_ns = node::monotonic_ns();
      status = state.check_interrupt(now_ns, "Group::create");
      if (status.ok() && now_ns - begin_ns >= limit_ns) {
        constexpr double kNsPerSecond = 1e9;
        status = Status(ErrorCode::kTimeout,
                        fmt::format("Group::create: the card of rank {} did not reach its GPU in {:.1f} s", rank,
                                    static_cast<double>(limit_ns) / kNsPerSecond),
                        rank);
      }
    }
  }
  driver_->end_wait();
  for (const auto& answer : answers) driver_->forget(answer.get());
  return status;
}

/// Also wakes the driver where replays of a graph have posted something: their host does not.
Status FarLink::find_lost() {
  if (source_->has_news()) expect_posts();
  for (int idx = 0; idx < params_.layout.num_far(); ++idx) {
    const int rank = params_.layout.far_rank(idx);
    const Status status = driver_->peer_status(rank);
    if (status.ok()) continue;
    return Status(status.code(), fmt::format("lost its network connection ({})", status.message()), rank);
  }
  return {};
}

void FarLink::add_traffic(NetworkUsage& usage) const {
  const std::int64_t end_ns = node::monotonic_ns() + kLastWordsNs;
  while (source_->has_news() && node::monotonic_ns() < end_ns) driver_->progress();
  driver_->wake();  // for grants that wait for a header
  for (RailUsage& rail : usage.rails) {
    const int first = rail.rank / params_.layout.ranks_per_node * params_.layout.ranks_per_node;
    for (int rank = first; rank < first + params_.layout.ranks_per_node; ++rank) {
      const FarSource::Traffic traffic = source_->traffic(rank);
      rail.sent_bytes += traffic.sent_bytes;
      rail.num_messages += traffic.num_messages;
    }
  }
}

void FarLink::send_rest() {
  expect_posts();
  const std::int64_t end_ns = node::monotonic_ns() + kLastWordsNs;
  while (!source_->all_left() && node::monotonic_ns() < end_ns) driver_->progress();
  // The network has all of it, which is not yet at its ranks.
  const Answers answers = ask_all({.kind = one_sided::NetworkRequest::Kind::kFlush}, end_ns);
  for (int idx = 0; idx < params_.layout.num_far(); ++idx) {
    const Answer& answer = *answers[to_size(idx)];
    const int rank = params_.layout.far_rank(idx);
    while (!answer.is_here() && driver_->peer_status(rank).ok() && node::monotonic_ns() < end_ns) driver_->progress();
  }
  for (const auto& answer : answers) driver_->forget(answer.get());
}

FarLink::~FarLink() {
  if (driver_ == nullptr) return;
  sync_->state().watch_others(nullptr);
  driver_->detach(source_.get());
  // As for the rails: where the group broke, or a creation failed, not all answer.
  if (!is_open_ || !sync_->broken().ok()) driver_->limit_close_time(kLastWordsNs);
  driver_.reset();
}

Result<PinnedBlock> FarLink::take_returns(std::string_view operation, std::size_t num_bytes) {
  if (returns_.empty() || returns_bytes_ < num_bytes) {
    const std::size_t rounded = node::round_up_to_page(std::max<std::size_t>(num_bytes, 1));
    Result<PinnedBlock> block =
        gpu_ == nullptr ? take_pinned(rounded, -1, operation) : take_gpu_block(device_, rounded, operation);
    if (!block.ok()) return block.status();
    if (!returns_.empty() && !returns_used_) {
      returns_.pop_back();
      held_bytes_.fetch_sub(returns_bytes_, std::memory_order_relaxed);
    }
    returns_.push_back(std::move(*block));
    returns_bytes_ = rounded;
    returns_used_ = false;
    held_bytes_.fetch_add(rounded, std::memory_order_relaxed);
  }
  return returns_.back();
}

void FarLink::expect_posts() {
  source_->expect_posts();
  driver_->wake();
}

}  // namespace ferry::cuda
