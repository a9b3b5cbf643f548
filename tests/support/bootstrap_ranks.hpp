#ifndef FERRY_TESTS_BOOTSTRAP_RANKS_HPP
#define FERRY_TESTS_BOOTSTRAP_RANKS_HPP

/// Helpers for tests of the bootstrap itself: a listening socket on a free port, ranks as threads or processes that
/// report their result, and connections that do not authenticate.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "bootstrap/socket.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::test {

using Messages = std::vector<std::vector<std::byte>>;

std::vector<std::byte> bytes_of(std::string_view text);
std::string text_of(const std::vector<std::byte>& bytes);

/// A secret and a listening socket on a free loopback port.
struct Meeting {
  std::string secret;
  std::uint16_t port = 0;
  int listen_fd = -1;  // rank 0 takes ownership

  static Meeting prepare();
  TcpBootstrapOptions options(int rank, int num_ranks, std::int64_t timeout_ns = 30 * kNsPerSecond) const;
};

/// Runs `body(rank)` of every rank in a thread of its own; returns the results in rank order.
template <typename Body>
auto run_threads(int num_ranks, Body body) {
  using Answer = decltype(body(0));
  std::vector<std::unique_ptr<Answer>> boxes(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] { boxes[static_cast<std::size_t>(rank)] = std::make_unique<Answer>(body(rank)); });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Answer> answers;
  for (auto& box : boxes) answers.push_back(std::move(*box));
  return answers;
}

/// A forked process. Create it while the caller has a single thread.
class ForkedRank {
 public:
  /// The child calls it to report to the parent that it has come this far.
  using Checkpoint = std::function<void()>;
  using Body = std::function<Status(const Checkpoint&)>;

  explicit ForkedRank(const Body& body);
  /// Kills the process if it still runs.
  ~ForkedRank();
  ForkedRank(const ForkedRank&) = delete;
  ForkedRank& operator=(const ForkedRank&) = delete;

  void send_signal(int signal_number) const;
  /// Returns when the child has called its checkpoint, or has exited.
  void await_checkpoint();
  /// What its body returned; kInternal if it exited before that.
  Status result();

 private:
  UniqueFd reports_;
  pid_t pid_ = -1;
};

/// A blocking connection to the port, without authentication.
UniqueFd connect_stranger(std::uint16_t port);
void send_text(const UniqueFd& fd, std::string_view text);
/// Blocks until the other end closes the connection.
void await_close(const UniqueFd& fd);

}  // namespace ferry::test

#endif  // FERRY_TESTS_BOOTSTRAP_RANKS_HPP
