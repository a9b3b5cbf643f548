#ifndef FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP
#define FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP

/// Copies by the copy engines of real GPUs, which stand for a card's reads and writes of their memory. One object a
/// card; its thread starts copies and sees them end, so that neither Ferry's threads nor its multiprocessors do.

#include <ucs/type/status.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace ferry::ucx_card {

struct GpuCopyOptions {
  bool spins = false;           ///< the thread never sleeps
  std::size_t small_bytes = 0;  ///< copies of at most so many bytes have streams of their own, before all others
  bool batches = false;         ///< one call of the driver for all small copies that are due
  bool events = false;          ///< the driver's events tell when copies have ended; else words that streams write
};

class GpuCopies {
 public:
  /// Called once, by the thread of the object, when the bytes are there.
  using Done = std::function<void(ucs_status_t)>;

  /// Null where there is no GPU, or this build has no CUDA.
  static std::unique_ptr<GpuCopies> create(const GpuCopyOptions& options);
  /// Ends after all copies.
  virtual ~GpuCopies() = default;

  /// Lets all GPUs of the process reach the allocation that contains `address`, until forget().
  virtual ucs_status_t share(std::byte* address) = 0;
  /// The allocation may be freed.
  virtual void forget(std::byte* address) = 0;
  /// Copies between any memory of the process, in any order with other copies.
  virtual void start(std::byte* to, const std::byte* from, std::size_t num_bytes, Done done) = 0;
  /// Copies before it returns.
  virtual ucs_status_t copy(std::byte* to, const std::byte* from, std::size_t num_bytes) = 0;
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP
