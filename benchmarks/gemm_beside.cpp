/// A matrix product and an exchange at the same time, as in a model whose layers overlap: how much each is slowed down
/// by the other. Each rank has two streams, one for products and one for Ferry's calls. Measured are the products
/// alone, the calls alone, and both at once. Prints JSON; all times are medians, per rank.
///
/// Ranks are threads of this program, rank r on GPU r modulo their number. The product is a plain kernel by tensor
/// cores (gemm_beside_gpu.cu), no library's.

#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"
#include "gemm_beside_calls.hpp"
#include "gemm_beside_gpu.hpp"
#include "options.hpp"

namespace {

using ferry::bench::Exchange;
using ferry::bench::throw_if_cuda_error;
using Plan = ferry::bench::GemmBesidePlan;

constexpr double kMostGemms = 400;

struct Timed {
  double exchange_us = 0;
  double gemm_us = 0;
  double all_us = 0;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

class Events {
 public:
  Events() {
    for (cudaEvent_t* event : all()) throw_if_cuda_error(cudaEventCreate(event));
  }
  ~Events() {
    for (cudaEvent_t* event : all()) cudaEventDestroy(*event);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  cudaEvent_t exchange_begin = nullptr;
  cudaEvent_t exchange_end = nullptr;
  cudaEvent_t gemm_begin = nullptr;
  cudaEvent_t gemm_end = nullptr;
  cudaEvent_t between = nullptr;

 private:
  std::vector<cudaEvent_t*> all() { return {&exchange_begin, &exchange_end, &gemm_begin, &gemm_end, &between}; }
};

cudaStream_t make_stream(bool is_first) {
  int least = 0;
  int greatest = 0;
  throw_if_cuda_error(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  throw_if_cuda_error(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, is_first ? greatest : least));
  return stream;
}

double us_between(cudaEvent_t begin, cudaEvent_t end) {
  float ms = 0;
  throw_if_cuda_error(cudaEventElapsedTime(&ms, begin, end));
  return static_cast<double>(ms) * 1e3;
}

/// Numbers and reports that the ranks exchange.
struct Shared {
  explicit Shared(const Plan& plan)
      : meet(plan.num_ranks), numbers(static_cast<std::size_t>(plan.num_ranks)), reports(numbers.size()) {}
  std::barrier<> meet;
  std::vector<double> numbers;
  std::vector<nlohmann::json> reports;
};

class Rank {
 public:
  Rank(const Plan& plan, int rank, Shared* shared)
      : plan_(plan),
        shared_(*shared),
        rank_(static_cast<std::size_t>(rank)),
        exchange_stream_(make_stream(!plan.same_priority)),
        gemm_stream_(make_stream(false)),
        gemm_(plan.m, plan.n, plan.k),
        calls_(plan, rank, exchange_stream_) {
    gemm_.start(gemm_stream_);
    if (!gemm_.is_right(gemm_stream_)) throw std::runtime_error("the matrix product is wrong");
  }
  ~Rank() {
    cudaStreamDestroy(exchange_stream_);
    cudaStreamDestroy(gemm_stream_);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void run(const std::shared_ptr<ferry::Bootstrap>& bootstrap) {
    shared_.meet.arrive_and_wait();  // all have taken their memory
    calls_.create_group(bootstrap);
    nlohmann::json report = nlohmann::json::array();
    for (const int num_sms : plan_.num_sms) {
      for (const Exchange& exchange : calls_.exchanges(num_sms)) {
        // What a first call takes may wait for a stream that the gate holds.
        for (const auto& part : exchange.parts) part();
        calls_.wait();
        report.push_back(measure(exchange));
      }
    }
    shared_.reports[rank_] = std::move(report);
    calls_.destroy_group();
  }

 private:
  /// One iteration of all ranks, of the exchange, of products, or of both. Between two parts of the exchange lies a
  /// share of the products, as in a program that computes while rows travel.
  Timed iterate(const Exchange* exchange, int num_gemms) {
    gate_.close({exchange_stream_, gemm_stream_});
    throw_if_cuda_error(cudaEventRecord(events_.exchange_begin, exchange_stream_));
    throw_if_cuda_error(cudaEventRecord(events_.gemm_begin, gemm_stream_));
    const std::size_t num_parts = exchange != nullptr ? exchange->parts.size() : 1;
    const auto num_shares = static_cast<int>(std::max<std::size_t>(1, num_parts - 1));
    int num_started = 0;
    for (std::size_t part = 0; part < num_parts; ++part) {
      if (exchange != nullptr) exchange->parts[part]();
      if (static_cast<int>(part) >= num_shares) continue;
      const int num_until = num_gemms * (static_cast<int>(part) + 1) / num_shares;
      for (; num_started < num_until; ++num_started) gemm_.start(gemm_stream_);
      if (num_parts == 1 || num_gemms == 0) continue;
      throw_if_cuda_error(cudaEventRecord(events_.between, gemm_stream_));
      throw_if_cuda_error(cudaStreamWaitEvent(exchange_stream_, events_.between, 0));
    }
    throw_if_cuda_error(cudaEventRecord(events_.exchange_end, exchange_stream_));
    throw_if_cuda_error(cudaEventRecord(events_.gemm_end, gemm_stream_));
    shared_.meet.arrive_and_wait();
    gate_.open();
    calls_.wait();
    throw_if_cuda_error(cudaStreamSynchronize(exchange_stream_));
    throw_if_cuda_error(cudaStreamSynchronize(gemm_stream_));
    Timed timed{us_between(events_.exchange_begin, events_.exchange_end),
                us_between(events_.gemm_begin, events_.gemm_end)};
    timed.all_us = std::max(us_between(events_.exchange_begin, events_.gemm_end), timed.exchange_us);
    shared_.meet.arrive_and_wait();
    return timed;
  }

  Timed medians(const Exchange* exchange, int num_gemms) {
    std::vector<double> exchange_us;
    std::vector<double> gemm_us;
    std::vector<double> all_us;
    for (int i = 0; i < plan_.num_warmup + plan_.num_iterations; ++i) {
      const Timed timed = iterate(exchange, num_gemms);
      if (i < plan_.num_warmup) continue;
      exchange_us.push_back(timed.exchange_us);
      gemm_us.push_back(timed.gemm_us);
      all_us.push_back(timed.all_us);
    }
    return {median(exchange_us), median(gemm_us), median(all_us)};
  }

  /// Largest number of any rank.
  double largest(double mine) {
    shared_.numbers[rank_] = mine;
    shared_.meet.arrive_and_wait();
    const double result = *std::ranges::max_element(shared_.numbers);
    shared_.meet.arrive_and_wait();
    return result;
  }

  nlohmann::json measure(const Exchange& exchange) {
    const double exchange_us = medians(&exchange, 0).exchange_us;
    const double one_us = medians(nullptr, 1).gemm_us;
    // Enough that products run as long as the exchange does, and no more than a stream that is held has room for; an
    // even number, for the gaps of split calls.
    const double wanted = std::min(largest(1.25 * exchange_us / one_us), kMostGemms);
    const int num_gemms = 2 * static_cast<int>(std::ceil(wanted / 2));
    const double gemm_us = medians(nullptr, num_gemms).gemm_us;
    const Timed both = medians(&exchange, num_gemms);
    return {{"exchange", exchange.name},
            {"num_sms", exchange.num_sms},
            {"num_gemms", num_gemms},
            {"exchange_alone_us", exchange_us},
            {"exchange_beside_us", both.exchange_us},
            {"exchange_ratio", both.exchange_us / exchange_us},
            {"gemm_alone_us", gemm_us},
            {"gemm_beside_us", both.gemm_us},
            {"gemm_ratio", both.gemm_us / gemm_us},
            {"gemm_alone_tflops", gemm_.flops() * num_gemms / gemm_us / 1e6},
            {"both_us", both.all_us},
            {"one_after_the_other_us", exchange_us + gemm_us}};
  }

  const Plan& plan_;
  Shared& shared_;
  const std::size_t rank_;
  const cudaStream_t exchange_stream_;
  const cudaStream_t gemm_stream_;
  ferry::bench::Gemm gemm_;
  ferry::bench::Gate gate_;
  Events events_;
  ferry::bench::Calls calls_;
};

void run_rank(const Plan& plan, const std::shared_ptr<ferry::Bootstrap>& bootstrap, int num_gpus, Shared* shared) {
  try {
    throw_if_cuda_error(cudaSetDevice(bootstrap->rank() % num_gpus));
    Rank(plan, bootstrap->rank(), shared).run(bootstrap);
  } catch (const std::exception& error) {
    // The others wait for this rank in ways that have no deadline.
    fmt::print(stderr, "gemm_beside: rank {}: {}\n", bootstrap->rank(), error.what());
    std::_Exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Plan plan;
  ferry::benchmarks::Options options("A matrix product and an exchange at the same time, on GPUs");
  options.add("--ranks", plan.num_ranks, "Ranks, threads of this program", {{1, 64}});
  options.add("--nodes", plan.num_nodes, "Nodes that the ranks are spread over", {{1, 64}});
  options.add("--transport", plan.transport, "Between nodes: auto, ucx or loopback");
  options.add("--ring-memory", plan.ring_memory, "Between nodes: auto, host or gpu");
  options.add("--tokens", plan.num_tokens, "Tokens of a rank in dispatch and combine", {{1, 1 << 20}});
  options.add("--latency-tokens", plan.num_latency_tokens, "The same in latency mode", {{1, 1 << 14}});
  options.add("--hidden", plan.hidden, "Channels, a multiple of 8", {{8, 1 << 20}});
  options.add("--topk", plan.num_topk, "Experts of a token", {{1, 32}});
  options.add("--experts", plan.num_experts, "Experts, a multiple of the ranks", {{1, 1 << 16}});
  options.add("--num-sms", plan.num_sms, "Most multiprocessors of a call");
  options.add("--gemm-m", plan.m, "Rows of the product, a multiple of 128", {{128, 1 << 17}});
  options.add("--gemm-n", plan.n, "Columns of the product, a multiple of 128", {{128, 1 << 17}});
  options.add("--gemm-k", plan.k, "Length of its sums, a multiple of 32", {{32, 1 << 17}});
  options.add("--iterations", plan.num_iterations, "Timed iterations", {{1, 100'000}});
  options.add("--warmup", plan.num_warmup, "Iterations before those", {{0, 100'000}});
  options.add_flag("--same-priority", plan.same_priority,
                   "Both streams have the same priority; otherwise that of the exchange has the greatest");
  if (const std::optional<int> exit_code = options.parse(argc, argv)) return *exit_code;
  if (plan.num_ranks % plan.num_nodes != 0 || plan.num_experts % plan.num_ranks != 0 ||
      plan.num_experts < plan.num_topk) {
    fmt::print(stderr, "gemm_beside: --ranks is a multiple of --nodes, and --experts of --ranks and at least --topk\n");
    return 2;
  }
  // Ranks that share a GPU: a stream of one must not wait behind those of another, nor for a kernel to be loaded.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  for (const ferry::BackendInfo& backend : ferry::backends()) {
    if (backend.name != "cuda" || backend.available) continue;
    fmt::print(stderr, "gemm_beside: {}\n", backend.reason);
    return 1;
  }
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess || num_gpus == 0) {
    fmt::print(stderr, "gemm_beside: there is no GPU\n");
    return 1;
  }
  cudaDeviceProp properties{};
  (void)cudaGetDeviceProperties(&properties, 0);
  const auto bootstraps = ferry::create_in_process_bootstraps(plan.num_ranks).value();
  Shared shared(plan);
  {
    std::vector<std::jthread> ranks;
    for (const auto& bootstrap : bootstraps) {
      ranks.emplace_back([&plan, &bootstrap, num_gpus, &shared] { run_rank(plan, bootstrap, num_gpus, &shared); });
    }
  }
  const nlohmann::json report{{"gpu", properties.name},
                              {"num_gpus", num_gpus},
                              {"shape",
                               {{"ranks", plan.num_ranks},
                                {"nodes", plan.num_nodes},
                                {"tokens", plan.num_tokens},
                                {"latency_tokens", plan.num_latency_tokens},
                                {"hidden", plan.hidden},
                                {"topk", plan.num_topk},
                                {"experts", plan.num_experts}}},
                              {"gemm", {{"m", plan.m}, {"n", plan.n}, {"k", plan.k}}},
                              {"iterations", plan.num_iterations},
                              {"same_priority", plan.same_priority},
                              {"ranks", shared.reports}};
  fmt::print("{}\n", report.dump(2));
  return 0;
}
