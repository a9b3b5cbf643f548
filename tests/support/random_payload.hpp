#ifndef FERRY_TESTS_RANDOM_PAYLOAD_HPP
#define FERRY_TESTS_RANDOM_PAYLOAD_HPP

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "ferry/types.hpp"
#include "support/exchange_case.hpp"

/// What rows hold in tests. Each function takes one number from `random` and draws the rest from that: nearly all that
/// tests draw is payload.

namespace ferry::test {

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t count);

/// Of both signs and several magnitudes, some of them -0. No NaN and no infinity: sums of them have no fixed bits
/// before they are made canonical.
std::vector<float> random_floats(std::mt19937_64& random, std::size_t count);

/// Rows of a combine: [rows, spec.hidden] of spec.dtype, with values of spec.values.
std::vector<std::byte> random_payload(std::mt19937_64& random, const CombineSpec& spec, std::int64_t rows);

/// Rows of bf16 whose blocks of 128 channels differ: of all magnitudes, zeros, with special values, of any bits, with
/// many numbers near zero.
std::vector<std::byte> random_activations(std::mt19937_64& random, std::int64_t rows, std::int64_t hidden);

}  // namespace ferry::test

#endif  // FERRY_TESTS_RANDOM_PAYLOAD_HPP
