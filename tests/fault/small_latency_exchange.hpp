#ifndef FERRY_TESTS_SMALL_LATENCY_EXCHANGE_HPP
#define FERRY_TESTS_SMALL_LATENCY_EXCHANGE_HPP

/// One small batch of latency mode with a predictable result: each token's weights are ones, so that a combine of what
/// was dispatched multiplies it by K.

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

  /// In plain memory, or in memory from Group::allocate.
  SmallLatencyExchange(Group& group, bool symmetric);

  Status send_dispatch();
  Status send_combine();
  /// Of what was sent last.
  Status receive() { return group_.latency_receive(routing_); }
  /// Everything, then compare. `masked`: a rank that this one masks, -1: none.
  Status run_and_verify(int masked = -1);
  /// Bytes of a tensor of all received rows.
  std::size_t slab_bytes() const { return static_cast<std::size_t>(num_rows_ * kRowBytes); }

  /// A test may replace the memory of these before a step: tokens, and the experts' rows.
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
