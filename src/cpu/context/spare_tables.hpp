#ifndef FERRY_CPU_CONTEXT_SPARE_TABLES_HPP
#define FERRY_CPU_CONTEXT_SPARE_TABLES_HPP

/// Large tables of destroyed Routings, kept for the next ones: page faults in fresh memory are a third of a route's
/// time.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "plan/route_plan.hpp"

namespace ferry::cpu {

/// Tables with arbitrary contents.
struct LargeTables {
  std::vector<std::int64_t> ids;           ///< [T, K]
  std::vector<float> weights;              ///< [T, K] or empty
  plan::TokenPlan tokens;                  ///< destinations of this rank's entries
  std::vector<std::int32_t> source_table;  ///< [num_used_rows, 2] source rank and token, -1 in rows without a token
};

/// Outlives its group together with the group's Routings, which may be destroyed on any thread.
class SpareTables {
 public:
  LargeTables take() {
    const std::lock_guard lock(mutex_);
    if (spare_.empty()) return {};
    LargeTables tables = std::move(spare_.back());
    spare_.pop_back();
    return tables;
  }
  void give(LargeTables tables) noexcept try {
    const std::lock_guard lock(mutex_);
    if (spare_.size() < kMaxSpare) spare_.push_back(std::move(tables));
  } catch (const std::bad_alloc&) {
    // Surplus tables are freed.
  }
  /// Returns the memory to the system.
  void clear() {
    const std::lock_guard lock(mutex_);
    spare_.clear();
  }

 private:
  /// Two, because a program makes the next Routing before or after it drops the last one.
  static constexpr std::size_t kMaxSpare = 2;
  std::mutex mutex_;
  std::vector<LargeTables> spare_;  // guarded by mutex_
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CONTEXT_SPARE_TABLES_HPP
