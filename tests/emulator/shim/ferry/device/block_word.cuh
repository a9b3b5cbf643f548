#ifndef FERRY_DEVICE_BLOCK_WORD_CUH
#define FERRY_DEVICE_BLOCK_WORD_CUH

/// Replaces include/ferry/device/block_word.cuh where kernels are emulated.

#include <cstdint>

#include "emulator/emulator.hpp"

namespace ferry::device {

inline std::uint64_t& block_word() {
  static const char name = 0;  // its address identifies the word
  return *reinterpret_cast<std::uint64_t*>(emulator::static_shared(&name, sizeof(std::uint64_t)));
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_BLOCK_WORD_CUH
