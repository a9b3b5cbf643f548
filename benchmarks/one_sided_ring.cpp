/// Requests per second that one proxy takes from a ring (ferry/device/proxy_request.hpp) whose writers are threads:
/// 8-byte puts to a rank of another node over the loopback engine, or UCX. And how long a fetch_add of one writer takes
/// until it is answered: what a kernel's takes, less its own trips to memory. Two ranks, threads of this process.
/// Prints JSON.

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "one_sided/fabric.hpp"
#include "one_sided/ring_source.hpp"
#include "options.hpp"
#include "support/host_ring.hpp"

namespace {

using ferry::device::Request;
using ferry::device::RequestOp;

constexpr int kNumRanks = 2;
constexpr std::size_t kHeapBytes = std::size_t{1} << 20;
constexpr std::uint64_t kNumSlots = 512;  // as cuda/one_sided/memory.cpp has them
constexpr std::int64_t kTimeoutNs = 120 * ferry::kNsPerSecond;

struct Plan {
  std::uint64_t num_requests = 1'000'000;
  int num_writers = 1;
  int num_runs = 3;
  int num_fetches = 10'000;
  std::string transport = "loopback";
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Requests per second of one run; rank 0 sends.
double run(const ferry::test::HostRing& ring, const Plan& plan) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> writers;
  const std::uint64_t share = plan.num_requests / static_cast<std::uint64_t>(plan.num_writers);
  for (int writer = 0; writer < plan.num_writers; ++writer) {
    writers.emplace_back([&ring, share, writer] {
      const std::uint64_t offset = static_cast<std::uint64_t>(writer) * 64;
      for (std::uint64_t i = 0; i < share; ++i) {
        ring.post({.op = RequestOp::kPutValue, .peer = 1, .remote_offset = offset, .value = i});
      }
      ring.quiet();
    });
  }
  for (std::thread& writer : writers) writer.join();
  return static_cast<double>(share) * plan.num_writers / seconds_since(start);
}

/// Nanoseconds of the middle one of so many; rank 0 asks. 0: one was not answered, or there are none.
std::int64_t median_fetch_ns(const ferry::test::HostRing& ring, int num_fetches) {
  std::vector<std::int64_t> times;
  for (int i = 0; i < num_fetches; ++i) {
    const auto start = std::chrono::steady_clock::now();
    std::uint64_t before = 0;
    if (!ring.fetch({.op = RequestOp::kFetchAdd, .peer = 1, .remote_offset = 8, .value = 1}, before)) return 0;
    times.push_back(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count());
  }
  if (times.empty()) return 0;
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::ranges::nth_element(times, middle);
  return *middle;
}

/// Figures that rank 0 has measured.
struct Figures {
  std::vector<double> rates;
  std::int64_t fetch_ns = 0;
};

ferry::Status run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap, const Plan& plan, Figures& figures) {
  ferry::BackendContext base;
  base.bootstrap = bootstrap.get();
  base.topology = {bootstrap->rank(), kNumRanks, 1};
  base.options.transport = plan.transport;
  base.options.timeout_ns = kTimeoutNs;
  auto fabric = ferry::one_sided::Fabric::create(base, kHeapBytes);
  if (!fabric.ok()) return fabric.status();
  ferry::test::HostRing ring(kNumSlots, 16, kHeapBytes);
  ferry::one_sided::RingSource::Options options;
  options.ring = ring.memory();
  options.limits = {.num_peers = kNumRanks,
                    .local_bytes = kHeapBytes + ring.staging_bytes(),
                    .remote_bytes = kHeapBytes,
                    .timeout_ns = kTimeoutNs};
  options.heap = (*fabric)->heap();
  options.staging = ring.staging();
  for (int rank = 0; rank < kNumRanks; ++rank) options.peer_heaps.push_back((*fabric)->peer_heap(rank));
  options.heap_offset = (*fabric)->engine_offset(0);
  options.num_parts = &ferry::one_sided::Driver::num_parts;
  ferry::one_sided::RingSource source(std::move(options));
  source.keep_polling(bootstrap->rank() == 0);
  (*fabric)->driver()->attach(&source);
  ferry::Status status = bootstrap->all_gather({}, kTimeoutNs).status();
  for (int i = 0; status.ok() && bootstrap->rank() == 0 && i < plan.num_runs; ++i) {
    figures.rates.push_back(run(ring, plan));
  }
  if (status.ok()) status = bootstrap->all_gather({}, kTimeoutNs).status();
  // As where kernels run on both ranks.
  source.keep_polling(true);
  (*fabric)->driver()->wake();
  if (status.ok() && bootstrap->rank() == 0) figures.fetch_ns = median_fetch_ns(ring, plan.num_fetches);
  if (status.ok()) status = bootstrap->all_gather({}, kTimeoutNs).status();
  if (status.ok()) status = source.status();
  (*fabric)->driver()->detach(&source);
  fabric->reset();
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  Plan plan;
  ferry::benchmarks::Options options("Requests per second through a ring of requests");
  options.add("--requests", plan.num_requests, "Requests of a run, all writers together");
  options.add("--writers", plan.num_writers, "Threads that write");
  options.add("--runs", plan.num_runs, "Runs of which each rate is reported");
  options.add("--fetches", plan.num_fetches, "Fetches timed one after the other");
  options.add("--transport", plan.transport, "loopback or ucx");
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  auto bootstraps = ferry::create_in_process_bootstraps(kNumRanks);
  if (!bootstraps.ok()) return 1;
  Figures figures;
  std::vector<ferry::Status> statuses(kNumRanks);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < kNumRanks; ++rank) {
    ranks.emplace_back([&, rank] { statuses[rank] = run_rank((*bootstraps)[rank], plan, figures); });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const ferry::Status& status : statuses) {
    if (status.ok()) continue;
    fmt::print(stderr, "one_sided_ring: {}\n", status.message());
    return 1;
  }
  const nlohmann::json report = {{"transport", plan.transport},
                                 {"writers", plan.num_writers},
                                 {"requests", plan.num_requests},
                                 {"requests_per_s", figures.rates},
                                 {"fetch_ns", figures.fetch_ns}};
  fmt::print("{}\n", report.dump(2));
  return 0;
}
