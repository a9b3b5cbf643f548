#ifndef FERRY_CORE_CALL_GATE_HPP
#define FERRY_CORE_CALL_GATE_HPP

/// Lets the calls of a group in one after the other, whatever threads they come from, and only in the process that
/// created the group.

#include <mutex>

#include "core/forks.hpp"

namespace ferry {

class CallGate {
 public:
  /// Whether this process has the group as a copy of that of the one that it was forked from.
  bool is_copy() const { return num_forks() != num_forks_; }

 private:
  friend class CallPass;
  std::mutex mutex_;
  const int num_forks_ = num_forks();
};

/// Held by a call while it runs.
class CallPass {
 public:
  void wait_for(CallGate& gate) { lock_ = std::unique_lock(gate.mutex_); }
  /// False: another call is running.
  bool try_take(CallGate& gate) {
    lock_ = std::unique_lock(gate.mutex_, std::try_to_lock);
    return lock_.owns_lock();
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace ferry

#endif  // FERRY_CORE_CALL_GATE_HPP
