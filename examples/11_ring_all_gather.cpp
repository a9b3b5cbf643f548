// A ring all-gather by put_signal: in each step a rank passes the block that it received last on to the next rank,
// until every rank has all blocks. A rank waits only for the block that it passes on.
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "ferry/one_sided.hpp"

namespace {

constexpr int kNumRanks = 4;
constexpr std::size_t kBlock = 10'000;  // elements of a rank

std::uint64_t element(int rank, std::size_t i) { return static_cast<std::uint64_t>(rank) * 1'000'000 + i; }

bool run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap) {
  // Two nodes of two ranks, joined by a network inside this process.
  const auto shm =
      ferry::OneSided::create(bootstrap, {.backend = "cpu", .ranks_per_node = 2, .transport = "loopback"}).value();
  const auto all = shm->allocate<std::uint64_t>(kNumRanks * kBlock).value();  // every rank's block, at its index
  const auto arrived = shm->allocate<std::uint64_t>(kNumRanks).value();       // per block: 1 once it has arrived
  const int me = shm->rank();
  const int next = (me + 1) % kNumRanks;
  for (std::size_t i = 0; i < kBlock; ++i) all[static_cast<std::size_t>(me) * kBlock + i] = element(me, i);

  for (int step = 0; step + 1 < kNumRanks; ++step) {
    const auto owner = static_cast<std::size_t>((me - step + kNumRanks) % kNumRanks);
    if (step > 0) {
      ferry::throw_if_error(shm->wait_until(&arrived[owner], ferry::Comparison::kEqual, 1));
    }
    const auto block = all.subspan(owner * kBlock, kBlock);
    ferry::throw_if_error(shm->put_signal(next, block.data(), block, &arrived[owner], 1, ferry::SignalOp::kSet));
  }
  const auto last = static_cast<std::size_t>(next);
  ferry::throw_if_error(shm->wait_until(&arrived[last], ferry::Comparison::kEqual, 1));

  bool right = true;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    for (std::size_t i = 0; i < kBlock; ++i) {
      right = right && all[static_cast<std::size_t>(rank) * kBlock + i] == element(rank, i);
    }
  }
  ferry::throw_if_error(shm->destroy());
  std::printf("rank %d: the blocks of %d ranks are %s\n", me, kNumRanks, right ? "right" : "WRONG");
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
  for (const bool one : right) {
    if (!one) return 1;
  }
  return 0;
}
