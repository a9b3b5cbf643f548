#include "cuda/memory/deferred_free.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "node/futex.hpp"

namespace ferry::cuda {
namespace {

/// Longest wait for processes that end their group at about the same time. The memory of later ones stays allocated.
constexpr std::int64_t kImporterPatienceNs = 1'000'000'000;
constexpr std::chrono::milliseconds kPollInterval{1};

struct Allocation {
  int device;
  void* data;
  Importers importers;
};

struct Resting {
  std::mutex mutex;
  int num_groups = 0;                   // guarded by mutex
  std::vector<Allocation> allocations;  // guarded by mutex
};

/// Never destroyed: groups may end after static objects.
Resting& resting() {
  static auto* const all = new Resting;
  return *all;
}

void free_now(const Allocation& allocation) {
  const DeviceGuard guard(allocation.device);
  // Without the device there is nothing left to give back: the process is ending.
  if (!guard.status().ok()) return;
  const RelaxedCapture relaxed;
  cudaFree(allocation.data);
}

bool is_open(const Allocation& allocation) {
  return std::ranges::any_of(allocation.importers, [](const auto& link) { return !link->gone(); });
}

/// Frees memory that no process has open any more. Under the lock.
void free_resting(std::vector<Allocation>& allocations, std::int64_t patience_ns) {
  const std::int64_t deadline_ns = node::monotonic_ns() + patience_ns;
  while (std::ranges::any_of(allocations, is_open) && node::monotonic_ns() < deadline_ns) {
    std::this_thread::sleep_for(kPollInterval);
  }
  std::erase_if(allocations, [](const Allocation& allocation) {
    if (is_open(allocation)) return false;
    free_now(allocation);
    return true;
  });
}

}  // namespace

LiveGroup::LiveGroup() {
  Resting& all = resting();
  const std::lock_guard lock(all.mutex);
  if (all.num_groups == 0) free_resting(all.allocations, 0);
  ++all.num_groups;
}

LiveGroup::~LiveGroup() {
  Resting& all = resting();
  // Under the lock, so that no group begins meanwhile.
  const std::lock_guard lock(all.mutex);
  if (--all.num_groups == 0) free_resting(all.allocations, kImporterPatienceNs);
}

void free_without_groups(int device, void* data, Importers importers) try {
  Resting& all = resting();
  const std::lock_guard lock(all.mutex);
  all.allocations.push_back({device, data, std::move(importers)});
  if (all.num_groups == 0) free_resting(all.allocations, kImporterPatienceNs);
} catch (const std::bad_alloc&) {
  // Called from destructors: memory that cannot be recorded stays allocated until the process ends.
}

std::size_t num_resting_blocks() {
  Resting& all = resting();
  const std::lock_guard lock(all.mutex);
  return all.allocations.size();
}

}  // namespace ferry::cuda
