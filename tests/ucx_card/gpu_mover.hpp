#ifndef FERRY_TESTS_UCX_CARD_GPU_MOVER_HPP
#define FERRY_TESTS_UCX_CARD_GPU_MOVER_HPP

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "ucx_card/gpu_mover_ring.hpp"
#include "ucx_card/gpu_streams.hpp"

namespace ferry::ucx_card {

/// Copies by a kernel that stays on one GPU while there is work, between memory that this GPU reaches. No two threads
/// use it at the same time.
class GpuMover {
 public:
  /// Null where the GPU cannot have one.
  static std::unique_ptr<GpuMover> create(const Driver& driver, int device);
  GpuMover(const GpuMover&) = delete;
  GpuMover& operator=(const GpuMover&) = delete;
  /// Ends after all copies.
  ~GpuMover();

  void start(GpuCopy copy);
  /// Reports copies that have ended, and launches the kernel where it is missing. False: there are no more.
  bool poll();

 private:
  /// Commands of a kind that have not ended, and their numbers.
  struct Queue {
    std::deque<GpuCopy> copies;
    std::uint64_t num_ended = 0;
    std::uint64_t num_submitted = 0;

    bool is_full() const;
    /// Reports those up to this number. False: there are none.
    bool end(std::uint64_t number);
  };

  explicit GpuMover(const Driver& driver) : driver_(driver) {}
  bool open(int device);
  bool is_idle() const { return large_.copies.empty() && express_.copies.empty(); }
  /// Gives the kernel what its rings have room for.
  void submit();
  void launch_if_needed();
  void set_clock();
  void fail_if_broken();
  void fail_all();

  const Driver& driver_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUfunction kernel_ = nullptr;
  MoverRing* ring_ = nullptr;
  CUdeviceptr state_ = 0;
  Queue large_;
  Queue express_;
  std::uint32_t num_launches_ = 0;
  /// Time by which the host's clock is ahead of the GPU's, and the time until which it is measured anew.
  std::uint64_t ahead_ns_ = 0;
  std::uint64_t least_ahead_ns_ = 0;
  std::uint64_t clock_until_ns_ = 0;
  std::uint64_t seen_gpu_ns_ = 0;
  std::uint64_t progress_ns_ = 0;  // time of the last end, or of the first start after it
  bool is_broken_ = false;
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_GPU_MOVER_HPP
