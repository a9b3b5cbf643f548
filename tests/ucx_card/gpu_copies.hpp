#ifndef FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP
#define FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP

/// Copies by the copy engines of real GPUs, which stand for a card's reads and writes of their memory. One object a
/// card; its thread starts copies and sees them end, so that neither Ferry's threads nor its multiprocessors do.

#include <ucs/type/status.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace ferry::ucx_card {

class GpuCopies {
 public:
  /// Called once, by the thread of the object, when the bytes are there.
  using Done = std::function<void(ucs_status_t)>;

  /// Null where there is no GPU, or this build has no CUDA. `spins`: the thread never sleeps.
  static std::unique_ptr<GpuCopies> create(bool spins);
  /// Ends after all copies.
  virtual ~GpuCopies() = default;

  /// Lets all GPUs of the process reach the allocation that contains `address`.
  virtual ucs_status_t share(std::byte* address) = 0;
  /// Copies between any memory of the process, in any order with other copies.
  virtual void start(std::byte* to, const std::byte* from, std::size_t num_bytes, Done done) = 0;
  /// Copies before it returns.
  virtual ucs_status_t copy(std::byte* to, const std::byte* from, std::size_t num_bytes) = 0;
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_GPU_COPIES_HPP
