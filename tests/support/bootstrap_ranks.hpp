#ifndef FERRY_TESTS_BOOTSTRAP_RANKS_HPP
#define FERRY_TESTS_BOOTSTRAP_RANKS_HPP

/// Helpers of bootstrap tests: ranks as threads, ranks as processes that can be killed or stopped at a checkpoint, and
/// raw connections of strangers.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/unique_fd.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"
#include "launch/child_process.hpp"
#include "launch/meeting_point.hpp"

namespace ferry::test {

using Messages = std::vector<std::vector<std::byte>>;

std::vector<std::byte> bytes_of(std::string_view text);
std::string text_of(const std::vector<std::byte>& bytes);

/// See launch::MeetingPoint.
struct Meeting : launch::MeetingPoint {
  static Meeting prepare() { return {launch::MeetingPoint::open().value()}; }
  TcpBootstrapOptions options(int rank, int num_ranks, std::int64_t timeout_ns = 30 * kNsPerSecond) const {
    return launch::MeetingPoint::options(rank, num_ranks, timeout_ns);
  }
};

/// Runs `body(rank)` in one thread for each rank; returns the results in rank order.
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

/// A forked process that reports a Status. Start it while this process has a single thread. The destructor kills it.
class ForkedRank {
 public:
  /// Reports to the parent that the rank has reached this point.
  using Checkpoint = std::function<void()>;
  using Body = std::function<Status(const Checkpoint&)>;

  explicit ForkedRank(const Body& body);

  void send_signal(int signal_number) const { process_.send_signal(signal_number); }
  /// Returns when the child has called its checkpoint, or has ended.
  void await_checkpoint() { process_.read_report(); }
  /// Status that the body returned; kInternal if the process ended without a report.
  Status result();

 private:
  launch::ChildProcess process_;
};

/// Opens a blocking connection to the port, as any process could.
UniqueFd connect_stranger(std::uint16_t port);
void send_text(const UniqueFd& fd, std::string_view text);
/// Blocks until the other end closes the connection.
void await_close(const UniqueFd& fd);

}  // namespace ferry::test

#endif  // FERRY_TESTS_BOOTSTRAP_RANKS_HPP
