/// C interface of the observation of kernel launches.

#include "ferry/launches.hpp"

#include <atomic>

#include "ferry/ferry.h"

namespace ferry::c {
namespace {

std::atomic<ferry_launch_observer> observer{nullptr};

void tell(const KernelLaunch& launch) {
  const ferry_launch_observer observe = observer.load(std::memory_order_acquire);
  if (observe == nullptr) return;
  ferry_kernel_launch told{};
  told.struct_size = sizeof(told);
  told.shared_bytes = launch.shared_bytes;
  told.num_blocks = launch.num_blocks;
  told.num_copy_blocks = launch.num_copy_blocks;
  told.num_threads = launch.num_threads;
  observe(&told);
}

}  // namespace
}  // namespace ferry::c

void ferry_observe_launches(ferry_launch_observer observer) {
  ferry::c::observer.store(observer, std::memory_order_release);
  ferry::observe_launches(observer != nullptr ? &ferry::c::tell : nullptr);
}
