#include "one_sided/cpu_backend.hpp"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "ferry/device/comparison.hpp"
#include "one_sided/fabric.hpp"
#include "one_sided/words.hpp"

namespace ferry::one_sided {
namespace {

/// A blocking put of at most this many bytes to another node copies them and returns; a longer one waits for their
/// arrival. Waiting takes longer than copying only for short puts.
constexpr std::size_t kMaxCopiedBytes = std::size_t{64} << 10;

net::AtomicOp to_atomic(const SignalCall& call) {
  return {.kind = call.op == SignalOp::kAdd ? net::AtomicOp::Kind::kAdd : net::AtomicOp::Kind::kSet,
          .word_bytes = call.word_bytes,
          .offset = call.offset,
          .operand = call.value};
}

net::AtomicOp::Kind to_kind(FetchOp op) {
  using Kind = net::AtomicOp::Kind;
  switch (op) {
    case FetchOp::kAdd:
      return Kind::kAdd;
    case FetchOp::kCompareSwap:
      return Kind::kCompareSwap;
    case FetchOp::kSwap:
      return Kind::kSet;
    case FetchOp::kAnd:
      return Kind::kAnd;
    case FetchOp::kOr:
      return Kind::kOr;
    case FetchOp::kXor:
      break;
  }
  return Kind::kXor;
}

net::AtomicOp to_atomic(const FetchCall& call) {
  return {.kind = to_kind(call.op),
          .word_bytes = call.word_bytes,
          .offset = call.offset,
          .operand = call.value,
          .compare = call.expected};
}

/// Word of 8 bytes, as waits watch it, that holds the one at `offset`.
std::size_t waited_word(std::size_t offset) { return offset / sizeof(std::uint64_t) * sizeof(std::uint64_t); }

/// End of one operation that its caller waits for. Receives no callback after its destruction.
class Answer final : public Completion {
 public:
  Answer(Driver& driver, std::uint64_t num_parts) : driver_(driver), num_missing_(num_parts) {}
  ~Answer() override {
    if (!complete()) driver_.forget(this);
  }
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  void done(std::uint64_t value) override {
    value_ = value;
    num_missing_.fetch_sub(1, std::memory_order_release);
  }
  void lost(int /*peer*/) override {
    lost_.store(true, std::memory_order_relaxed);
    num_missing_.fetch_sub(1, std::memory_order_release);
  }
  bool complete() const { return num_missing_.load(std::memory_order_acquire) == 0; }
  bool was_lost() const { return lost_.load(std::memory_order_relaxed); }
  std::uint64_t value() const { return value_; }

 private:
  Driver& driver_;
  std::uint64_t value_ = 0;
  std::atomic<std::uint64_t> num_missing_;
  std::atomic<bool> lost_{false};
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(std::unique_ptr<Fabric> fabric) : fabric_(std::move(fabric)) {}

  std::string_view name() const override { return "cpu"; }
  bool takes_streams() const override { return false; }
  std::byte* heap() const override { return fabric_->heap(); }
  std::size_t heap_bytes() const override { return fabric_->heap_bytes(); }
  std::byte* peer_heap(int rank) const override { return fabric_->peer_heap(rank); }
  Status zero(std::size_t offset, std::size_t num_bytes) override {
    std::memset(heap() + offset, 0, num_bytes);
    return {};
  }

  Status put(const PutCall& call) override;
  Status get(const GetCall& call) override;
  Status put_signal(const PutCall& put, const SignalCall& signal) override;
  Status signal(const SignalCall& call) override;
  Status fetch(const FetchCall& call, void* fetched) override;
  Result<std::uint64_t> fetch_now(const FetchCall& call) override;
  Status wait_until(const WaitCall& call) override;
  Result<bool> test(const WaitCall& call) override;
  Status fence(int rank, Stream stream) override;
  Status quiet(int rank, Stream /*stream*/) override { return fabric_->quiet("quiet", nullptr, rank); }
  Status barrier(const TeamState& team, Stream stream) override;
  Result<std::vector<Entry>> exchange(const TeamState& team, const Entry& mine) override;
  Status leave(const TeamState& world) override;

 private:
  Status send_put(NetworkRequest request, const PutCall& call, std::string_view operation);
  Status await(const Answer& answer, int rank, std::string_view operation);

  std::unique_ptr<Fabric> fabric_;
};

Status CpuBackend::await(const Answer& answer, int rank, std::string_view operation) {
  const std::array<int, 1> peer{rank};
  const Status status = fabric_->wait({.operation = operation,
                                       .what =
                                           [rank] {
                                             return Fabric::Awaited{fmt::format("the answer of rank {}", rank), rank};
                                           },
                                       .ranks = peer,
                                       .timeout_ns = fabric_->timeout_ns()},
                                      [&] { return answer.complete(); });
  if (!status.ok() || !answer.was_lost()) return status;
  const Status why = fabric_->report_loss(rank);
  return Status(why.ok() ? ErrorCode::kPeerLost : why.code(), fmt::format("{}: {}", operation, why.message()), rank);
}

/// Sends a put to a rank of another node.
Status CpuBackend::send_put(NetworkRequest request, const PutCall& call, std::string_view operation) {
  request.peer = call.rank;
  request.offset = fabric_->engine_offset(call.offset);
  request.local = const_cast<std::byte*>(call.source);  // only read
  request.num_bytes = call.num_bytes;
  request.copy_source = call.blocking && call.num_bytes <= kMaxCopiedBytes;
  if (Status status = fabric_->issue(request, operation); !status.ok()) return status;
  if (!call.blocking || request.copy_source) return {};
  Answer answer(*fabric_->driver(), 1);
  const NetworkRequest flush{.kind = NetworkRequest::Kind::kFlush, .peer = call.rank, .completion = &answer};
  if (Status status = fabric_->issue(flush, operation); !status.ok()) return status;
  return await(answer, call.rank, operation);
}

Status CpuBackend::put(const PutCall& call) {
  if (std::byte* theirs = fabric_->peer_heap(call.rank); theirs != nullptr) {
    store_bytes(theirs + call.offset, call.source, call.num_bytes);
    return {};
  }
  if (call.num_bytes == 0) return {};
  return send_put({.kind = NetworkRequest::Kind::kPut}, call, call.blocking ? "put" : "put_nbi");
}

Status CpuBackend::get(const GetCall& call) {
  if (const std::byte* theirs = fabric_->peer_heap(call.rank); theirs != nullptr) {
    load_bytes(call.dest, theirs + call.offset, call.num_bytes);
    return {};
  }
  if (call.num_bytes == 0) return {};
  const std::string_view operation = call.blocking ? "get" : "get_nbi";
  NetworkRequest request{.kind = NetworkRequest::Kind::kGet,
                         .peer = call.rank,
                         .offset = fabric_->engine_offset(call.offset),
                         .local = call.dest,
                         .num_bytes = call.num_bytes};
  if (!call.blocking) return fabric_->issue(request, operation);
  Answer answer(*fabric_->driver(), Driver::num_parts(request));
  request.completion = &answer;
  if (Status status = fabric_->issue(request, operation); !status.ok()) return status;
  return await(answer, call.rank, operation);
}

Status CpuBackend::put_signal(const PutCall& put, const SignalCall& signal) {
  if (fabric_->in_node(put.rank)) {
    if (Status status = this->put(put); !status.ok()) return status;
    return this->signal(signal);
  }
  NetworkRequest request{.kind = NetworkRequest::Kind::kPutSignal, .op = to_atomic(signal)};
  request.op.offset = fabric_->engine_offset(signal.offset);
  return send_put(request, put, put.blocking ? "put_signal" : "put_signal_nbi");
}

Status CpuBackend::signal(const SignalCall& call) {
  if (std::byte* theirs = fabric_->peer_heap(call.rank); theirs != nullptr) {
    net::apply_atomic(theirs, to_atomic(call));
    fabric_->ring(call.rank, fabric_->engine_offset(waited_word(call.offset)));
    return {};
  }
  NetworkRequest request{.kind = NetworkRequest::Kind::kAtomic, .peer = call.rank, .op = to_atomic(call)};
  request.op.offset = fabric_->engine_offset(call.offset);
  return fabric_->issue(request, "signal");
}

Status CpuBackend::fetch(const FetchCall& call, void* fetched) {
  const Result<std::uint64_t> before = fetch_now(call);
  if (!before.ok()) return before.status();
  std::memcpy(fetched, &*before, call.word_bytes);  // the low bytes come first
  return {};
}

Result<std::uint64_t> CpuBackend::fetch_now(const FetchCall& call) {
  if (std::byte* theirs = fabric_->peer_heap(call.rank); theirs != nullptr) {
    const std::uint64_t before = net::apply_atomic(theirs, to_atomic(call));
    fabric_->ring(call.rank, fabric_->engine_offset(waited_word(call.offset)));
    return before;
  }
  const std::string_view operation = name_of(call.op);
  Answer answer(*fabric_->driver(), 1);
  NetworkRequest request{
      .kind = NetworkRequest::Kind::kAtomic, .peer = call.rank, .op = to_atomic(call), .completion = &answer};
  request.op.offset = fabric_->engine_offset(call.offset);
  if (Status status = fabric_->issue(request, operation); !status.ok()) return status;
  if (Status status = await(answer, call.rank, operation); !status.ok()) return status;
  return answer.value();
}

Status CpuBackend::wait_until(const WaitCall& call) {
  const auto* word = reinterpret_cast<const std::uint64_t*>(heap() + call.offset);
  const auto done = [&] { return device::compares(load(word), call.comparison, call.value); };
  if (done()) return {};
  return fabric_->wait(
      {.operation = "wait_until",
       .what =
           [word, &call] {
             return Fabric::Awaited{fmt::format("the word at offset {} of its heap, which is {}, to compare with {}",
                                                call.offset, load(word), call.value)};
           },
       .ranks = fabric_->all_ranks(),
       .timeout_ns = call.timeout_ns,
       .word = fabric_->engine_offset(call.offset)},
      done);
}

Result<bool> CpuBackend::test(const WaitCall& call) {
  if (fabric_->driver() != nullptr) fabric_->driver()->progress();
  return device::compares(load(reinterpret_cast<const std::uint64_t*>(heap() + call.offset)), call.comparison,
                          call.value);
}

Status CpuBackend::fence(int rank, Stream /*stream*/) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const int peer : fabric_->all_ranks()) {
    if ((rank != kEveryRank && rank != peer) || fabric_->in_node(peer)) continue;
    const Status status = fabric_->issue({.kind = NetworkRequest::Kind::kFence, .peer = peer}, "fence");
    // With kEveryRank, lost ranks need no order.
    if (!status.ok() && rank != kEveryRank) return status;
  }
  return {};
}

Status CpuBackend::barrier(const TeamState& team, Stream /*stream*/) {
  if (Status status = fabric_->quiet("barrier", &team); !status.ok()) return status;
  return fabric_->barrier(team, "barrier");
}

Result<std::vector<Entry>> CpuBackend::exchange(const TeamState& team, const Entry& mine) {
  constexpr std::string_view kOperation = "allocate, free or split";
  if (Status status = fabric_->quiet(kOperation, &team); !status.ok()) return status;
  return fabric_->exchange(team, mine, kOperation);
}

Status CpuBackend::leave(const TeamState& world) {
  const Status quiet = fabric_->quiet("destroy");
  const Status left = fabric_->leave(world, "destroy");
  return quiet.ok() ? left : quiet;
}

Result<std::unique_ptr<Backend>> create(const Context& context) {
  Result<std::unique_ptr<Fabric>> fabric = Fabric::create(context.base, context.heap_bytes);
  if (!fabric.ok()) return fabric.status();
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(std::move(*fabric)));
}

Status probe() { return {}; }

}  // namespace

BackendFactory cpu_backend_factory() { return {.name = "cpu", .probe = probe, .create = create}; }

}  // namespace ferry::one_sided
