#ifndef FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP
#define FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP

/// Copies that stand for a card's reads and writes of the memory of real GPUs: between GPUs by a kernel of its own
/// (gpu_mover.hpp), all others by the driver. One object a card; it has no thread.

#include <ucs/type/status.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace ferry::ucx_card {

class GpuCopies {
 public:
  /// Called once, by start(), poll() or the end of the object. It starts no copies.
  using Done = std::function<void(ucs_status_t)>;

  /// Null where there is no GPU, or this build has no CUDA.
  static std::unique_ptr<GpuCopies> create();
  /// Ends after all copies.
  virtual ~GpuCopies() = default;

  // By one thread at a time.
  /// Lets all GPUs of the process reach the allocation that contains `address`, until forget().
  virtual ucs_status_t share(std::byte* address) = 0;
  /// The allocation may be freed.
  virtual void forget(std::byte* address) = 0;
  /// Begins to copy between any memory of the process, in any order with other copies. Where a mover copies, not before
  /// `at_ns`; copies begun afterwards may wait for it.
  virtual void start(std::byte* to, const std::byte* from, std::size_t num_bytes, Done done,
                     std::uint64_t at_ns = 0) = 0;
  /// Begins to store a word in memory that GPUs share, once all copies begun before are there, and not before `at_ns`.
  /// False: it cannot.
  virtual bool start_word(std::byte* to, std::uint64_t word, std::uint64_t at_ns, Done done) = 0;
  /// Reports copies that have ended. Without calls of it some do not even begin. False: there are no more.
  virtual bool poll() = 0;

  /// Copies before it returns. By any thread.
  virtual ucs_status_t copy(std::byte* to, const std::byte* from, std::size_t num_bytes) = 0;
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP
