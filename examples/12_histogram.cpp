// A histogram whose bins are spread over the ranks: every rank adds to the bins of all ranks by atomics, without
// sorting or sending lists. At the end each rank reads the whole histogram by gets.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ferry/one_sided.hpp"

namespace {

constexpr int kNumRanks = 4;
constexpr std::size_t kBinsPerRank = 16;
constexpr std::size_t kBins = kNumRanks * kBinsPerRank;
constexpr int kSamples = 2'000;  // of each rank

/// Bins of a rank's samples.
std::vector<std::size_t> samples_of(int rank) {
  std::mt19937 random(static_cast<unsigned>(rank));
  std::vector<std::size_t> samples(kSamples);
  for (std::size_t& sample : samples) sample = random() % kBins;
  return samples;
}

bool run_rank(const std::shared_ptr<ferry::Bootstrap>& bootstrap) {
  const auto shm =
      ferry::OneSided::create(bootstrap, {.backend = "cpu", .ranks_per_node = 2, .transport = "loopback"}).value();
  const auto bins = shm->allocate<std::uint64_t>(kBinsPerRank).value();
  for (const std::size_t sample : samples_of(shm->rank())) {
    const auto owner = static_cast<int>(sample / kBinsPerRank);
    ferry::throw_if_error(shm->signal(owner, &bins[sample % kBinsPerRank], 1, ferry::SignalOp::kAdd));
  }
  ferry::throw_if_error(shm->barrier());  // every rank's additions are complete

  std::vector<std::uint64_t> histogram(kBins);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    const std::span<std::uint64_t> part(&histogram[static_cast<std::size_t>(rank) * kBinsPerRank], kBinsPerRank);
    ferry::throw_if_error(shm->get_nbi(rank, part, bins.data()));
  }
  ferry::throw_if_error(shm->quiet());  // the gets have arrived

  std::vector<std::uint64_t> expected(kBins);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    for (const std::size_t sample : samples_of(rank)) ++expected[sample];
  }
  const bool right = histogram == expected;
  ferry::throw_if_error(shm->destroy());
  std::printf("rank %d: a histogram of %d samples in %zu bins is %s\n", shm->rank(), kNumRanks * kSamples, kBins,
              right ? "right" : "WRONG");
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
