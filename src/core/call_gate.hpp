#ifndef FERRY_CORE_CALL_GATE_HPP
#define FERRY_CORE_CALL_GATE_HPP

/// Serialises the calls of a group, from any threads, and admits them only in the process that created the group.

#include <atomic>
#include <mutex>
#include <thread>

#include "core/forks.hpp"

namespace ferry {

class CallGate {
 public:
  /// Whether this process is a fork of the one that created the group, and has only a copy of it.
  bool is_copy() const { return num_forks() != num_forks_; }

 private:
  friend class CallPass;
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_{};  ///< holder of mutex_; a thread compares it only with its own id, so relaxed
  const int num_forks_ = num_forks();
};

/// Held by a call while it runs.
class CallPass {
 public:
  CallPass() = default;
  CallPass(const CallPass&) = delete;
  CallPass& operator=(const CallPass&) = delete;
  ~CallPass() {
    if (gate_ == nullptr) return;
    gate_->holder_.store({}, std::memory_order_relaxed);
    gate_->mutex_.unlock();
  }

  /// False: this thread is already in a call.
  bool wait_for(CallGate& gate) {
    if (is_held_here(gate)) return false;
    gate.mutex_.lock();
    hold(gate);
    return true;
  }
  /// False: a call is running.
  bool try_take(CallGate& gate) {
    if (is_held_here(gate) || !gate.mutex_.try_lock()) return false;
    hold(gate);
    return true;
  }

 private:
  static bool is_held_here(const CallGate& gate) {
    return gate.holder_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  void hold(CallGate& gate) {
    gate_ = &gate;
    gate.holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }

  CallGate* gate_ = nullptr;
};

}  // namespace ferry

#endif  // FERRY_CORE_CALL_GATE_HPP
