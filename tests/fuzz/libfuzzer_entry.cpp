/// Entry point through which libFuzzer, which has its own main(), passes an input to the target.

#include <cstdint>

#include "fuzz_target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t num_bytes) {
  ferry::test::fuzz_one(std::as_bytes(std::span(data, num_bytes)));
  return 0;
}
