#ifndef FERRY_TESTS_NET_UCX_PROCESS_HPP
#define FERRY_TESTS_NET_UCX_PROCESS_HPP

/// Shared code of tests of UCX in processes of their own.

#include <array>
#include <functional>

#include "support/bootstrap_ranks.hpp"

namespace ferry::test {

/// Runs `body` in a new process into which UCX has not been loaded.
inline Status in_fresh_process(const std::function<Status()>& body) {
  ForkedRank process([&body](const ForkedRank::Checkpoint&) { return body(); });
  return process.result();
}

/// Ends that receive with one thread, and with two.
inline constexpr std::array<const char*, 2> kUcxEngines{"ucx", "ucx_with_receivers"};

}  // namespace ferry::test

#endif  // FERRY_TESTS_NET_UCX_PROCESS_HPP
