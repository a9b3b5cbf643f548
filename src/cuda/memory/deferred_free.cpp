#include "cuda/memory/deferred_free.hpp"

#include <cuda_runtime_api.h>

#include <mutex>
#include <new>
#include <vector>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"

namespace ferry::cuda {
namespace {

struct Allocation {
  int device;
  void* data;
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

}  // namespace

LiveGroup::LiveGroup() {
  Resting& all = resting();
  const std::lock_guard lock(all.mutex);
  ++all.num_groups;
}

LiveGroup::~LiveGroup() {
  Resting& all = resting();
  // Under the lock, so that no group begins meanwhile.
  const std::lock_guard lock(all.mutex);
  if (--all.num_groups > 0) return;
  for (const Allocation& allocation : all.allocations) free_now(allocation);
  all.allocations.clear();
}

void free_without_groups(int device, void* data) try {
  Resting& all = resting();
  const std::lock_guard lock(all.mutex);
  if (all.num_groups > 0)
    all.allocations.push_back({device, data});
  else
    free_now({device, data});
} catch (const std::bad_alloc&) {
  // Called from destructors: what cannot be remembered stays taken until the process ends.
}

}  // namespace ferry::cuda
