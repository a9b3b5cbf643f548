#ifndef FERRY_NODE_FUTEX_HPP
#define FERRY_NODE_FUTEX_HPP

#include <atomic>
#include <cstdint>

namespace ferry::node {

/// Sleep until `word` is woken, at most `timeout_ns`; at once if it is not `expected`. May wake spuriously.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns);

/// Wake all threads that sleep on `word`, in any process.
void futex_wake_all(const std::atomic<std::uint32_t>& word);

/// CLOCK_MONOTONIC, nanoseconds.
std::int64_t monotonic_ns();

}  // namespace ferry::node

#endif  // FERRY_NODE_FUTEX_HPP
