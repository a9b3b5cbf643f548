#ifndef FERRY_TESTS_UCX_CARD_FAKE_DRIVER_HPP
#define FERRY_TESTS_UCX_CARD_FAKE_DRIVER_HPP

/// A CUDA driver without GPUs: libcuda.so.1 with the functions that GpuCopies calls. Streams copy at once; kernels, all
/// of them that of a mover, are threads.

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace ferry::test {

struct FakeDriver {
  std::mutex mutex;  ///< guards all members

  // What has been called.
  int num_copies = 0;
  int num_questions = 0;  ///< about the GPU of an address
  int num_launches = 0;

  // Settings.
  bool refuses_copies = false;
  bool refuses_launches = false;
  bool has_kernels = false;  ///< else no mover can be made
  /// The kernel ends after so many commands, or when it has found none so often.
  std::uint64_t max_commands = ~std::uint64_t{0};
  std::uint64_t max_looks = 1000;

  static FakeDriver& instance();
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_UCX_CARD_FAKE_DRIVER_HPP
