/// One rank of a group that makes calls of all kinds, round after round, until a call fails; hang_trials.py starts it,
/// injects a fault, and compares what the records say with it. Prints events, one a line, fields separated by tabs
/// (print_event below).
///
///   hang_rank RANK NUM_RANKS RANKS_PER_NODE DEADLINE_MS LISTEN_FD BACKEND FAULT ROUND STEP
///
/// RANK -1: all ranks are threads of this process, over nodes that the loopback engine connects. LISTEN_FD: inherited
/// listening socket for the bootstrap of rank 0. FAULT: none, or this rank's at step STEP of round ROUND: "late" (it
/// waits for standard input before the call), "other" (it makes another call), "busy" (its stream is held by other work
/// before the call, for twice the deadline). Standard input: "hold FROM TO" (nodes, with RANK -1: nothing more arrives
/// from FROM at TO) and "go" (a late rank goes on). Its end ends the program.

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <latch>
#include <mutex>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"
#include "support/device_memory.hpp"
#include "support/loopback_faults.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kBootstrapTimeoutNs = 60 * kNsPerSecond;
constexpr std::int64_t kNumTokens = 16;
constexpr std::int64_t kNumTopk = 2;
constexpr std::int64_t kHidden = 512;
constexpr std::size_t kRowBytes = kHidden * 2;
constexpr std::size_t kPoolBytes = std::size_t{64} << 20;

struct Plan {
  int rank = 0;
  int num_ranks = 1;
  int ranks_per_node = 1;
  std::int64_t deadline_ns = 0;
  std::string backend;
  std::string fault;
  int round = 0;
  int step = 0;

  bool on_gpu() const { return backend == "cuda"; }
};

/// Prints name, rank, error code, blamed rank and message.
void print_event(const char* name, int rank, const Status& status = {}) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  fmt::print("{}\t{}\t{}\t{}\t{}\n", name, rank, to_string(status.code()), status.peer(), status.message());
  std::fflush(stdout);
}

/// Memory that calls may use, on the rank's device.
class Memory {
 public:
  Memory(bool on_gpu, std::size_t num_bytes) {
    if (on_gpu) {
      device_ = DeviceMemory(num_bytes);
    } else {
      host_.resize(num_bytes);
    }
  }
  void* data() { return host_.empty() ? device_.data() : host_.data(); }
  void write(const void* from, std::size_t num_bytes) {
    if (host_.empty()) {
      copy_to_device(device_.data(), from, num_bytes);
    } else {
      std::memcpy(host_.data(), from, num_bytes);
    }
  }

 private:
  std::vector<std::byte> host_;
  DeviceMemory device_;
};

/// The calls of a round, in order.
class Calls {
 public:
  static constexpr int kNumSteps = 5;

  Calls(Group& group, const Plan& plan)
      : group_(group),
        num_experts_(2 * plan.num_ranks),
        num_rows_(2 * plan.num_ranks * kNumTokens),
        stream_(plan.on_gpu() ? thread_stream() : Stream{}),
        ids_(plan.on_gpu(), sizeof(std::int64_t) * kNumTokens * kNumTopk),
        weights_(plan.on_gpu(), sizeof(float) * kNumTokens * kNumTopk),
        x_(plan.on_gpu(), kNumTokens * kRowBytes),
        received_(plan.on_gpu(), static_cast<std::size_t>(num_rows_) * kRowBytes),
        out_(plan.on_gpu(), kNumTokens * kRowBytes) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < kNumTokens * kNumTopk; ++i) ids.push_back((i * 5 + group.rank()) % num_experts_);
    ids_.write(ids.data(), sizeof(std::int64_t) * ids.size());
    const std::vector<float> weights(ids.size(), 1.0F);
    weights_.write(weights.data(), sizeof(float) * weights.size());
    const std::vector<std::byte> zeros(kNumTokens * kRowBytes);
    x_.write(zeros.data(), zeros.size());
  }

  Stream stream() const { return stream_; }
  Status wait() { return group_.wait(stream_); }

  Status make(int step) {
    switch (step) {
      case 0:
        return keep(group_.route({.topk_idx = ids(), .topk_weights = {}}, {.num_experts = num_experts_}, stream_),
                    routing_);
      case 1: {
        DispatchInput in;
        in.x = tensor(x_, kNumTokens);
        DispatchOutput out;
        out.x = tensor(received_, routing_.num_recv_rows());
        return group_.dispatch(routing_, in, out, stream_);
      }
      case 2: {
        CombineInput in;
        in.x = tensor(received_, routing_.num_recv_rows());
        CombineOutput out;
        out.x = tensor(out_, kNumTokens);
        return group_.combine(routing_, in, out, stream_);
      }
      case 3: {
        LatencyDispatchInput in;
        in.x = tensor(x_, kNumTokens);
        in.topk_idx = ids();
        in.topk_weights = ConstTensorView(weights_.data(), DType::kFloat32, {kNumTokens, kNumTopk});
        LatencyDispatchOutput out;
        out.x = slab();
        LatencyDispatchOptions options;
        options.num_experts = num_experts_;
        options.max_tokens = kNumTokens;
        options.slab_capacity = num_rows_ / 2;
        return keep(group_.latency_dispatch(in, out, options, stream_), latency_routing_);
      }
      default: {
        LatencyCombineInput in;
        in.x = slab();
        LatencyCombineOutput out;
        out.x = tensor(out_, kNumTokens);
        return group_.latency_combine(latency_routing_, in, out, stream_, {.order = CombineOrder::kRankSums});
      }
    }
  }
  /// A call of another kind than `make(step)`, after a first round.
  Status make_other(int step) { return make(step == 2 ? 1 : 2); }

 private:
  static Status keep(Result<Routing> made, Routing& routing) {
    if (made.ok()) routing = *made;
    return made.status();
  }
  ConstTensorView ids() { return {ids_.data(), DType::kInt64, {kNumTokens, kNumTopk}}; }
  static TensorView tensor(Memory& memory, std::int64_t num_rows) {
    return {memory.data(), DType::kBfloat16, {num_rows, kHidden}};
  }
  TensorView slab() { return {received_.data(), DType::kBfloat16, {2, num_rows_ / 2, kHidden}}; }

  Group& group_;
  std::int64_t num_experts_;
  std::int64_t num_rows_;
  Stream stream_;
  Memory ids_;
  Memory weights_;
  Memory x_;
  Memory received_;
  Memory out_;
  Routing routing_;
  Routing latency_routing_;
};

/// Makes one call, with the fault of this rank if it is due.
Status make_step(Calls& calls, const Plan& plan, int round, int step) {
  if (plan.fault == "none" || round != plan.round || step != plan.step) return calls.make(step);
  print_event("fault", plan.rank);
  if (plan.fault == "other") return calls.make_other(step);
  if (plan.fault == "busy") {
    enqueue_delay(calls.stream(), std::chrono::microseconds(2 * plan.deadline_ns / 1000));
    return calls.make(step);
  }
  std::string line;
  std::getline(std::cin, line);
  return calls.make(step);
}

/// Makes calls until one fails.
void exchange(Group& group, const Plan& plan) {
  Calls calls(group, plan);
  Status status;
  for (int round = 0; status.ok(); ++round) {
    for (int step = 0; status.ok() && step < Calls::kNumSteps; ++step) {
      // Over several nodes a CUDA group of this size has no memory for latency mode.
      if (plan.on_gpu() && step > 2 && plan.ranks_per_node < plan.num_ranks) continue;
      status = make_step(calls, plan, round, step);
    }
    if (status.ok()) status = calls.wait();
    if (status.ok() && round == 0) print_event("ready", plan.rank);
  }
  print_event("failed", plan.rank, status);
}

GroupOptions options_of(const Plan& plan) {
  GroupOptions options{.backend = plan.backend, .ranks_per_node = plan.ranks_per_node, .timeout_ns = plan.deadline_ns};
  if (!plan.on_gpu()) return options;
  options.device = current_device();
  if (plan.ranks_per_node < plan.num_ranks) return options;
  const LatencyShape shape{.backend = plan.backend,
                           .num_ranks = plan.num_ranks,
                           .max_tokens = kNumTokens,
                           .num_topk = kNumTopk,
                           .dispatch_row_bytes = kRowBytes,
                           .combine_row_bytes = kRowBytes};
  options.latency_bytes = latency_bytes_required(shape).value();
  return options;
}

std::uint16_t port_of(int listen_fd) {
  sockaddr_in address{};
  socklen_t num_bytes = sizeof address;
  getsockname(listen_fd, reinterpret_cast<sockaddr*>(&address), &num_bytes);
  return ntohs(address.sin_port);
}

int run_process(const Plan& plan, int listen_fd) {
  if (plan.on_gpu()) enter_device(plan.rank % num_devices(), kPoolBytes);
  const char* secret = std::getenv("FERRY_SECRET");
  TcpBootstrapOptions options{.rank = plan.rank,
                              .num_ranks = plan.num_ranks,
                              .port = port_of(listen_fd),
                              .secret = secret != nullptr ? secret : "",
                              .timeout_ns = kBootstrapTimeoutNs};
  if (plan.rank == 0) {
    options.listen_fd = listen_fd;
  } else {
    close(listen_fd);
  }
  Result<std::shared_ptr<Bootstrap>> bootstrap = create_tcp_bootstrap(options);
  Result<std::shared_ptr<Group>> group =
      bootstrap.ok() ? Group::create(*bootstrap, options_of(plan)) : Result<std::shared_ptr<Group>>(bootstrap.status());
  if (!group.ok()) {
    print_event("no_group", plan.rank, group.status());
    return 1;
  }
  exchange(**group, plan);
  // The group stays until all have been asked about it.
  for (std::string line; std::getline(std::cin, line);) {
  }
  return 0;
}

int run_threads(const Plan& plan) {
  net::LoopbackFaults faults;
  const std::vector<std::shared_ptr<Bootstrap>> bootstraps = create_in_process_bootstraps(plan.num_ranks).value();
  std::latch over(1);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      Plan mine = plan;
      mine.rank = rank;
      GroupOptions options = options_of(mine);
      options.transport = "loopback";
      Result<std::shared_ptr<Group>> group = Group::create(bootstraps[static_cast<std::size_t>(rank)], options);
      if (group.ok()) {
        exchange(**group, mine);
      } else {
        print_event("no_group", rank, group.status());
      }
      over.wait();
    });
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string order;
    int from = 0;
    int to = 0;
    if (words >> order >> from >> to && order == "hold") faults.hold(from, to);
  }
  over.count_down();
  for (std::thread& rank : ranks) rank.join();
  return 0;
}

int run(std::span<char*> arguments) {
  constexpr std::size_t kNumArguments = 10;
  if (arguments.size() != kNumArguments) return 2;
  const auto number = [&arguments](std::size_t idx) { return std::atoi(arguments[idx]); };
  const Plan plan{number(1),    number(2),    number(3), number(4) * (kNsPerSecond / 1000),
                  arguments[6], arguments[7], number(8), number(9)};
  return plan.rank < 0 ? run_threads(plan) : run_process(plan, number(5));
}

}  // namespace
}  // namespace ferry::test

int main(int num_arguments, char** arguments) {
  return ferry::test::run({arguments, static_cast<std::size_t>(num_arguments)});
}
