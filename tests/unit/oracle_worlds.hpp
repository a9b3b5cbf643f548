#ifndef FERRY_TESTS_ORACLE_WORLDS_HPP
#define FERRY_TESTS_ORACLE_WORLDS_HPP

/// Shared code of the oracle's tests: packed values, and a small world with all cases in it.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "oracle/oracle.hpp"

namespace ferry::oracle {

inline Bytes pack(const std::vector<float>& values) {
  Bytes bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline std::vector<float> unpack(const Bytes& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Packs values that bf16 represents exactly.
inline Bytes pack_bf16(const std::vector<float>& values) {
  Bytes bytes;
  for (float value : values) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    bytes.push_back(static_cast<std::byte>(bits >> 16));
    bytes.push_back(static_cast<std::byte>(bits >> 24));
  }
  return bytes;
}

/// Two ranks of two experts each. Token 1 of rank 0 names an expert twice, token 1 of rank 1 names none.
inline World two_ranks(Layout layout) {
  World world;
  world.num_ranks = 2;
  world.ranks_per_node = 2;
  world.num_topk = 2;
  world.options.num_experts = 4;
  world.options.layout = layout;
  world.ranks = {{3, {0, 2, 3, 3, -1, 1}, {0.5F, 0.25F, 0.125F, 1.0F, 9.0F, 2.0F}},
                 {2, {0, 1, -1, -1}, {3.0F, 4.0F, 7.0F, 8.0F}}};
  return world;
}

}  // namespace ferry::oracle

#endif  // FERRY_TESTS_ORACLE_WORLDS_HPP
