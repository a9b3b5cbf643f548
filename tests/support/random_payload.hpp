#ifndef FERRY_TESTS_RANDOM_PAYLOAD_HPP
#define FERRY_TESTS_RANDOM_PAYLOAD_HPP

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "ferry/types.hpp"
#include "support/exchange_case.hpp"

/// Random contents of rows. Each function takes one number from `random` and derives its values from that, as nearly
/// all random numbers in tests are payload.

namespace ferry::test {

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t count);

/// Numbers of both signs and several magnitudes, some of them -0. No NaN and no infinity, as the bits of their sums are
/// not fixed before they are made canonical.
std::vector<float> random_floats(std::mt19937_64& random, std::size_t count);

/// Rows of a combine: [rows, spec.hidden] of spec.dtype, with values of spec.values.
std::vector<std::byte> random_payload(std::mt19937_64& random, const CombineSpec& spec, std::int64_t rows);

/// Rows of bf16 with different kinds of blocks of 128 channels: all magnitudes, zeros, special values, random bits,
/// many numbers near zero.
std::vector<std::byte> random_activations(std::mt19937_64& random, std::int64_t rows, std::int64_t hidden);

}  // namespace ferry::test

#endif  // FERRY_TESTS_RANDOM_PAYLOAD_HPP
