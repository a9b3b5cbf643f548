/// Ranks that are threads. One hall for all of them: who arrives puts down its message, the last one hands out all.
///
/// Everything in Hall is guarded by its mutex; a failure is written once and never changes. `result` is stable from the
/// moment a gather is complete until every rank has taken it, because the next gather needs every rank.

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "bootstrap/deadline.hpp"
#include "bootstrap/verdict.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry {
namespace {

using Messages = std::vector<std::vector<std::byte>>;

struct Hall {
  explicit Hall(std::size_t num_ranks_in) : arrived(num_ranks_in), left(num_ranks_in), messages(num_ranks_in) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> arrived;
  std::vector<bool> left;
  Messages messages;
  std::shared_ptr<const Messages> result;
  std::size_t num_arrived = 0;
  std::uint64_t num_gathers = 0;  // complete ones
  Status failure;

  void fail(Status status) {
    if (!failure.ok()) return;
    failure = std::move(status);
    changed.notify_all();
  }
};

class InProcessBootstrap final : public Bootstrap {
 public:
  InProcessBootstrap(std::shared_ptr<Hall> hall, std::size_t rank) : hall_(std::move(hall)), rank_(rank) {}

  ~InProcessBootstrap() override {
    const std::lock_guard lock(hall_->mutex);
    hall_->left[rank_] = true;
    if (hall_->num_arrived > 0) hall_->fail(bootstrap::rank_lost("all_gather", rank()));
  }
  InProcessBootstrap(const InProcessBootstrap&) = delete;
  InProcessBootstrap& operator=(const InProcessBootstrap&) = delete;

  int rank() const override { return static_cast<int>(rank_); }
  int num_ranks() const override { return static_cast<int>(hall_->arrived.size()); }

  Result<Messages> all_gather(std::span<const std::byte> mine, std::int64_t timeout_ns) override {
    const bootstrap::Deadline deadline = bootstrap::Deadline::after(timeout_ns);
    std::unique_lock lock(hall_->mutex);
    if (Status status = arrive(mine, timeout_ns); !status.ok()) return status;
    const std::uint64_t awaited = hall_->num_gathers + 1;
    if (hall_->num_arrived == hall_->arrived.size()) complete();
    while (hall_->num_gathers < awaited) {
      if (!hall_->failure.ok()) return hall_->failure;
      if (deadline.expired()) {
        hall_->fail(bootstrap::missing_ranks("all_gather", hall_->arrived, timeout_ns));
        return hall_->failure;
      }
      hall_->changed.wait_until(lock, deadline.moment());
    }
    const std::shared_ptr<const Messages> result = hall_->result;
    lock.unlock();
    return Messages(*result);
  }

 private:
  Status arrive(std::span<const std::byte> mine, std::int64_t timeout_ns) {
    if (!hall_->failure.ok()) return hall_->failure;
    Status bad = bootstrap::check_all_gather_arguments(rank(), mine.size(), timeout_ns);
    const auto gone = std::find(hall_->left.begin(), hall_->left.end(), true);
    if (gone != hall_->left.end()) {
      bad = bootstrap::rank_lost("all_gather", static_cast<int>(gone - hall_->left.begin()));
    }
    if (!bad.ok()) {
      hall_->fail(bad);
      return bad;
    }
    hall_->messages[rank_].assign(mine.begin(), mine.end());
    hall_->arrived[rank_] = true;
    ++hall_->num_arrived;
    return {};
  }

  void complete() {
    hall_->result = std::make_shared<const Messages>(std::exchange(hall_->messages, Messages(hall_->arrived.size())));
    hall_->arrived.assign(hall_->arrived.size(), false);
    hall_->num_arrived = 0;
    ++hall_->num_gathers;
    hall_->changed.notify_all();
  }

  std::shared_ptr<Hall> hall_;
  std::size_t rank_;
};

}  // namespace

Result<std::vector<std::shared_ptr<Bootstrap>>> create_in_process_bootstraps(int num_ranks) {
  if (num_ranks < 1) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_in_process_bootstraps: num_ranks={}, expected at least 1", num_ranks));
  }
  const auto hall = std::make_shared<Hall>(static_cast<std::size_t>(num_ranks));
  std::vector<std::shared_ptr<Bootstrap>> bootstraps;
  for (std::size_t rank = 0; rank < hall->arrived.size(); ++rank) {
    bootstraps.push_back(std::make_shared<InProcessBootstrap>(hall, rank));
  }
  return bootstraps;
}

}  // namespace ferry
