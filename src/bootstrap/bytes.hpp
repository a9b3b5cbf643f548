#ifndef FERRY_BOOTSTRAP_BYTES_HPP
#define FERRY_BOOTSTRAP_BYTES_HPP

/// Integers on the wire are little-endian whatever the machine, and lie at any address.

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>

namespace ferry::bootstrap {

template <std::unsigned_integral Integer>
void store_little_endian(std::byte* to, Integer value) {
  for (std::size_t i = 0; i < sizeof(Integer); ++i) to[i] = static_cast<std::byte>((value >> (8 * i)) & 0xff);
}

template <std::unsigned_integral Integer>
Integer load_little_endian(const std::byte* from) {
  Integer value = 0;
  for (std::size_t i = 0; i < sizeof(Integer); ++i) {
    value = static_cast<Integer>(value | (std::to_integer<Integer>(from[i]) << (8 * i)));
  }
  return value;
}

inline std::span<const std::byte> as_byte_span(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_BYTES_HPP
