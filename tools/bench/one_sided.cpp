#include "bench/one_sided.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "bench/one_sided_gpu.hpp"
#include "common/timing.hpp"
#include "device/rank_device.hpp"
#include "ferry/one_sided.hpp"
#include "ferry/version.hpp"
#include "report/host_facts.hpp"
#include "report/json_report.hpp"
#include "report/output.hpp"
#include "report/table.hpp"
#include "run/exit_code.hpp"

namespace ferry::tools {

namespace {

constexpr std::array<std::int64_t, 5> kSizes{8, 512, 8192, 65'536, 1'048'576};
/// Calls per sample of a rate: copies in flight at once, like the window of ucx_perftest.
constexpr int kWindow = 32;
/// Calls per sample of a latency, so that reading the clock does not count.
constexpr int kBatch = 10;
constexpr std::size_t kHeapBytes = std::size_t{16} << 20;
/// Same for kernels: the launch must not count, and a GPU has far more calls on words in flight.
constexpr int kGpuBatch = 100;
/// Time limit of a batch, beyond which it has fewer calls: a round trip takes two time slices if rank processes share a
/// GPU, and a copy of a megabyte is slow over TCP.
constexpr std::int64_t kMaxBatchNs = 20'000'000;
/// Calls of a trial kernel, and number of trials, of which the fastest decides the batch: a kernel may have been
/// delayed.
constexpr int kTrialCalls = 2;
constexpr int kNumTrials = 5;
constexpr int kGpuWordWindow = 4096;

/// Figures for one size, measured by rank 0. Nanoseconds.
struct Figures {
  std::int64_t num_bytes = 0;
  int num_calls = 0;             ///< calls over which a latency is averaged
  std::int64_t latency_p50 = 0;  ///< time of one call: until it has returned (get, fadd), or half of a round trip
  std::int64_t latency_p99 = 0;
  std::int64_t window_p50 = 0;       ///< time of kWindow calls and quiet
  std::int64_t raw_latency_p50 = 0;  ///< latency with plain loads and stores; 0: the ranks are on different nodes
  std::int64_t raw_window_p50 = 0;
};
using Area = std::array<Figures, kSizes.size()>;

int window_calls(const OneSidedRun& run) {
  const bool copies = run.op == BenchOp::kPut || run.op == BenchOp::kGet;
  return run.backend == "cuda" && !copies ? kGpuWordWindow : kWindow;
}

std::size_t num_sizes(BenchOp op) { return op == BenchOp::kPut || op == BenchOp::kGet ? kSizes.size() : 1; }

std::atomic_ref<std::uint64_t> shared(std::uint64_t* word) { return std::atomic_ref(*word); }

/// State with which rank 0 and the last rank measure.
class Pair {
 public:
  Pair(const OneSidedRun& run, OneSided& shm)
      : run_(run),
        shm_(shm),
        is_first_(shm.rank() == 0),
        other_(is_first_ ? shm.num_ranks() - 1 : 0),
        block_(shm.allocate<std::byte>(static_cast<std::size_t>(kSizes.back()) * 2).value()),
        words_(shm.allocate<std::uint64_t>(4).value()),
        local_(static_cast<std::size_t>(kSizes.back()) * 2, std::byte{1}),
        raw_block_(shm.peer_pointer(other_, block_.data())),
        raw_words_(shm.peer_pointer(other_, words_.data())) {}

  /// Checks that get returns the bytes that put sent. Both ranks call it.
  Status check() {
    throw_if_error(shm_.barrier());
    if (is_first_) {
      std::vector<std::byte> sent(block_.size());
      for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i * 7 + i / 251);
      std::vector<std::byte> got(sent.size());
      throw_if_error(shm_.put(other_, block_.data(), sent.data(), sent.size()));
      throw_if_error(shm_.quiet());
      throw_if_error(shm_.get(other_, got.data(), block_.data(), got.size()));
      if (got != sent)
        return {ErrorCode::kInternal, "get did not return the bytes that put sent; please report this bug"};
    }
    throw_if_error(shm_.barrier());
    return {};
  }

  Figures measure(std::int64_t num_bytes) {
    bytes_ = static_cast<std::size_t>(num_bytes);
    Figures figures;
    figures.num_bytes = num_bytes;
    figures.num_calls = kBatch;
    const std::vector<std::int64_t> latency = series([this] { exchange(); }, kBatch);
    figures.latency_p50 = percentile(latency, 50);
    figures.latency_p99 = percentile(latency, 99);
    figures.window_p50 = percentile(series([this] { window(); }, 1), 50);
    if (raw_block_ != nullptr) {
      figures.raw_latency_p50 = percentile(series([this] { raw_exchange(); }, kBatch), 50);
      figures.raw_window_p50 = percentile(series([this] { raw_window(); }, 1), 50);
    }
    return figures;
  }

 private:
  bool goes_both_ways() const { return run_.op == BenchOp::kPut || run_.op == BenchOp::kSignal; }
  std::byte* slot(std::byte* begin, int i) const { return begin + static_cast<std::size_t>(i % 2) * bytes_; }

  /// Nanoseconds per call of `step`, with `batch` calls timed together; a round trip counts as two. If only rank 0
  /// acts, the other rank waits in the barrier.
  template <typename Step>
  std::vector<std::int64_t> series(Step step, int batch) {
    throw_if_error(shm_.barrier());
    std::vector<std::int64_t> times;
    const bool acts = is_first_ || (goes_both_ways() && batch > 1);
    for (int i = 0; acts && i < run_.num_warmup + run_.num_iterations; ++i) {
      const std::int64_t start = now_ns();
      for (int call = 0; call < batch; ++call) step();
      const std::int64_t each = (now_ns() - start) / batch / (goes_both_ways() && batch > 1 ? 2 : 1);
      if (i >= run_.num_warmup) times.push_back(each);
    }
    throw_if_error(shm_.barrier());
    return times;
  }

  void exchange() {
    switch (run_.op) {
      case BenchOp::kGet:
        return throw_if_error(shm_.get(other_, local_.data(), block_.data(), bytes_));
      case BenchOp::kFetchAdd:
        throw_if_error(shm_.fetch_add(other_, words_.data(), 1).status());
        return;
      default:
        ++turn_;
        if (is_first_) send();
        throw_if_error(shm_.wait_until(&words_[1], Comparison::kGreaterEqual, turn_));
        if (!is_first_) send();
    }
  }
  void send() {
    throw_if_error(run_.op == BenchOp::kPut ? shm_.put_signal(other_, block_.data(), local_.data(), bytes_, &words_[1],
                                                              turn_, SignalOp::kSet)
                                            : shm_.signal(other_, &words_[1], turn_, SignalOp::kSet));
  }

  void window() {
    for (int i = 0; i < kWindow; ++i) {
      switch (run_.op) {
        case BenchOp::kPut:
          throw_if_error(shm_.put_nbi(other_, slot(block_.data(), i), slot(local_.data(), i), bytes_));
          break;
        case BenchOp::kGet:
          throw_if_error(shm_.get_nbi(other_, slot(local_.data(), i), slot(block_.data(), i), bytes_));
          break;
        default:
          throw_if_error(shm_.signal(other_, words_.data(), 1, SignalOp::kAdd));
      }
    }
    throw_if_error(shm_.quiet());
  }

  void raw_exchange() {
    switch (run_.op) {
      case BenchOp::kGet:
        std::memcpy(local_.data(), raw_block_, bytes_);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        return;
      case BenchOp::kFetchAdd:
        shared(raw_words_).fetch_add(1);
        return;
      default:
        ++raw_turn_;
        if (is_first_) raw_send();
        while (shared(&words_[2]).load(std::memory_order_acquire) < raw_turn_) {
        }
        if (!is_first_) raw_send();
    }
  }
  void raw_send() {
    if (run_.op == BenchOp::kPut) std::memcpy(raw_block_, local_.data(), bytes_);
    shared(raw_words_ + 2).store(raw_turn_, std::memory_order_release);
  }
  void raw_window() {
    for (int i = 0; i < kWindow; ++i) {
      if (run_.op == BenchOp::kPut) {
        std::memcpy(slot(raw_block_, i), slot(local_.data(), i), bytes_);
      } else if (run_.op == BenchOp::kGet) {
        std::memcpy(slot(local_.data(), i), slot(raw_block_, i), bytes_);
      } else {
        shared(raw_words_).fetch_add(1);
      }
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

  const OneSidedRun& run_;
  OneSided& shm_;
  const bool is_first_;
  const int other_;
  std::span<std::byte> block_;
  std::span<std::uint64_t> words_;
  std::vector<std::byte> local_;
  std::byte* raw_block_;  // of the other rank; null on another node
  std::uint64_t* raw_words_;
  std::size_t bytes_ = 0;
  std::uint64_t turn_ = 0;
  std::uint64_t raw_turn_ = 0;
};

/// Number of calls per kernel, the same on both ranks.
int batch_of(GpuSeries& gpu, RankContext& context, std::size_t num_bytes) {
  const std::vector<std::int64_t> times = gpu.exchanges(num_bytes, kTrialCalls, false, {1, kNumTrials});
  const std::int64_t slowest_ns = context.largest(times.empty() ? 1 : std::ranges::min(times)).value();
  return static_cast<int>(std::clamp<std::int64_t>(kMaxBatchNs / std::max<std::int64_t>(slowest_ns, 1), 1, kGpuBatch));
}

Figures measure_gpu(GpuSeries& gpu, const OneSidedRun& run, RankContext& context, std::int64_t num_bytes) {
  const KernelCounts kernels{run.num_warmup, run.num_iterations};
  const auto bytes = static_cast<std::size_t>(num_bytes);
  const auto p50 = [](const std::vector<std::int64_t>& times) { return times.empty() ? 0 : percentile(times, 50); };
  Figures figures;
  figures.num_bytes = num_bytes;
  const int batch = batch_of(gpu, context, bytes);
  figures.num_calls = batch;
  const std::vector<std::int64_t> latency = gpu.exchanges(bytes, batch, false, kernels);
  figures.latency_p50 = p50(latency);
  figures.latency_p99 = latency.empty() ? 0 : percentile(latency, 99);
  figures.window_p50 = p50(gpu.windows(bytes, window_calls(run), false, kernels));
  if (gpu.has_raw()) {
    figures.raw_latency_p50 = p50(gpu.exchanges(bytes, batch, true, kernels));
    figures.raw_window_p50 = p50(gpu.windows(bytes, window_calls(run), true, kernels));
  }
  return figures;
}

Status run_rank(const OneSidedRun& run, RankContext& context) {
  const Result<RankDevice> device = RankDevice::open(run.backend, context.rank());
  if (!device) return device.status();
  OneSidedOptions options;
  options.device = device->ordinal();
  options.backend = run.backend;
  options.heap_bytes = kHeapBytes;
  options.ranks_per_node = run.launch.ranks_per_node();
  options.transport = run.common.transport;
  options.net_devices = run.common.net_devices;
  options.timeout_ns = run.common.timeout_ns();
  Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
  if (!shm) return shm.status();
  auto& area = *reinterpret_cast<Area*>(context.result().data());
  try {
    if (run.backend == "cuda") {
      GpuSeries gpu(run, **shm, device->stream(), static_cast<std::size_t>(kSizes.back()));
      for (std::size_t i = 0; i < num_sizes(run.op); ++i) area[i] = measure_gpu(gpu, run, context, kSizes[i]);
      return (*shm)->destroy();
    }
    Pair pair(run, **shm);
    const bool takes_part = context.rank() == 0 || context.rank() == context.num_ranks() - 1;
    if (takes_part) {
      if (Status status = pair.check(); !status) return status;
    } else {
      for (int meeting = 0; meeting < 2; ++meeting) throw_if_error((*shm)->barrier());
    }
    for (std::size_t i = 0; i < num_sizes(run.op); ++i) {
      if (takes_part) {
        area[i] = pair.measure(kSizes[i]);
        continue;
      }
      // Each series has two meetings.
      const int num_series = run.launch.num_nodes == 1 ? 4 : 2;
      for (int meeting = 0; meeting < 2 * num_series; ++meeting) throw_if_error((*shm)->barrier());
    }
  } catch (const Error& error) {
    return error.status();
  }
  return (*shm)->destroy();
}

/// Rate of copies, in GB/s.
std::string rate(std::int64_t num_bytes, std::int64_t window_ns) {
  return fmt::format("{:.2f}", static_cast<double>(num_bytes * kWindow) / static_cast<double>(window_ns));
}

double ratio(std::int64_t reference, std::int64_t ours) {
  return static_cast<double>(reference) / static_cast<double>(std::max<std::int64_t>(ours, 1));
}

std::string to_text(const OneSidedRun& run, std::span<const Figures> all) {
  Table table({"bytes", "latency p50", "p99", "plain", "plain/this", "GB/s", "plain GB/s", "this/plain", "M calls/s"});
  for (const Figures& one : all) {
    const bool raw = one.raw_window_p50 > 0;
    const bool copies = run.op == BenchOp::kPut || run.op == BenchOp::kGet;
    table.add_row({std::to_string(one.num_bytes), format_ns(one.latency_p50), format_ns(one.latency_p99),
                   raw ? format_ns(one.raw_latency_p50) : "-",
                   raw ? fmt::format("{:.2f}", ratio(one.raw_latency_p50, one.latency_p50)) : "-",
                   copies ? rate(one.num_bytes, one.window_p50) : "-",
                   copies && raw ? rate(one.num_bytes, one.raw_window_p50) : "-",
                   raw ? fmt::format("{:.2f}", ratio(one.raw_window_p50, one.window_p50)) : "-",
                   fmt::format("{:.3f}", window_calls(run) * 1e3 / static_cast<double>(one.window_p50))});
  }
  return table.to_string();
}

Json to_json(const OneSidedRun& run, std::span<const Figures> all) {
  Json report;
  report["command"] = "bench";
  report["op"] = name_of(run.op);
  report["version"] = version();
  report["commit"] = commit();
  report["host"] = describe(read_host_facts());
  report["backend"] = run.backend;
  report["transport"] = run.launch.num_nodes > 1 ? run.common.transport : "";
  report["num_ranks"] = run.launch.num_ranks;
  report["num_nodes"] = run.launch.num_nodes;
  report["window"] = window_calls(run);
  report["results"] = Json::array();
  for (const Figures& one : all) {
    Json entry;
    entry["num_bytes"] = one.num_bytes;
    entry["latency_calls"] = one.num_calls;
    entry["latency_p50_ns"] = one.latency_p50;
    entry["latency_p99_ns"] = one.latency_p99;
    entry["window_p50_ns"] = one.window_p50;
    if (one.raw_window_p50 > 0) {
      entry["plain_latency_p50_ns"] = one.raw_latency_p50;
      entry["plain_window_p50_ns"] = one.raw_window_p50;
    }
    report["results"].push_back(std::move(entry));
  }
  return report;
}

std::string introduction(const OneSidedRun& run) {
  return fmt::format(
      "Ferry {} ({}), backend {}: {}\n{}\n"
      "one-sided {}, rank 0 and rank {}{}, {} iterations after {} to warm up\n"
      "latency: {}; rate: {} calls and quiet{}\n",
      version(), commit(), run.backend, run.launch.description, describe(read_host_facts()), name_of(run.op),
      run.launch.num_ranks - 1, run.launch.num_nodes > 1 ? " of another node" : "", run.num_iterations, run.num_warmup,
      run.op == BenchOp::kPut      ? "half of put_signal there and back"
      : run.op == BenchOp::kSignal ? "half of a signal there and back"
                                   : "until the call has returned",
      window_calls(run),
      run.launch.num_nodes > 1 ? ""
      : run.backend == "cuda"
          ? "; all of them from kernels; plain: the same by loads, stores and atomics of the GPU"
          : "; plain: the same by memcpy, stores and atomics on memory that both ranks have mapped");
}

}  // namespace

int run_one_sided_bench(const OneSidedRun& run) {
  const auto fail = [](const Status& status, int exit_code) { return report_failure("bench", status, exit_code); };
  if (run.launch.num_ranks < 2) {
    return fail({ErrorCode::kInvalidArgument,
                 fmt::format("--op {} is between two ranks; give --ranks 2 or more", name_of(run.op))},
                kExitUsage);
  }
  if (run.backend == "cuda" && run.launch.num_ranks != kOneSidedRanks) {
    return fail({ErrorCode::kInvalidArgument, fmt::format("--op {} on GPUs is between {} ranks; give --ranks {}",
                                                          name_of(run.op), kOneSidedRanks, kOneSidedRanks)},
                kExitUsage);
  }
  if (run.launch.reports_here()) {
    const Status status = print(text_stream(run.json_path), introduction(run));
    if (!status && !run.launch.from_environment) return fail(status, kExitFailed);
  }
  const RunOptions options{run.launch, sizeof(Area), run.common.timeout_ns()};
  const auto outcome = run_ranks(options, [&](RankContext& context) { return run_rank(run, context); });
  if (!outcome) return fail(outcome.status(), kExitFailed);
  if (!run.launch.reports_here()) return kExitOk;
  const auto& area = *reinterpret_cast<const Area*>(outcome->result(0).data());
  const std::span<const Figures> figures = std::span(area).first(num_sizes(run.op));
  if (Status status = print(text_stream(run.json_path), to_text(run, figures)); !status) {
    return fail(status, kExitFailed);
  }
  if (run.json_path.empty()) return kExitOk;
  Status status = write_json(run.json_path, to_json(run, figures));
  return status ? kExitOk : fail(status, kExitFailed);
}

}  // namespace ferry::tools
