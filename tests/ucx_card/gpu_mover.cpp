#include "ucx_card/gpu_mover.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "node/pause_core.hpp"
#include "ucx_card/sleep.hpp"

namespace ferry::ucx_card {
namespace {

constexpr std::uint64_t kDoubtNs = 100'000'000;        // without an end: the driver is asked for errors
constexpr std::uint64_t kPatienceNs = 10'000'000'000;  // of the last copies

/// The kernel, as it ends, writes in place of the command behind the last one, which has that of one round before.
constexpr std::size_t kMaxSubmitted = kMoverCommands - 1;

std::uint64_t load(const std::uint64_t& word) {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace

std::unique_ptr<GpuMover> GpuMover::create(const Driver& driver, int device) {
  std::unique_ptr<GpuMover> mover(new GpuMover(driver));
  return mover->open(device) ? std::move(mover) : nullptr;
}

bool GpuMover::open(int device) {
  if (driver_.retain_context(&context_, device) != CUDA_SUCCESS) return false;
  const DriverCall call(driver_, context_);
  int least = 0;
  int greatest = 0;
  if (driver_.priority_range(&least, &greatest) != CUDA_SUCCESS ||
      driver_.stream_create(&stream_, CU_STREAM_NON_BLOCKING, greatest) != CUDA_SUCCESS) {
    return false;
  }
  void* ring = nullptr;
  if (driver_.host_alloc(&ring, sizeof *ring_, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
    return false;
  }
  std::memset(ring, 0, sizeof *ring_);
  ring_ = static_cast<MoverRing*>(ring);
  ring_->next = 1;
  constexpr std::size_t kBytes = sizeof(MoverCommand) * kMoverCommands;
  return driver_.allocate(&passed_, kBytes) == CUDA_SUCCESS &&
         driver_.fill(passed_, 0, kBytes, stream_) == CUDA_SUCCESS && driver_.synchronize(stream_) == CUDA_SUCCESS &&
         load_mover(&kernel_);
}

GpuMover::~GpuMover() {
  const std::uint64_t deadline_ns = now_ns() + kPatienceNs;
  while (poll() && now_ns() < deadline_ns) node::pause_core();
  fail_all();
  const DriverCall call(driver_, context_);
  if (stream_ != nullptr) {
    driver_.synchronize(stream_);  // the kernel ends when it has had nothing to do for a while
    driver_.stream_destroy(stream_);
  }
  if (passed_ != 0) driver_.free(passed_);
  if (ring_ != nullptr) driver_.free_host(ring_);
}

void GpuMover::start(GpuCopy copy) {
  if (is_broken_) {
    copy.done(UCS_ERR_IO_ERROR);
    return;
  }
  if (copies_.empty()) progress_ns_ = now_ns();
  copies_.push_back(std::move(copy));
  submit();
}

bool GpuMover::poll() {
  if (copies_.empty()) return false;
  std::uint64_t ended = num_submitted_;
  for (const std::uint64_t& is_done : ring_->is_done) ended = std::min(ended, load(is_done));
  if (num_ended_ == ended) {
    fail_if_broken();
  } else {
    progress_ns_ = now_ns();
  }
  for (; num_ended_ < ended; ++num_ended_) {
    const GpuCopy copy = std::move(copies_.front());
    copies_.pop_front();
    copy.done(UCS_OK);
  }
  submit();
  return !copies_.empty();
}

void GpuMover::submit() {
  while (num_submitted_ - num_ended_ < std::min(copies_.size(), kMaxSubmitted)) {
    const GpuCopy& copy = copies_[num_submitted_ - num_ended_];
    const std::uint64_t number = ++num_submitted_;
    const std::array<std::uint64_t, 4> contents{address_of(copy.to), address_of(copy.from), copy.num_bytes, 0};
    std::uint64_t* word = ring_->commands[number % kMoverCommands].words;
    for (const std::uint64_t content : contents) {
      for (const std::uint64_t half : {content & 0xffffffff, content >> 32}) {
        std::atomic_ref(*word++).store(number << 32 | half, std::memory_order_release);
      }
    }
  }
  launch_if_needed();
}

/// The kernel that ends may have missed a command. As long as there are any, this is called again.
void GpuMover::launch_if_needed() {
  if (is_broken_ || load(ring_->ended) != num_launches_) return;
  std::uint64_t next = load(ring_->next);
  if (next > num_submitted_) return;
  ++num_launches_;
  const DriverCall call(driver_, context_);
  std::array<void*, 4> arguments{&ring_, &passed_, &next, &num_launches_};
  if (driver_.launch(kernel_, kMoverBlocks, 1, 1, kMoverThreads, 1, 1, 0, stream_, arguments.data(), nullptr) !=
      CUDA_SUCCESS) {
    fail_all();
  }
}

void GpuMover::fail_if_broken() {
  if (is_broken_ || now_ns() - progress_ns_ < kDoubtNs) return;
  progress_ns_ = now_ns();
  const DriverCall call(driver_, context_);
  const CUresult result = driver_.query(stream_);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) fail_all();
}

void GpuMover::fail_all() {
  is_broken_ = true;
  for (const GpuCopy& copy : std::exchange(copies_, {})) copy.done(UCS_ERR_IO_ERROR);
  num_ended_ = num_submitted_;
}

}  // namespace ferry::ucx_card
