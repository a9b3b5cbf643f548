/// The network stage of dispatch and combine alone: as many items of the same size go through the same rings to all
/// rail peers, but they are neither filled nor read. The time that a call takes beyond this is spent on memory.
/// With --kernel-rings the rings are those of GPU ranks, on any machine.
///
/// One process a rank, started as torchrun does it, or --threads. Rank 0 prints JSON: an iteration lasts from the first
/// rank's start to the last rank's end, by the clock that processes of one machine share.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "call/exchange.hpp"
#include "ferry/bootstrap.hpp"
#include "options.hpp"

namespace {

using ferry::Bootstrap;
using ferry::Result;
using ferry::Status;

struct Plan {
  int num_nodes = 2;
  std::int64_t num_items = 4096;  // to each rail peer
  std::size_t item_bytes = 14'400;
  int num_iterations = 5;
  int num_warmup = 1;
  double timeout_s = 120;
  int num_threads = 0;  // 0: this process is one rank
  std::string transport = "auto";
  bool kernel_rings = false;
  ferry::rail::RingShape shape = ferry::rail::kernel_ring_shape(2);

  std::int64_t timeout_ns() const { return static_cast<std::int64_t>(timeout_s * ferry::kNsPerSecond); }
};

struct Span {
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};

/// Rings in memory that the network library did not allocate.
struct OwnMemory {
  std::unique_ptr<std::byte, FreeMemory> block;
  ferry::call::KernelRings rings{};

  static OwnMemory take(const ferry::Topology& topology, const ferry::rail::RingShape& shape) {
    constexpr std::size_t kPageBytes = 4096;
    const auto round_up = [](std::size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; };
    const std::size_t words_bytes =
        round_up(static_cast<std::size_t>(topology.num_nodes()) * sizeof(ferry::net::RingWords));
    const std::size_t rails_bytes = round_up(ferry::rail::Rails::memory_bytes(topology, shape));
    OwnMemory memory;
    memory.rings.shape = shape;
    memory.block.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, words_bytes + rails_bytes)));
    if (memory.block == nullptr) {
      memory.rings.status = Status(ferry::ErrorCode::kSystem, "rail_stage: no memory for the rings");
      return memory;
    }
    std::memset(memory.block.get(), 0, words_bytes + rails_bytes);
    memory.rings.words = reinterpret_cast<ferry::net::RingWords*>(memory.block.get());
    memory.rings.memory = {memory.block.get() + words_bytes, ferry::rail::Rails::memory_bytes(topology, shape)};
    return memory;
  }
};

class Stage {
 public:
  /// Collective, as a backend over several nodes does it.
  static Result<std::unique_ptr<Stage>> create(const Plan& plan, Bootstrap* bootstrap) {
    ferry::BackendContext context;
    context.bootstrap = bootstrap;
    context.topology = {bootstrap->rank(), bootstrap->num_ranks(), bootstrap->num_ranks() / plan.num_nodes};
    context.options.timeout_ns = plan.timeout_ns();
    context.options.transport = plan.transport;
    OwnMemory memory;
    if (plan.kernel_rings) memory = OwnMemory::take(context.topology, plan.shape);
    ferry::call::KernelRingsSource source;
    source.make = [&memory](bool /*in_gpu*/) { return memory.rings; };
    Result<std::unique_ptr<ferry::call::CallSync>> sync =
        ferry::call::CallSync::create(context, plan.kernel_rings ? &source : nullptr);
    if (!sync.ok()) return sync.status();
    auto stage = std::make_unique<Stage>(std::move(memory), std::move(*sync));
    if (plan.kernel_rings) stage->rails().keep_polling(true);
    if (plan.item_bytes % 16 != 0 || plan.item_bytes > stage->rails().chunk_capacity()) {
      return Status(ferry::ErrorCode::kInvalidArgument,
                    fmt::format("--item-bytes is {}, expected a multiple of 16 up to {}, which a chunk holds",
                                plan.item_bytes, stage->rails().chunk_capacity()));
    }
    return stage;
  }
  Stage(OwnMemory memory, std::unique_ptr<ferry::call::CallSync> sync)
      : memory_(std::move(memory)), sync_(std::move(sync)) {}

  Status run(const Plan& plan) {
    const ferry::rail::Flow flow{plan.num_items, plan.num_items, plan.item_bytes, plan.item_bytes};
    const std::vector<ferry::rail::Flow> flows(static_cast<std::size_t>(plan.num_nodes), flow);
    ferry::call::Exchange exchange(*sync_, flows, "to send items or make room for more");
    while (!exchange.finished()) {
      exchange.begin_turn();
      bool moved = false;
      for (const int node : rails().peer_nodes()) {
        ferry::rail::Ring& ring = rails().ring(node);
        if (const ferry::rail::Ring::Batch batch = ring.reserve(); batch.num_items > 0) {
          ring.commit(batch);
          moved = true;
        }
      }
      for (const int node : rails().peer_nodes()) {
        ferry::rail::Ring& ring = rails().ring(node);
        const std::size_t num_bytes = ring.front().size();
        if (num_bytes == 0) continue;
        ring.release(static_cast<std::int64_t>(num_bytes / plan.item_bytes));
        moved = true;
      }
      if (Status status = exchange.end_turn(moved); !status.ok()) return status;
    }
    return {};
  }

  std::uint64_t sent_bytes() {
    // What was committed before is counted once the network has answered.
    (void)rails().paths();
    std::uint64_t bytes = 0;
    for (const int node : rails().peer_nodes()) bytes += rails().traffic(node).put_bytes;
    return bytes;
  }

  ferry::rail::RingShape ring_shape() { return rails().chunks().shape; }

 private:
  ferry::rail::Rails& rails() { return sync_->rails(); }

  OwnMemory memory_;
  std::unique_ptr<ferry::call::CallSync> sync_;
};

/// Values that the ranks measured, by rank.
template <typename Value>
Result<std::vector<Value>> gather(Bootstrap& bootstrap, const Value& mine, const Plan& plan) {
  Result<std::vector<std::vector<std::byte>>> all =
      bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)), plan.timeout_ns());
  if (!all.ok()) return all.status();
  std::vector<Value> values(all->size());
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    std::memcpy(&values[rank], (*all)[rank].data(), std::min(sizeof(Value), (*all)[rank].size()));
  }
  return values;
}

Result<std::shared_ptr<Bootstrap>> bootstrap_of_process() {
  Result<ferry::TcpBootstrapOptions> options = ferry::tcp_bootstrap_options_from_environment();
  if (!options.ok()) return options.status();
  return ferry::create_tcp_bootstrap(*options);
}

Status measure(const Plan& plan, const Result<std::shared_ptr<Bootstrap>>& bootstrap) {
  if (!bootstrap.ok()) return bootstrap.status();
  if (plan.num_nodes < 2 || (*bootstrap)->num_ranks() % plan.num_nodes != 0) {
    return Status(ferry::ErrorCode::kInvalidArgument,
                  fmt::format("--nodes is {}, expected at least 2 and a divisor of the number of ranks, which is {}",
                              plan.num_nodes, (*bootstrap)->num_ranks()));
  }
  Result<std::unique_ptr<Stage>> stage = Stage::create(plan, bootstrap->get());
  if (!stage.ok()) return stage.status();

  std::vector<std::int64_t> times_ns;
  std::uint64_t sent_before = 0;
  for (int round = 0; round < plan.num_warmup + plan.num_iterations; ++round) {
    if (round == plan.num_warmup) sent_before = (*stage)->sent_bytes();
    if (Result<std::vector<Span>> ready = gather(**bootstrap, Span(), plan); !ready.ok()) return ready.status();
    Span span{now_ns(), 0};
    if (Status status = (*stage)->run(plan); !status.ok()) return status;
    span.end_ns = now_ns();
    Result<std::vector<Span>> spans = gather(**bootstrap, span, plan);
    if (!spans.ok()) return spans.status();
    const auto starts_first = [](const Span& a, const Span& b) { return a.start_ns < b.start_ns; };
    const auto ends_first = [](const Span& a, const Span& b) { return a.end_ns < b.end_ns; };
    if (round >= plan.num_warmup) {
      times_ns.push_back(std::ranges::max_element(*spans, ends_first)->end_ns -
                         std::ranges::min_element(*spans, starts_first)->start_ns);
    }
  }
  Result<std::vector<std::uint64_t>> sent = gather(**bootstrap, (*stage)->sent_bytes() - sent_before, plan);
  if (!sent.ok()) return sent.status();
  if ((*bootstrap)->rank() != 0) return {};
  std::uint64_t sent_bytes = 0;
  for (std::uint64_t bytes : *sent) sent_bytes += bytes;
  const ferry::rail::RingShape shape = (*stage)->ring_shape();
  const nlohmann::json report = {{"times_ns", times_ns},
                                 {"sent_bytes", sent_bytes / static_cast<std::uint64_t>(plan.num_iterations)},
                                 {"num_chunks", shape.num_chunks},
                                 {"chunk_bytes", shape.chunk_bytes}};
  std::puts(report.dump().c_str());
  return {};
}

Status measure_threads(const Plan& plan) {
  Result<std::vector<std::shared_ptr<Bootstrap>>> bootstraps = ferry::create_in_process_bootstraps(plan.num_threads);
  if (!bootstraps.ok()) return bootstraps.status();
  std::vector<Status> statuses(bootstraps->size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < bootstraps->size(); ++rank) {
    threads.emplace_back([&, rank] { statuses[rank] = measure(plan, (*bootstraps)[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  const auto failed = std::ranges::find_if(statuses, [](const Status& status) { return !status.ok(); });
  return failed == statuses.end() ? Status() : *failed;
}

}  // namespace

int main(int argc, char** argv) {
  Plan plan;
  ferry::benchmarks::Options options(
      "The network stage of dispatch and combine alone; one rank, started as torchrun does it");
  options.add("--threads", plan.num_threads, "So many ranks, as threads of this process", {{2, 512}});
  options.add("--transport", plan.transport, "auto, ucx, or among threads loopback");
  options.add("--nodes", plan.num_nodes, "Nodes that the ranks are spread over evenly");
  options.add("--items", plan.num_items, "Items from each rank to each rail peer", {{1, 1 << 24}});
  options.add("--item-bytes", plan.item_bytes, "Bytes of an item, a multiple of 16", {{16, 512 << 10}});
  options.add_flag("--kernel-rings", plan.kernel_rings,
                   "Rings as GPU ranks of up to nine nodes have them: in memory of their own, of the shape below, and "
                   "polled without a pause");
  options.add("--chunks", plan.shape.num_chunks, "Chunks of a kernel ring", {{1, ferry::net::kMaxRingChunks}});
  options.add("--chunk-bytes", plan.shape.chunk_bytes, "Bytes of a kernel ring's chunk, a multiple of 128",
              {{ferry::rail::kMinChunkBytes, 16 << 20}});
  options.add("--iterations", plan.num_iterations, "Timed rounds", {{1, 1'000'000}});
  options.add("--warmup", plan.num_warmup, "Rounds before those", {{0, 1'000'000}});
  options.add("--timeout", plan.timeout_s, "Deadline of every wait, in seconds");
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  const Status status = plan.num_threads > 0 ? measure_threads(plan) : measure(plan, bootstrap_of_process());
  if (status.ok()) return 0;
  std::fprintf(stderr, "rail_stage: %s\n", std::string(status.message()).c_str());
  return 1;
}
