#include "conformance/backend_config.hpp"
#include "support/sanitizers.hpp"

namespace ferry::test {
namespace {

/// Worlds, shapes, strides, memory and options drawn together. A failure names the world's seed; the seeds are fixed,
/// so running this test again reproduces the case.
class FuzzConformance : public Conformance {
 protected:
  void run_random_cases(int num_ranks, int num_cases) const {
    // Processes on one GPU take turns of milliseconds, several times in each call.
    if (on_gpus() && GetParam().kind == RankKind::kProcesses) num_cases /= 4;
    if (kSanitized) num_cases /= 3;
    std::mt19937_64 random(static_cast<std::uint64_t>(1000 + num_ranks));
    std::vector<ExchangeCase> cases;
    for (int i = 0; i < num_cases; ++i) cases.push_back(draw_case(random, num_ranks));
    run_cases(num_ranks, cases);
  }
};

TEST_P(FuzzConformance, OneRank) { run_random_cases(1, 120); }
TEST_P(FuzzConformance, TwoRanks) { run_random_cases(2, 120); }
TEST_P(FuzzConformance, ThreeRanks) { run_random_cases(3, 120); }
TEST_P(FuzzConformance, FiveRanks) { run_random_cases(5, 80); }
TEST_P(FuzzConformance, EightRanks) { run_random_cases(8, 60); }
TEST_P(FuzzConformance, SixteenRanks) { run_random_cases(16, 10); }

INSTANTIATE_TEST_SUITE_P(Backends, FuzzConformance, ::testing::ValuesIn(exchange_configs()), config_name);

}  // namespace
}  // namespace ferry::test
