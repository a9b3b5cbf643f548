#ifndef FERRY_TESTS_SMALL_LATENCY_EXCHANGE_HPP
#define FERRY_TESTS_SMALL_LATENCY_EXCHANGE_HPP

/// One small batch of latency mode with a predictable result: all weights are one, so a combine of the dispatched rows
/// multiplies each token by K.

#include <cstdint>
#include <vector>

#include "ferry/ferry.hpp"

namespace ferry::test {

class SmallLatencyExchange {
 public:
  static constexpr std::int64_t kNumTokens = 64;
  static constexpr std::int64_t kHidden = 512;
  static constexpr std::int64_t kNumTopk = 4;
  static constexpr std::int64_t kRowBytes = kHidden * 2;

  /// `symmetric`: memory from Group::allocate, else plain memory.
  SmallLatencyExchange(Group& group, bool symmetric);

  Status send_dispatch();
  Status send_combine();
  /// Receives the rows of the last send.
  Status receive() { return group_.latency_receive(routing_); }
  /// Runs all steps, then compares the result. `masked`: a rank that this rank masks, -1: none.
  Status run_and_verify(int masked = -1);
  /// Size of a tensor of all received rows.
  std::size_t slab_bytes() const { return static_cast<std::size_t>(num_rows_ * kRowBytes); }

  /// Tokens and experts' rows; a test may replace their memory before a step.
  const void* x;
  const void* y;

 private:
  std::uint16_t* take(std::int64_t num_rows);
  TensorView slab(const void* data) const;

  Group& group_;
  bool symmetric_;
  std::int64_t num_experts_;
  std::int64_t capacity_;
  std::int64_t num_rows_ = 0;
  std::vector<std::int64_t> ids_;
  std::vector<float> weights_;
  std::vector<Buffer> buffers_;
  std::vector<std::vector<std::uint16_t>> vectors_;
  std::uint16_t* received_ = nullptr;
  std::vector<std::uint16_t> out_;
  Routing routing_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_SMALL_LATENCY_EXCHANGE_HPP
