#ifndef FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP
#define FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP

/// A fuzz target: one function that takes any bytes, and helpers with which it checks a parser.

#include <cstddef>
#include <span>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::test {

/// Each target defines it. Returns if every check holds, else ends the process.
void fuzz_one(std::span<const std::byte> input);

/// Ends the process unless `holds`, so that libFuzzer keeps the input and a replay names it.
void require(bool holds, std::string_view what);

/// A refusal must have the code that the parser documents, and a message.
void require_refusal(const Status& status, ErrorCode code);

/// Faster than comparing byte by byte, since libFuzzer instruments each comparison.
bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b);

/// Watches what this program allocates while it lives; one at a time. Covers operator new without alignment and what
/// builds on it, which is where vectors and strings get their memory.
class AllocationWatch {
 public:
  AllocationWatch();

  /// Largest allocation since the watch began: shows when a false length was trusted, even if the memory was freed
  /// again.
  std::size_t largest_bytes() const;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP
