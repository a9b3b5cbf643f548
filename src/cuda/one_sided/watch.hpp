#ifndef FERRY_CUDA_ONE_SIDED_WATCH_HPP
#define FERRY_CUDA_ONE_SIDED_WATCH_HPP

/// Watches for lost ranks and wakes the thread that reads requests, neither of which kernels can do. One thread per
/// rank checks both every 20 ms, makes no CUDA call, and informs the kernels through a word in pinned memory.

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "ferry/device/world.hpp"
#include "one_sided/fabric.hpp"
#include "one_sided/ring_source.hpp"

namespace ferry::cuda {

class OneSidedWatch {
 public:
  /// All arguments must outlive the watch. `source`: null with one node.
  OneSidedWatch(one_sided::Fabric& fabric, ::ferry::device::ErrorRecord& errors, one_sided::RingSource* source)
      : fabric_(fabric), errors_(errors), source_(source) {}
  ~OneSidedWatch();
  OneSidedWatch(const OneSidedWatch&) = delete;
  OneSidedWatch& operator=(const OneSidedWatch&) = delete;

  /// @errors kSystem: no thread could be started
  Status start();
  /// Wakes the network, because kernels are about to write requests and cannot wake it.
  void expect_requests();
  /// Ends waits of kernels: see device::stop_word.
  static void stop_kernels(::ferry::device::ErrorRecord& errors, std::uint64_t why);

 private:
  void watch() noexcept;
  void look();

  one_sided::Fabric& fabric_;
  ::ferry::device::ErrorRecord& errors_;
  one_sided::RingSource* source_;
  // Used by the watch's thread only.
  bool lost_before_ = false;
  bool stopped_ = false;
  std::uint64_t last_taken_ = 0;
  int num_still_looks_ = 0;

  std::mutex mutex_;
  std::condition_variable ending_;
  bool ends_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_ONE_SIDED_WATCH_HPP
