#ifndef FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP
#define FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP

/// What a fuzz target is: one function that takes any bytes, and what it may use to judge a parser by them.

#include <cstddef>
#include <span>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::test {

/// Each target defines it. Returns if all is well, ends the process if not.
void fuzz_one(std::span<const std::byte> input);

/// Ends the process unless `holds`, so that libFuzzer keeps the input and a replay names it.
void require(bool holds, std::string_view what);

/// A refusal must be of the kind the parser documents, and say something.
void require_refusal(const Status& status, ErrorCode code);

/// Faster than comparing byte by byte, each of which libFuzzer would look at.
bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b);

/// Looks at what this program allocates while it lives, one at a time. Of operator new without alignment and of what
/// builds on it, which is where vectors and strings get their memory.
class AllocationWatch {
 public:
  AllocationWatch();

  /// Since the beginning of the watch: a length that was believed shows here, whatever became of the memory.
  std::size_t largest_bytes() const;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP
