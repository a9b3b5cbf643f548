#ifndef FERRY_TESTS_UCX_CARD_FAKE_DRIVER_HPP
#define FERRY_TESTS_UCX_CARD_FAKE_DRIVER_HPP

/// A CUDA driver without GPUs: libcuda.so.1 with the functions that GpuCopies calls. Streams copy as soon as they may.

#include <cstddef>
#include <functional>
#include <mutex>

namespace ferry::test {

struct FakeDriver {
  std::mutex mutex;  ///< guards all members

  // What has been called.
  int num_copies = 0;
  int num_batches = 0;
  int num_copies_of_batches = 0;
  int num_events = 0;
  int num_questions = 0;  ///< about the GPU of an address

  // Settings.
  bool refuses_batches = false;
  bool refuses_copies = false;
  bool fails_events = false;
  /// Copies of more bytes stay in their streams, and what comes behind them.
  std::size_t max_bytes = ~std::size_t{0};
  /// Called without the mutex by each call that begins copies.
  std::function<void()> on_copy{};

  static FakeDriver& instance();
  /// Sets max_bytes and lets the streams go on. Call without the mutex.
  void let_pass(std::size_t num_bytes);
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_UCX_CARD_FAKE_DRIVER_HPP
