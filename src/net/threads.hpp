#ifndef FERRY_NET_THREADS_HPP
#define FERRY_NET_THREADS_HPP

/// Threads that a process can start, tried before UCX starts its own: UCX ends the process if it cannot.

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "ferry/status.hpp"

namespace ferry::net {

/// Most threads that the network of a rank takes: one drives it, one is UCX's, and one receives for each scope.
inline constexpr int kMaxThreads = 4;

/// Idle threads. As long as they live, nothing else takes their share of a limit of this user or this container.
class ReservedThreads {
 public:
  ReservedThreads() = default;
  ReservedThreads(const ReservedThreads&) = delete;
  ReservedThreads& operator=(const ReservedThreads&) = delete;
  ~ReservedThreads() { give_back(); }

  /// Call once, or again after give_back().
  /// @errors kSystem: fewer than `count` threads could be started; none is reserved then
  Status reserve(int count);
  /// Returns when as many threads can be started again.
  void give_back();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;  // guarded by mutex_
  std::vector<int> ids_;  // guarded by mutex_: the system's numbers
  std::vector<std::thread> threads_;
};

}  // namespace ferry::net

#endif  // FERRY_NET_THREADS_HPP
