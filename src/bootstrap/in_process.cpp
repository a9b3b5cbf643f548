/// Bootstrap for ranks that are threads of one process and share one Board: each rank posts its message, and the last
/// one completes the gather.
///
/// The mutex guards everything in Board; an error is written once and never changes. `result` does not change between
/// the end of a gather and the time every rank has read it, because the next gather needs every rank.

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <utility>

#include "bootstrap/deadline.hpp"
#include "bootstrap/errors.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry {
namespace {

using Messages = std::vector<std::vector<std::byte>>;

struct Board {
  explicit Board(std::size_t num_ranks_in) : arrived(num_ranks_in), left(num_ranks_in), messages(num_ranks_in) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> arrived;
  std::vector<bool> left;
  Messages messages;
  std::shared_ptr<const Messages> result;
  std::size_t num_arrived = 0;
  std::uint64_t num_gathers = 0;  // completed
  Status error;

  void fail(Status status) {
    if (!error.ok()) return;
    error = std::move(status);
    changed.notify_all();
  }
};

class InProcessBootstrap final : public Bootstrap {
 public:
  InProcessBootstrap(std::shared_ptr<Board> board, std::size_t rank) : board_(std::move(board)), rank_(rank) {}

  ~InProcessBootstrap() override {
    const std::lock_guard lock(board_->mutex);
    board_->left[rank_] = true;
    if (board_->num_arrived > 0) board_->fail(bootstrap::rank_lost("all_gather", rank()));
  }
  InProcessBootstrap(const InProcessBootstrap&) = delete;
  InProcessBootstrap& operator=(const InProcessBootstrap&) = delete;

  int rank() const override { return static_cast<int>(rank_); }
  int num_ranks() const override { return static_cast<int>(board_->arrived.size()); }

  Result<Messages> all_gather(std::span<const std::byte> mine, std::int64_t timeout_ns) override try {
    const bootstrap::Deadline deadline = bootstrap::Deadline::after(timeout_ns);
    std::unique_lock lock(board_->mutex);
    if (Status status = arrive(mine, timeout_ns); !status.ok()) return status;
    const std::uint64_t awaited = board_->num_gathers + 1;
    if (board_->num_arrived == board_->arrived.size()) complete();
    while (board_->num_gathers < awaited) {
      if (!board_->error.ok()) return board_->error;
      if (deadline.expired()) {
        board_->fail(bootstrap::missing_ranks("all_gather", board_->arrived, timeout_ns));
        return board_->error;
      }
      board_->changed.wait_until(lock, deadline.time());
    }
    const std::shared_ptr<const Messages> result = board_->result;
    lock.unlock();
    return Messages(*result);
  } catch (const std::bad_alloc&) {
    const std::lock_guard lock(board_->mutex);
    board_->fail(bootstrap::out_of_memory("all_gather", rank()));
    return board_->error;
  }

 private:
  Status arrive(std::span<const std::byte> mine, std::int64_t timeout_ns) {
    if (!board_->error.ok()) return board_->error;
    Status bad = bootstrap::check_all_gather_arguments(rank(), mine.size(), timeout_ns);
    const auto gone = std::find(board_->left.begin(), board_->left.end(), true);
    if (gone != board_->left.end()) {
      bad = bootstrap::rank_lost("all_gather", static_cast<int>(gone - board_->left.begin()));
    }
    if (!bad.ok()) {
      board_->fail(bad);
      return bad;
    }
    board_->messages[rank_].assign(mine.begin(), mine.end());
    board_->arrived[rank_] = true;
    ++board_->num_arrived;
    return {};
  }

  void complete() {
    board_->result =
        std::make_shared<const Messages>(std::exchange(board_->messages, Messages(board_->arrived.size())));
    board_->arrived.assign(board_->arrived.size(), false);
    board_->num_arrived = 0;
    ++board_->num_gathers;
    board_->changed.notify_all();
  }

  std::shared_ptr<Board> board_;
  std::size_t rank_;
};

}  // namespace

Result<std::vector<std::shared_ptr<Bootstrap>>> create_in_process_bootstraps(int num_ranks) {
  if (num_ranks < 1) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_in_process_bootstraps: num_ranks={}, expected at least 1", num_ranks));
  }
  const auto board = std::make_shared<Board>(static_cast<std::size_t>(num_ranks));
  std::vector<std::shared_ptr<Bootstrap>> bootstraps;
  for (std::size_t rank = 0; rank < board->arrived.size(); ++rank) {
    bootstraps.push_back(std::make_shared<InProcessBootstrap>(board, rank));
  }
  return bootstraps;
}

}  // namespace ferry
