#ifndef FERRY_TESTS_SMALL_EXCHANGE_HPP
#define FERRY_TESTS_SMALL_EXCHANGE_HPP

/// One small batch with a predictable result: a combine of the dispatched rows multiplies each token by the number of
/// ranks that received it.

#include <cstdint>
#include <vector>

#include "ferry/ferry.hpp"
#include "support/sanitizers.hpp"

namespace ferry::test {

/// Deadline of calls in tests in which a rank fails: as short as a busy machine allows, since such a test waits for it.
/// A sanitizer's build is several times as slow, and so are the ranks' signs of life.
inline constexpr std::int64_t kFaultTimeoutNs = (kSanitized ? 6 : 2) * kNsPerSecond;

class SmallExchange {
 public:
  static constexpr std::int64_t kNumTokens = 64;
  static constexpr std::int64_t kHidden = 512;
  static constexpr std::int64_t kNumTopk = 4;
  static constexpr std::int64_t kRowBytes = kHidden * 2;

  /// `symmetric`: x, the received rows and combine's input are in memory from Group::allocate.
  SmallExchange(Group& group, bool symmetric);

  Status route();
  Status dispatch();
  Status combine();
  /// Runs all three steps, then compares the result.
  Status run_and_verify();

  // A test may replace these before a step.
  ConstTensorView topk_idx;
  ConstTensorView x;
  ConstTensorView bias;  // absent

  const Routing& routing() const { return routing_; }

 private:
  std::uint16_t* take(std::int64_t num_rows);

  Group& group_;
  bool symmetric_;
  std::int64_t num_experts_;
  std::vector<std::int64_t> ids_;
  std::vector<Buffer> buffers_;
  std::vector<std::vector<std::uint16_t>> vectors_;
  std::uint16_t* x_values_;
  std::vector<std::uint16_t> out_;
  std::uint16_t* received_ = nullptr;
  Routing routing_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_SMALL_EXCHANGE_HPP
