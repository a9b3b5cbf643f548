#include <atomic>

#include "cuda/driver/launch.hpp"
#include "ferry/launches.hpp"

namespace ferry {
namespace {

constinit std::atomic<LaunchObserver> launch_observer{nullptr};

}  // namespace

void observe_launches(LaunchObserver observer) { launch_observer.store(observer, std::memory_order_release); }

void cuda::note_launch(const LaunchShape& shape) {
  const LaunchObserver observer = launch_observer.load(std::memory_order_acquire);
  if (observer == nullptr) return;
  observer({.num_blocks = static_cast<int>(shape.num_blocks),
            .num_copy_blocks = static_cast<int>(shape.num_copy_blocks),
            .num_threads = static_cast<int>(shape.num_threads),
            .shared_bytes = shape.shared_bytes});
}

}  // namespace ferry
