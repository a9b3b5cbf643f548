#ifndef FERRY_TESTS_FUZZ_INPUT_READER_HPP
#define FERRY_TESTS_FUZZ_INPUT_READER_HPP

/// Turns a fuzzer's bytes into decisions, for targets whose input is a sequence of events and not the input of a
/// parser.

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry::test {

/// Reads from the front. Reads zeros past the end of the input, so that any input is complete.
class InputReader {
 public:
  explicit InputReader(std::span<const std::byte> input) : rest_(input) {}

  bool empty() const { return rest_.empty(); }

  std::span<const std::byte> take_at_most(std::size_t num_bytes) {
    const std::span<const std::byte> taken = rest_.first(std::min(num_bytes, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

  template <std::size_t kNumBytes>
  std::array<std::byte, kNumBytes> take_array() {
    std::array<std::byte, kNumBytes> bytes{};
    const std::span<const std::byte> taken = take_at_most(kNumBytes);
    std::copy(taken.begin(), taken.end(), bytes.begin());
    return bytes;
  }

  /// Little-endian on every machine, so that a corpus has the same meaning on all of them.
  template <std::unsigned_integral Integer>
  Integer take() {
    const auto bytes = take_array<sizeof(Integer)>();
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) value |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
    return static_cast<Integer>(value);
  }

 private:
  std::span<const std::byte> rest_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_FUZZ_INPUT_READER_HPP
