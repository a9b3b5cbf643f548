#include "bench/one_sided_gpu.hpp"

#include <fmt/format.h>

namespace ferry::tools {

namespace {

/// Reads the word back once, because CUDA's first copy to the host allocates buffers.
DeviceMemory make_zero_word(Stream stream) {
  DeviceMemory word = allocate_device_memory(sizeof(std::uint64_t)).value();
  throw_if_error(fill_device_bytes(word.get(), 0, sizeof(std::uint64_t), stream));
  std::uint64_t read = 0;
  throw_if_error(copy_device_bytes(&read, word.get(), sizeof(read), stream));
  return word;
}

}  // namespace

GpuSeries::GpuSeries(const OneSidedRun& run, OneSided& shm, Stream stream, std::size_t max_bytes)
    : run_(run),
      shm_(shm),
      stream_(stream),
      is_first_(shm.rank() == 0),
      other_(is_first_ ? shm.num_ranks() - 1 : 0),
      local_(allocate_device_memory(2 * max_bytes).value()),
      failed_(make_zero_word(stream)),
      start_(DeviceEvent::create().value()),
      end_(DeviceEvent::create().value()),
      world_(shm.device_world().value()),
      block_(shm.allocate<std::byte>(2 * max_bytes).value().data()),
      words_(shm.allocate<std::uint64_t>(4).value().data()),
      raw_block_(shm.peer_pointer(other_, block_)),
      raw_words_(shm.peer_pointer(other_, words_)) {}

OneSidedKernelParams GpuSeries::params(std::size_t num_bytes, int num_calls, bool raw) const {
  OneSidedKernelParams params;
  params.world = world_;
  params.op = run_.op;
  params.raw = raw;
  params.is_first = is_first_;
  params.other = other_;
  params.block = block_;
  params.raw_block = raw_block_;
  params.local = local_.get();
  // Plain stores count their turns in a separate word.
  const std::size_t idx = raw ? 1 : 0;
  params.word = words_ + idx;
  params.raw_word = raw_words_ == nullptr ? nullptr : raw_words_ + idx;
  params.num_bytes = num_bytes;
  params.turn = turn_;
  params.num_calls = num_calls;
  params.failed = reinterpret_cast<std::uint64_t*>(failed_.get());
  return params;
}

/// Nanoseconds of each launch. If only the first rank acts, the other rank waits in the barrier.
std::vector<std::int64_t> GpuSeries::series(bool acts, const KernelCounts& kernels,
                                            const std::function<Status()>& launch) {
  std::vector<std::int64_t> times;
  for (int i = 0; i < kernels.num_warmup + kernels.num_iterations; ++i) {
    throw_if_error(shm_.barrier(stream_));
    throw_if_error(start_.record(stream_));
    if (acts) throw_if_error(launch());
    throw_if_error(end_.record(stream_));
    const std::int64_t elapsed_ns = end_.elapsed_ns_since(start_).value();
    throw_if_error(shm_.poll_errors());  // otherwise all later kernels would wait until their deadlines
    if (acts && i >= kernels.num_warmup) times.push_back(elapsed_ns);
  }
  throw_if_error(shm_.barrier(stream_));
  std::uint64_t failed = 0;
  throw_if_error(copy_device_bytes(&failed, failed_.get(), sizeof(failed), stream_));
  throw_if_error(shm_.poll_errors());
  if (failed != 0) {
    throw_if_error(Status(ErrorCode::kTimeout, fmt::format("{} calls or waits of a kernel failed", failed)));
  }
  return times;
}

std::vector<std::int64_t> GpuSeries::exchanges(std::size_t num_bytes, int num_calls, bool raw,
                                               const KernelCounts& kernels) {
  const bool both_ways = run_.op == BenchOp::kPut || run_.op == BenchOp::kSignal;
  std::vector<std::int64_t> times = series(is_first_ || both_ways, kernels, [&] {
    Status status = launch_exchanges(params(num_bytes, num_calls, raw), stream_);
    turn_ += static_cast<std::uint64_t>(num_calls);
    return status;
  });
  for (std::int64_t& time : times) time /= num_calls * (both_ways ? 2 : 1);
  return times;
}

std::vector<std::int64_t> GpuSeries::windows(std::size_t num_bytes, int num_calls, bool raw,
                                             const KernelCounts& kernels) {
  return series(is_first_, kernels, [&] { return launch_window(params(num_bytes, num_calls, raw), stream_); });
}

}  // namespace ferry::tools
