#ifndef FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP
#define FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP

/// Interface of a fuzz target: one function that takes any bytes, and helpers to check a parser.

#include <cstddef>
#include <span>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::test {

/// Defined by each target. Returns if every check holds, else ends the process.
void fuzz_one(std::span<const std::byte> input);

/// Ends the process unless `holds`, so that libFuzzer keeps the input and a replay names it.
void require(bool holds, std::string_view what);

/// Requires a refusal with the code that the parser documents, and a message.
void require_refusal(const Status& status, ErrorCode code);

/// Compares with memcmp: libFuzzer instruments each comparison of a byte-by-byte loop.
bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b);

/// Watches this program's allocations while it lives; one watch at a time. Covers operator new without alignment and
/// the forms built on it, which allocate the memory of vectors and strings.
class AllocationWatch {
 public:
  AllocationWatch();

  /// Largest allocation since the watch began: reveals that a false length was trusted, even if the memory was freed
  /// again.
  std::size_t largest_bytes() const;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_FUZZ_FUZZ_TARGET_HPP
