#include "cuda/one_sided/backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string_view>
#include <utility>

#include "cuda/context/parts.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/one_sided/errors.hpp"
#include "cuda/one_sided/kernels.hpp"
#include "cuda/one_sided/memory.hpp"
#include "cuda/one_sided/streams.hpp"
#include "cuda/one_sided/watch.hpp"
#include "ferry/device/comparison.hpp"

namespace ferry::cuda {
namespace {

/// Blocks of one copy: enough to fill NVLink with stores; the program keeps the other multiprocessors.
constexpr unsigned kMaxCopyBlocks = 32;

WordCall to_call(one_sided::FetchOp op) {
  using one_sided::FetchOp;
  switch (op) {
    case FetchOp::kAdd:
      return WordCall::kFetchAdd;
    case FetchOp::kCompareSwap:
      return WordCall::kCompareSwap;
    case FetchOp::kSwap:
      return WordCall::kSwap;
    case FetchOp::kAnd:
      return WordCall::kFetchAnd;
    case FetchOp::kOr:
      return WordCall::kFetchOr;
    case FetchOp::kXor:
      break;
  }
  return WordCall::kFetchXor;
}

class CudaOneSided final : public one_sided::Backend {
 public:
  explicit CudaOneSided(std::unique_ptr<OneSidedMemory> memory) : memory_(std::move(memory)) {
    if (one_sided::Driver* const driver = memory_->fabric().driver(); driver != nullptr) {
      source_ = std::make_unique<one_sided::RingSource>(memory_->ring_options());
      driver->attach(source_.get());
    }
    watch_ = std::make_unique<OneSidedWatch>(memory_->fabric(), memory_->errors(), source_.get());
  }
  ~CudaOneSided() override;

  Status start() { return watch_->start(); }

  std::string_view name() const override { return "cuda"; }
  bool takes_streams() const override { return true; }
  std::byte* heap() const override { return memory_->heap(); }
  std::size_t heap_bytes() const override { return memory_->heap_bytes(); }
  std::byte* peer_heap(int rank) const override { return memory_->peer_heap(rank); }
  Status zero(std::size_t offset, std::size_t num_bytes) override;

  Status put(const one_sided::PutCall& call) override;
  Status get(const one_sided::GetCall& call) override;
  Status put_signal(const one_sided::PutCall& put, const one_sided::SignalCall& signal) override;
  Status signal(const one_sided::SignalCall& call) override;
  Status fetch(const one_sided::FetchCall& call, void* fetched) override;
  Result<std::uint64_t> fetch_now(const one_sided::FetchCall& call) override;
  Status wait_until(const one_sided::WaitCall& call) override;
  Result<bool> test(const one_sided::WaitCall& call) override;
  Status fence(int rank, Stream stream) override;
  Status quiet(int rank, Stream stream) override;
  Status barrier(const one_sided::TeamState& team, Stream stream) override;
  Result<std::vector<one_sided::Entry>> exchange(const one_sided::TeamState& team,
                                                 const one_sided::Entry& mine) override;
  Status leave(const one_sided::TeamState& world) override;
  Result<::ferry::device::World> device_world() override;
  Result<::ferry::device::TeamView> device_team(const one_sided::TeamState& team) override;
  Status poll_errors() override;

 private:
  void part();
  template <typename Launch>
  Status launch(std::string_view operation, Stream stream, Launch launch);
  WordParams word_params(WordCall call, int rank, std::size_t offset) const;
  WordParams fetch_params(const one_sided::FetchCall& call) const;
  Status finish_streams(std::string_view operation);
  Status run_now(std::string_view operation, const WordParams& params);
  std::uint64_t* word_at(std::size_t offset) const { return reinterpret_cast<std::uint64_t*>(heap() + offset); }

  // The network's thread may complete requests of the source until the memory's fabric is gone.
  std::unique_ptr<one_sided::RingSource> source_;
  std::unique_ptr<OneSidedMemory> memory_;
  UsedStreams streams_;
  std::mutex result_mutex_;  // the word of results, and the stream of this backend's own
  std::mutex teams_mutex_;
  std::unique_ptr<OneSidedWatch> watch_;
};

CudaOneSided::~CudaOneSided() {
  const DeviceGuard guard(memory_->device());
  const RelaxedCapture relaxed;
  // Kernels that still wait use memory that is about to be freed.
  OneSidedWatch::stop_kernels(memory_->errors(), ::ferry::device::stop_word::kOver);
  (void)streams_.wait();
  part();
  // Before memory is given back: that may wait for kernels of other ranks on this GPU, which may wait for this rank.
  memory_->fabric().abandon();
}

/// Ends the watch and detaches the source: neither may use the fabric after it has left.
void CudaOneSided::part() {
  watch_.reset();
  one_sided::Driver* const driver = memory_->fabric().driver();
  if (source_ != nullptr && driver != nullptr) driver->detach(source_.get());
}

/// Puts kernels on the stream.
template <typename Launch>
Status CudaOneSided::launch(std::string_view operation, Stream stream, Launch launch) {
  const DeviceGuard guard(memory_->device());
  if (!guard.status().ok()) return guard.status();
  if (source_ != nullptr) {
    if (Status status = source_->status(); !status.ok()) return status;
    watch_->expect_requests();
  }
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  Result<bool> captured = streams_.is_captured(operation, handle);
  if (!captured.ok()) return captured.status();
  if (!*captured) {
    if (Status status = check_stream_device(operation, handle, memory_->device()); !status.ok()) return status;
  }
  cudaError_t error = launch(handle);
  if (error == cudaSuccess && !*captured) error = streams_.note(handle);
  return error == cudaSuccess ? Status()
                              : runtime_status(error, fmt::format("{}: launching", operation),
                                               "the GPU or its context failed earlier; see the first error");
}

Status CudaOneSided::zero(std::size_t offset, std::size_t num_bytes) {
  if (memory_->is_on_host()) {
    std::memset(heap() + offset, 0, num_bytes);
    return {};
  }
  const DeviceGuard guard(memory_->device());
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  constexpr std::string_view kZeroing = "allocate: zeroing symmetric memory";
  const std::lock_guard lock(result_mutex_);
  Status status = runtime_status(cudaMemsetAsync(heap() + offset, 0, num_bytes, memory_->stream()), kZeroing);
  return status.ok() ? runtime_status(cudaStreamSynchronize(memory_->stream()), kZeroing) : status;
}

Status CudaOneSided::put(const one_sided::PutCall& call) {
  if (call.num_bytes == 0) return {};
  CopyParams params;
  params.world = memory_->world();
  params.rank = call.rank;
  params.symmetric = heap() + call.offset;
  params.own = const_cast<std::byte*>(call.source);  // only read
  params.num_bytes = call.num_bytes;
  params.later = !call.blocking;
  share_copy(params, std::min(kMaxCopyBlocks, memory_->num_sms()));
  return launch("put", call.stream, [&params](cudaStream_t stream) { return launch_put(params, stream); });
}

Status CudaOneSided::get(const one_sided::GetCall& call) {
  if (call.num_bytes == 0) return {};
  CopyParams params;
  params.world = memory_->world();
  params.rank = call.rank;
  params.symmetric = heap() + call.offset;
  params.own = call.dest;
  params.num_bytes = call.num_bytes;
  params.later = !call.blocking;
  share_copy(params, std::min(kMaxCopyBlocks, memory_->num_sms()));
  return launch("get", call.stream, [&params](cudaStream_t stream) { return launch_get(params, stream); });
}

Status CudaOneSided::put_signal(const one_sided::PutCall& put, const one_sided::SignalCall& signal) {
  CopyParams params;
  params.world = memory_->world();
  params.rank = put.rank;
  params.symmetric = heap() + put.offset;
  params.own = const_cast<std::byte*>(put.source);  // only read
  params.num_bytes = put.num_bytes;
  params.later = !put.blocking;
  const bool shared = share_copy(params, std::min(kMaxCopyBlocks, memory_->num_sms())) > 1;
  if (!shared) {
    params.word = word_at(signal.offset);
    params.value = signal.value;
    params.op = signal.op;
  }
  WordParams after = word_params(WordCall::kSignal, signal.rank, signal.offset);
  after.value = signal.value;
  after.op = signal.op;
  return launch("put_signal", put.stream, [&params, &after, shared](cudaStream_t stream) {
    const cudaError_t error = launch_put(params, stream);
    // Kernels run in order, also for a peer that sees the signal of the second one.
    return error == cudaSuccess && shared ? launch_word_call(after, stream) : error;
  });
}

WordParams CudaOneSided::word_params(WordCall call, int rank, std::size_t offset) const {
  WordParams params;
  params.world = memory_->world();
  params.call = call;
  params.rank = rank;
  params.word = heap() + offset;
  return params;
}

Status CudaOneSided::signal(const one_sided::SignalCall& call) {
  WordParams params = word_params(WordCall::kSignal, call.rank, call.offset);
  params.is_narrow = call.word_bytes == sizeof(std::uint32_t);
  params.value = call.value;
  params.op = call.op;
  return launch("signal", call.stream, [&params](cudaStream_t stream) { return launch_word_call(params, stream); });
}

WordParams CudaOneSided::fetch_params(const one_sided::FetchCall& call) const {
  WordParams params = word_params(to_call(call.op), call.rank, call.offset);
  params.is_narrow = call.word_bytes == sizeof(std::uint32_t);
  params.value = call.value;
  params.expected = call.expected;
  return params;
}

Status CudaOneSided::fetch(const one_sided::FetchCall& call, void* fetched) {
  WordParams params = fetch_params(call);
  params.fetched = fetched;
  return launch(name_of(call.op), call.stream,
                [&params](cudaStream_t stream) { return launch_word_call(params, stream); });
}

/// Makes a call on the backend's own stream and waits for it. The caller holds result_mutex_.
Status CudaOneSided::run_now(std::string_view operation, const WordParams& params) {
  const DeviceGuard guard(memory_->device());
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  if (source_ != nullptr) watch_->expect_requests();
  Status status = runtime_status(launch_word_call(params, memory_->stream()), fmt::format("{}: launching", operation));
  if (!status.ok()) return status;
  return runtime_status(cudaStreamSynchronize(memory_->stream()), fmt::format("{}: waiting for its kernel", operation));
}

Result<std::uint64_t> CudaOneSided::fetch_now(const one_sided::FetchCall& call) {
  const std::string_view operation = name_of(call.op);
  WordParams params = fetch_params(call);
  params.fetched = memory_->result_of_kernels();
  const std::lock_guard lock(result_mutex_);
  if (Status status = run_now(operation, params); !status.ok()) return status;
  if (Status status = poll_errors(); !status.ok()) return status;
  return memory_->result();
}

Status CudaOneSided::wait_until(const one_sided::WaitCall& call) {
  WordParams params = word_params(WordCall::kWaitUntil, -1, call.offset);
  params.comparison = call.comparison;
  params.value = call.value;
  params.timeout_ns = static_cast<std::uint64_t>(call.timeout_ns);
  return launch("wait_until", call.stream, [&params](cudaStream_t stream) { return launch_word_call(params, stream); });
}

Result<bool> CudaOneSided::test(const one_sided::WaitCall& call) {
  if (memory_->is_on_host()) {
    const std::uint64_t word = std::atomic_ref(*word_at(call.offset)).load(std::memory_order_acquire);
    return device::compares(word, call.comparison, call.value);
  }
  const DeviceGuard guard(memory_->device());
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  const std::lock_guard lock(result_mutex_);
  std::uint64_t word = 0;
  Status status = runtime_status(
      cudaMemcpyAsync(&word, word_at(call.offset), sizeof(word), cudaMemcpyDeviceToHost, memory_->stream()),
      "test: reading the word");
  if (status.ok()) status = runtime_status(cudaStreamSynchronize(memory_->stream()), "test: reading the word");
  if (!status.ok()) return status;
  return device::compares(word, call.comparison, call.value);
}

Status CudaOneSided::fence(int rank, Stream stream) {
  const WordParams params = word_params(WordCall::kFence, rank == kEveryRank ? -1 : rank, 0);
  return launch("fence", stream, [&params](cudaStream_t handle) { return launch_word_call(params, handle); });
}

Status CudaOneSided::quiet(int rank, Stream stream) {
  const WordParams params = word_params(WordCall::kQuiet, rank == kEveryRank ? -1 : rank, 0);
  return launch("quiet", stream, [&params](cudaStream_t handle) { return launch_word_call(params, handle); });
}

Status CudaOneSided::barrier(const one_sided::TeamState& team, Stream stream) {
  Result<::ferry::device::TeamView> view = device_team(team);
  if (!view.ok()) return view.status();
  const BarrierParams params{memory_->world(), *view};
  return launch("barrier", stream, [&params](cudaStream_t handle) { return launch_barrier(params, handle); });
}

/// Waits until all that this rank has started is complete.
Status CudaOneSided::finish_streams(std::string_view operation) {
  {
    const DeviceGuard guard(memory_->device());
    if (!guard.status().ok()) return guard.status();
    const RelaxedCapture relaxed;
    Status status = runtime_status(streams_.wait(), fmt::format("{}: waiting for earlier calls", operation));
    if (!status.ok()) return status;
  }
  if (source_ != nullptr) {
    const std::lock_guard lock(result_mutex_);
    if (Status status = run_now(operation, word_params(WordCall::kQuiet, -1, 0)); !status.ok()) return status;
  }
  return poll_errors();
}

Result<std::vector<one_sided::Entry>> CudaOneSided::exchange(const one_sided::TeamState& team,
                                                             const one_sided::Entry& mine) {
  constexpr std::string_view kOperation = "allocate, free or split";
  if (Status status = finish_streams(kOperation); !status.ok()) return status;
  return memory_->fabric().exchange(team, mine, kOperation);
}

Status CudaOneSided::leave(const one_sided::TeamState& world) {
  const Status finished = finish_streams("destroy");
  part();
  const Status left = memory_->fabric().leave(world, "destroy");
  return finished.ok() ? left : finished;
}

Result<::ferry::device::World> CudaOneSided::device_world() { return memory_->world(); }

Result<::ferry::device::TeamView> CudaOneSided::device_team(const one_sided::TeamState& team) {
  const std::lock_guard lock(teams_mutex_);
  const std::lock_guard upload(result_mutex_);
  return memory_->view_of(team);
}

Status CudaOneSided::poll_errors() {
  if (source_ != nullptr) {
    if (Status status = source_->status(); !status.ok()) return status;
  }
  // The state of the ranks costs system calls.
  if (std::atomic_ref(memory_->errors().state).load(std::memory_order_acquire) == 0) return {};
  return take_error(memory_->errors(), memory_->fabric().presence());
}

Result<std::unique_ptr<one_sided::Backend>> create(const one_sided::Context& context) {
  Result<std::unique_ptr<OneSidedMemory>> memory = OneSidedMemory::create(context);
  if (!memory.ok()) return memory.status();
  auto backend = std::make_unique<CudaOneSided>(std::move(*memory));
  if (Status status = backend->start(); !status.ok()) return status;
  return std::unique_ptr<one_sided::Backend>(std::move(backend));
}

}  // namespace

one_sided::BackendFactory one_sided_backend_factory() { return {.name = "cuda", .probe = probe, .create = create}; }

}  // namespace ferry::cuda
