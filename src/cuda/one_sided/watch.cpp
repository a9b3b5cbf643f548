#include "cuda/one_sided/watch.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <system_error>

namespace ferry::cuda {
namespace {

/// Interval of PeerWatch: a look costs a few system calls for each rank.
constexpr std::chrono::milliseconds kInterval{20};
/// Looks without a request, one second of them, before the network may sleep.
constexpr int kStillLooks = 50;

}  // namespace

OneSidedWatch::~OneSidedWatch() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  ending_.notify_one();
  if (thread_.joinable()) thread_.join();
}

Status OneSidedWatch::start() {
  try {
    thread_ = std::thread([this] { watch(); });
  } catch (const std::system_error& error) {
    return Status(
        ErrorCode::kSystem,
        fmt::format("OneSided::create: cannot start the thread that watches the peers: {}; raise the limit of "
                    "threads (ulimit -u)",
                    error.what()));
  }
  pthread_setname_np(thread_.native_handle(), "ferry-watch");
  return {};
}

void OneSidedWatch::watch() noexcept {
  std::unique_lock lock(mutex_);
  while (!ending_.wait_for(lock, kInterval, [this] { return ends_; })) {
    lock.unlock();
    look();
    lock.lock();
  }
}

void OneSidedWatch::look() {
  if (source_ != nullptr) {
    const std::uint64_t taken = source_->num_taken();
    if (taken != last_taken_ || source_->has_news()) {
      last_taken_ = taken;
      num_still_looks_ = 0;
      expect_requests();
    } else if (++num_still_looks_ == kStillLooks) {
      source_->keep_polling(false);
    }
  }
  if (stopped_) return;
  const bool lost = !fabric_.presence().ok();
  // The last data of a rank has arrived before the second look.
  if (lost && lost_before_) {
    stop_kernels(errors_, ::ferry::device::stop_word::kRankLost);
    stopped_ = true;
  }
  lost_before_ = lost;
}

void OneSidedWatch::expect_requests() {
  if (source_ == nullptr) return;
  source_->keep_polling(true);
  fabric_.driver()->wake();
}

void OneSidedWatch::stop_kernels(::ferry::device::ErrorRecord& errors, std::uint64_t why) {
  const std::atomic_ref word(errors.stop);
  // Another thread may have stored a higher value.
  std::uint64_t said = word.load(std::memory_order_relaxed);
  while (said < why && !word.compare_exchange_weak(said, why, std::memory_order_release)) {
  }
}

}  // namespace ferry::cuda
