/// Time of a copy between GPUs by the stand-in for a network card (tests/ucx_card), from its start to the poll that
/// reports it. Prints JSON.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "cuda/memory/card_memory.hpp"
#include "options.hpp"
#include "ucx_card/gpu_copies.hpp"

namespace {

using ferry::ucx_card::GpuCopies;

constexpr double kNsPerUs = 1000;

struct Plan {
  std::vector<int> kib{8, 128, 1024};
  std::vector<int> in_flight{1, 8};
  int from = 0;
  int to = 1;
  int num_runs = 200;
};

[[noreturn]] void stop(const std::string& why) {
  fmt::print(stderr, "card_copies: {}\n", why);
  std::exit(1);
}

std::shared_ptr<std::byte> take(GpuCopies& copies, int gpu, std::size_t num_bytes) {
  auto memory = ferry::cuda::take_card_memory(gpu, num_bytes);
  if (!memory.ok()) stop(memory.status().to_string());
  if (copies.share(memory->get()) != UCS_OK) stop("the GPUs do not reach each other's memory");
  return *memory;
}

/// Microseconds in which all of `count` copies, begun together, have ended.
double run(GpuCopies& copies, std::byte* to, const std::byte* from, std::size_t num_bytes, std::size_t count) {
  bool is_good = true;
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < count; ++i) {
    copies.start(to + i * num_bytes, from + i * num_bytes, num_bytes,
                 [&is_good](ucs_status_t status) { is_good = is_good && status == UCS_OK; });
  }
  while (copies.poll()) {
  }
  const std::chrono::nanoseconds time = std::chrono::steady_clock::now() - begin;
  if (!is_good) stop("a copy has failed");
  return static_cast<double>(time.count()) / kNsPerUs;
}

}  // namespace

int main(int argc, char** argv) {
  Plan plan;
  ferry::benchmarks::Options options("Time of copies between GPUs by the stand-in for a network card");
  options.add("--kib", plan.kib, "Sizes of a copy in KiB");
  options.add("--in-flight", plan.in_flight, "Numbers of copies that begin together");
  options.add("--from", plan.from, "GPU that has the bytes");
  options.add("--to", plan.to, "GPU that gets them");
  options.add("--runs", plan.num_runs, "Timed runs", ferry::benchmarks::Range{1, 1'000'000});
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  const std::unique_ptr<GpuCopies> copies = GpuCopies::create();
  if (copies == nullptr) stop("there is no GPU");
  const std::size_t most = static_cast<std::size_t>(std::ranges::max(plan.kib)) * 1024 *
                           static_cast<std::size_t>(std::ranges::max(plan.in_flight));
  const std::shared_ptr<std::byte> from = take(*copies, plan.from, most);
  const std::shared_ptr<std::byte> to = take(*copies, plan.to, most);
  nlohmann::json reports = nlohmann::json::array();
  for (const int kib : plan.kib) {
    for (const int in_flight : plan.in_flight) {
      const std::size_t num_bytes = static_cast<std::size_t>(kib) * 1024;
      const auto count = static_cast<std::size_t>(in_flight);
      std::vector<double> times;
      for (int i = 0; i < plan.num_runs; ++i) times.push_back(run(*copies, to.get(), from.get(), num_bytes, count));
      std::ranges::sort(times);
      const double median = times[times.size() / 2];
      reports.push_back({{"kib", kib},
                         {"in_flight", in_flight},
                         {"us_of_all_least", times.front()},
                         {"us_of_all_median", median},
                         {"us_of_all_greatest", times.back()},
                         {"gb_per_s_median", static_cast<double>(num_bytes * count) / (median * kNsPerUs)}});
    }
  }
  fmt::print("{}\n", reports.dump(2));
  copies->forget(from.get());
  copies->forget(to.get());
  return 0;
}
