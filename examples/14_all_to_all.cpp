// An all-to-all of different numbers of rows: ranks first reserve room at each destination by fetch_add, which returns
// its position, and then put their rows there. No counts are exchanged.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "ferry/one_sided.hpp"

namespace {

constexpr int kNumRanks = 4;
constexpr std::size_t kMaxRows = 64;  // rows that a rank can receive

/// Number of rows from one rank to another.
std::size_t num_rows(int from, int to) { return static_cast<std::size_t>((from * 3 + to * 5) % 7); }

struct Row {
  std::int32_t from = -1;
  std::int32_t to = -1;
  std::int64_t number = 0;
};

bool run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap) {
  const auto shm =
      ferry::OneSided::create(bootstrap, {.backend = "cpu", .ranks_per_node = 2, .transport = "loopback"}).value();
  const auto rows = shm->allocate<Row>(kMaxRows).value();
  const auto used = shm->allocate<std::uint64_t>(1).value();
  const int me = shm->rank();
  for (int step = 0; step < kNumRanks; ++step) {
    const int to = (me + step) % kNumRanks;  // ranks start at different destinations
    std::vector<Row> mine(num_rows(me, to));
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = {me, to, static_cast<std::int64_t>(i)};
    const std::uint64_t place = shm->fetch_add(to, used.data(), mine.size()).value();
    ferry::throw_if_error(shm->put(to, &rows[place], mine));
  }
  ferry::throw_if_error(shm->barrier());

  std::array<std::int64_t, kNumRanks> next{};
  bool right = true;
  for (const Row& row : rows.first(used[0])) {
    // Rows of one source keep their order.
    right = right && row.to == me && row.number == next[static_cast<std::size_t>(row.from)]++;
  }
  for (int from = 0; from < kNumRanks; ++from) {
    right = right && static_cast<std::size_t>(next[static_cast<std::size_t>(from)]) == num_rows(from, me);
  }
  std::printf("rank %d: the %d rows that came are %s\n", me, static_cast<int>(used[0]), right ? "right" : "WRONG");
  ferry::throw_if_error(shm->destroy());
  return right;
}

}  // namespace

int main() {
  const auto bootstraps = ferry::create_in_process_bootstraps(kNumRanks).value();
  std::array<bool, kNumRanks> right{};
  {
    std::vector<std::jthread> ranks;
    for (std::size_t r = 0; r < kNumRanks; ++r) ranks.emplace_back([&, r] { right[r] = run_rank(bootstraps[r]); });
  }
  return std::ranges::all_of(right, [](bool one) { return one; }) ? 0 : 1;
}
