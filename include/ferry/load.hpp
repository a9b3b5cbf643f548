#ifndef FERRY_LOAD_HPP
#define FERRY_LOAD_HPP

/// Load of experts over a window of calls: counters for every layer of a model, and their sum over the ranks on
/// request.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/export.hpp"
#include "ferry/placement.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// The load of all ranks in a window.
struct LoadSummary {
  std::int64_t num_layers = 0;
  std::int64_t num_experts = 0;           ///< E
  std::int64_t num_physical_experts = 0;  ///< P; 0: not collected
  std::vector<std::int64_t> logical{};    ///< [layers, E] tokens that chose each expert
  std::vector<std::int64_t> physical{};   ///< [layers, P] tokens that picked each physical expert
  /// [R, R] nanoseconds that rank i's calls have waited for rank j in the window; empty: no rank passed any.
  std::vector<std::int64_t> wait_times_ns{};

  /// One object: "layers", "experts", "physical_experts", "logical" (a list for each layer), and "physical" and
  /// "wait_times_ns" if they are not empty.
  FERRY_API std::string to_json() const;
};

/// Counters of one rank, in host memory: for CPU groups. Programs whose groups are on GPUs keep such counters in GPU
/// memory, and add them here with `add`.
class FERRY_API LoadWindow {
 public:
  /// `num_physical_experts` 0: only logical experts are counted.
  /// @errors kInvalidArgument: a number that is negative or absurd; no layer, or no expert
  static Result<LoadWindow> create(std::int64_t num_layers, std::int64_t num_experts,
                                   std::int64_t num_physical_experts = 0);

  /// Counters to pass to the calls of a layer, from 0; absent for a layer out of range. Their memory stays in place as
  /// long as this object, or the object that it is moved to.
  LoadCounters counters(std::int64_t layer);
  /// Adds counts from elsewhere: [layers, E], and [layers, P] or nothing.
  /// @errors kInvalidArgument: another size. Nothing is added
  [[nodiscard]] Status add(std::span<const std::int64_t> logical, std::span<const std::int64_t> physical = {});
  /// Begins a new window: sets all counts to zero.
  void reset();

  /// This rank's counts so far.
  std::span<const std::int64_t> logical() const { return logical_; }    ///< [layers, E]
  std::span<const std::int64_t> physical() const { return physical_; }  ///< [layers, P]

  /// The counts of all ranks. Collective over `bootstrap`; resets nothing. `wait_times_ns`: growth of
  /// Group::wait_times_ns in this window, or nothing on all ranks.
  /// @errors kInvalidArgument: ranks have windows of other sizes, or pass other numbers of waits; errors of
  ///         Bootstrap::all_gather
  Result<LoadSummary> sum(Bootstrap& bootstrap, std::span<const std::int64_t> wait_times_ns = {},
                          std::int64_t timeout_ns = kDefaultTimeoutNs) const;

 private:
  LoadWindow(std::int64_t num_layers, std::int64_t num_experts, std::int64_t num_physical_experts);

  std::int64_t num_layers_;
  std::int64_t num_experts_;
  std::int64_t num_physical_experts_;
  std::vector<std::int64_t> logical_;
  std::vector<std::int64_t> physical_;
};

}  // namespace ferry

#endif  // FERRY_LOAD_HPP
