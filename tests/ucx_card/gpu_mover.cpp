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

/// The least of many differences between clocks is too great by the time that the GPU's takes to the host, which is
/// less than this; they drift apart by less in the time after which it is measured anew.
constexpr std::uint64_t kClockErrorNs = 800;
constexpr std::uint64_t kClockNs = 10'000'000;

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
  ring_->next = ring_->express_next = 1;
  constexpr std::size_t kBytes = sizeof(MoverState);
  return driver_.allocate(&state_, kBytes) == CUDA_SUCCESS &&
         driver_.fill(state_, 0, kBytes, stream_) == CUDA_SUCCESS && driver_.synchronize(stream_) == CUDA_SUCCESS &&
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
  if (state_ != 0) driver_.free(state_);
  if (ring_ != nullptr) driver_.free_host(ring_);
}

void GpuMover::start(GpuCopy copy) {
  if (is_broken_) {
    copy.done(UCS_ERR_IO_ERROR);
    return;
  }
  if (is_idle()) progress_ns_ = now_ns();
  Queue& queue = copy.is_word || copy.num_bytes <= kMoverSmall ? express_ : large_;
  if (copy.is_word) copy.behind = large_.num_ended + large_.copies.size();
  queue.copies.push_back(std::move(copy));
  submit();
}

bool GpuMover::Queue::is_full() const { return num_submitted - num_ended == std::min(copies.size(), kMaxSubmitted); }

bool GpuMover::Queue::end(std::uint64_t number) {
  if (num_ended == number) return false;
  while (num_ended < number) {
    const GpuCopy copy = std::move(copies.front());
    copies.pop_front();
    ++num_ended;
    copy.done(UCS_OK);
  }
  return true;
}

bool GpuMover::poll() {
  if (is_idle()) return false;
  set_clock();
  std::uint64_t ended = large_.num_submitted;
  for (const std::uint64_t& is_done : ring_->is_done) ended = std::min(ended, load(is_done));
  const bool any_large = large_.end(ended);
  const bool any_small = express_.end(load(ring_->express_done));
  if (any_large || any_small) {
    progress_ns_ = now_ns();
  } else {
    fail_if_broken();
  }
  submit();
  return !is_idle();
}

/// Compares the clocks, while the kernel runs.
void GpuMover::set_clock() {
  const std::uint64_t gpu_ns = load(ring_->gpu_ns);
  if (std::exchange(seen_gpu_ns_, gpu_ns) == gpu_ns) return;  // from the kernel before, perhaps
  const std::uint64_t now = now_ns();
  const std::uint64_t seen_ns = now - gpu_ns;
  least_ahead_ns_ = least_ahead_ns_ == 0 ? seen_ns : std::min(least_ahead_ns_, seen_ns);
  if (ahead_ns_ == 0 || least_ahead_ns_ < ahead_ns_) ahead_ns_ = least_ahead_ns_;
  if (now < clock_until_ns_) return;
  if (clock_until_ns_ != 0) ahead_ns_ = std::exchange(least_ahead_ns_, 0);
  clock_until_ns_ = now + kClockNs;
}

void GpuMover::submit() {
  const auto give = [](Queue& queue, MoverCommands& ring, const std::array<std::uint64_t, 4>& contents) {
    const std::uint64_t number = ++queue.num_submitted;
    std::uint64_t* word = ring.commands[number % kMoverCommands].words;
    for (const std::uint64_t content : contents) {
      for (const std::uint64_t half : {content & 0xffffffff, content >> 32}) {
        std::atomic_ref(*word++).store(number << 32 | half, std::memory_order_release);
      }
    }
  };
  // Without the GPU's time the host waits.
  const auto is_early = [this](const GpuCopy& copy) { return ahead_ns_ == 0 && now_ns() < copy.at_ns; };
  // A copy takes longer than the error of the clocks: none of its bytes is early.
  const auto size_and_time = [this](const GpuCopy& copy) {
    const bool waits = copy.at_ns != 0 && ahead_ns_ != 0;
    const std::uint64_t at = waits ? std::max<std::uint64_t>((copy.at_ns - ahead_ns_) & 0xffffffff, 1) : 0;
    return at << 32 | copy.num_bytes;
  };
  while (!large_.is_full()) {
    const GpuCopy& copy = large_.copies[large_.num_submitted - large_.num_ended];
    if (is_early(copy)) break;
    give(large_, ring_->large, {address_of(copy.to), address_of(copy.from), size_and_time(copy), 0});
  }
  while (!express_.is_full()) {
    const GpuCopy& copy = express_.copies[express_.num_submitted - express_.num_ended];
    if (is_early(copy)) break;
    if (copy.is_word) {
      const std::uint64_t at_ns = ahead_ns_ == 0 ? 0 : copy.at_ns - ahead_ns_ + kClockErrorNs;
      give(express_, ring_->express, {address_of(copy.to), copy.word, at_ns, copy.behind});
    } else {
      give(express_, ring_->express, {address_of(copy.to), address_of(copy.from), size_and_time(copy), kMoverCopy});
    }
  }
  launch_if_needed();
}

/// The kernel that ends may have missed a command. As long as there are any, this is called again.
void GpuMover::launch_if_needed() {
  if (is_broken_ || load(ring_->ended) != num_launches_) return;
  MoverLaunch launch{.ring = ring_,
                     .state = reinterpret_cast<MoverState*>(static_cast<std::uintptr_t>(state_)),
                     .first = load(ring_->next),
                     .express_first = load(ring_->express_next),
                     .number = num_launches_ + 1};
  if (launch.first > large_.num_submitted && launch.express_first > express_.num_submitted) return;
  ++num_launches_;
  const DriverCall call(driver_, context_);
  std::array<void*, 1> arguments{&launch};
  if (driver_.launch(kernel_, kMoverBlocks + 1, 1, 1, kMoverThreads, 1, 1, 0, stream_, arguments.data(), nullptr) !=
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
  for (Queue* const queue : {&large_, &express_}) {
    for (const GpuCopy& copy : std::exchange(queue->copies, {})) copy.done(UCS_ERR_IO_ERROR);
    queue->num_ended = queue->num_submitted;
  }
}

}  // namespace ferry::ucx_card
