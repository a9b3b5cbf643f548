// A line of cells cut into one strip per rank; each step a cell becomes the mean of its neighbours, so strips need each
// other's border cells (the halo). A rank puts its borders directly into its neighbours' halos and notifies them by a
// signal; two sets of halos, used in turn, are the only flow control.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "ferry/one_sided.hpp"

namespace {

constexpr int kNumRanks = 4;
constexpr std::size_t kStrip = 64;  // cells of a rank
constexpr std::size_t kCells = kNumRanks * kStrip;
constexpr std::uint64_t kSteps = 50;

double start_of(std::size_t cell) { return std::sin(static_cast<double>(cell)); }

/// One step on `cells`, with the outside neighbours `left` and `right`.
std::vector<double> smooth(const std::vector<double>& cells, double left, double right) {
  std::vector<double> next(cells.size());
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const double before = i == 0 ? left : cells[i - 1];
    const double after = i + 1 == cells.size() ? right : cells[i + 1];
    next[i] = (before + after) / 2;
  }
  return next;
}

bool run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap, const std::vector<double>& expected) {
  const auto shm =
      ferry::OneSided::create(bootstrap, {.backend = "cpu", .ranks_per_node = 2, .transport = "loopback"}).value();
  const auto halos = shm->allocate<double>(4).value();           // [step % 2][from the left, from the right]
  const auto arrived = shm->allocate<std::uint64_t>(2).value();  // steps whose halo has arrived, by side
  const int me = shm->rank();
  const int left = (me + kNumRanks - 1) % kNumRanks;  // the line is a ring
  const int right = (me + 1) % kNumRanks;
  const std::size_t first = static_cast<std::size_t>(me) * kStrip;

  std::vector<double> cells(kStrip);
  for (std::size_t i = 0; i < kStrip; ++i) cells[i] = start_of(first + i);
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    // A halo of step s is overwritten in step s + 2. A neighbour reaches that step only with this rank's borders of
    // step s + 1, which are sent after the halo was read.
    double* const halo = &halos[2 * (step % 2)];
    ferry::throw_if_error(shm->put_signal(left, halo + 1, std::span(cells).first(1), &arrived[1], 1,  //
                                          ferry::SignalOp::kAdd));
    ferry::throw_if_error(shm->put_signal(right, halo, std::span(cells).last(1), &arrived[0], 1,  //
                                          ferry::SignalOp::kAdd));
    for (const std::uint64_t& side : arrived) {
      ferry::throw_if_error(shm->wait_until(&side, ferry::Comparison::kGreaterEqual, step));
    }
    cells = smooth(cells, halo[0], halo[1]);
  }
  const bool same = std::equal(cells.begin(), cells.end(), expected.begin() + static_cast<std::ptrdiff_t>(first));
  ferry::throw_if_error(shm->destroy());
  std::printf("rank %d: %zu cells after %d steps are %s\n", me, kStrip, static_cast<int>(kSteps),
              same ? "right" : "WRONG");
  return same;
}

}  // namespace

int main() {
  std::vector<double> expected(kCells);
  for (std::size_t i = 0; i < kCells; ++i) expected[i] = start_of(i);
  for (std::uint64_t step = 0; step < kSteps; ++step) expected = smooth(expected, expected.back(), expected.front());

  const auto bootstraps = ferry::create_in_process_bootstraps(kNumRanks).value();
  std::array<bool, kNumRanks> right{};
  {
    std::vector<std::jthread> ranks;
    for (std::size_t r = 0; r < kNumRanks; ++r) {
      ranks.emplace_back([&, r] { right[r] = run_rank(bootstraps[r], expected); });
    }
  }
  return std::ranges::all_of(right, [](bool one) { return one; }) ? 0 : 1;
}
