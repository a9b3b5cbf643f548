#ifndef FERRY_NUMERIC_ROW_CHECKSUM_HPP
#define FERRY_NUMERIC_ROW_CHECKSUM_HPP

/// Checksums of rows (GroupOptions::verify), the same on CPUs and GPUs.
///
/// A checksum is a sum modulo 2^64 over the row's words of 8 bytes, each mixed with its position, from a start that
/// says whose row it is in which call. Sums of parts in any order, by any number of threads, add up to it.
///
/// Mixing is a bijection of the word. So a change inside one aligned word, a single flipped bit among them, always
/// changes the checksum. Any other change, for example swapped words, or a row of another call, token or rank, is
/// missed with a probability of 2^-64. This is no protection against a peer that forges rows.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "plan/host_device.hpp"

namespace ferry::numeric {

/// A bijection in which each input bit changes about half of the output bits: the finaliser of SplitMix64 (Steele, Lea
/// and Flood, "Fast splittable pseudorandom number generators", 2014; constants of Stafford's variant 13).
FERRY_HOST_DEVICE constexpr std::uint64_t mix_word(std::uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9U;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBU;
  return word ^ (word >> 31);
}

/// Distance between the offsets of neighbouring positions: 2^64 divided by the golden ratio, the step of SplitMix64.
inline constexpr std::uint64_t kPositionStep = 0x9E3779B97F4A7C15U;

/// The part of a checksum that word `word_idx` of a row adds.
FERRY_HOST_DEVICE constexpr std::uint64_t mix_at(std::uint64_t word, std::uint64_t word_idx) {
  return mix_word(word ^ (word_idx * kPositionStep));
}

/// Identity of a row on its way: the rank that sends it, and its number there (dispatch: the token; combine: the row).
struct RowIdentity {
  std::uint64_t call = 0;  ///< number of the call, the same on all ranks
  std::int32_t rank = 0;
  std::int32_t row = 0;
};

/// Checksum of a row before its words are added.
FERRY_HOST_DEVICE constexpr std::uint64_t checksum_start(const RowIdentity& identity) {
  const std::uint64_t where = static_cast<std::uint64_t>(static_cast<std::uint32_t>(identity.rank)) << 32 |
                              static_cast<std::uint32_t>(identity.row);
  return mix_word(mix_word(identity.call + kPositionStep) ^ where);
}

/// Sum over `num_bytes` at `data`, which begin `offset_bytes` into the row, a multiple of 8. Zeros complete the last
/// word.
inline std::uint64_t sum_words(const std::byte* data, std::size_t num_bytes, std::size_t offset_bytes) {
  constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
  std::uint64_t sum = 0;
  std::uint64_t position = offset_bytes / kWordBytes * kPositionStep;
  std::size_t at = 0;
  for (; at + kWordBytes <= num_bytes; at += kWordBytes, position += kPositionStep) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + at, kWordBytes);
    sum += mix_word(word ^ position);
  }
  if (at == num_bytes) return sum;
  std::uint64_t word = 0;
  std::memcpy(&word, data + at, num_bytes - at);
  return sum + mix_word(word ^ position);
}

}  // namespace ferry::numeric

#endif  // FERRY_NUMERIC_ROW_CHECKSUM_HPP
