#ifndef FERRY_BENCHMARKS_GEMM_BESIDE_CALLS_HPP
#define FERRY_BENCHMARKS_GEMM_BESIDE_CALLS_HPP

/// The calls of gemm_beside.cpp: exchanges of one rank, with their memory.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "gemm_beside_gpu.hpp"

namespace ferry::bench {

struct GemmBesidePlan {
  int num_ranks = 2;
  int num_nodes = 1;
  std::string transport = "auto";
  std::string ring_memory = "auto";
  std::int64_t num_tokens = 4096;
  std::int64_t num_latency_tokens = 128;
  std::int64_t hidden = 7168;
  int num_topk = 8;
  std::int64_t num_experts = 256;
  std::vector<int> num_sms{8, 16, 24};
  int m = 4096;
  int n = 4096;
  int k = 7168;
  int num_iterations = 20;
  int num_warmup = 3;
  bool same_priority = false;

  std::size_t row_bytes() const { return static_cast<std::size_t>(hidden) * size_bytes(DType::kBfloat16); }
};

/// Calls whose work goes into one stream.
struct Exchange {
  std::string name;
  int num_sms = 0;
  std::vector<std::function<void()>> parts;  ///< one, or the halves of calls, between which others may compute
};

class Calls {
 public:
  /// Takes memory on the current GPU. Later that may wait for kernels of other ranks on the same GPU.
  Calls(const GemmBesidePlan& plan, int rank, cudaStream_t stream);

  /// Collective.
  void create_group(const std::shared_ptr<Bootstrap>& bootstrap);
  std::vector<Exchange> exchanges(int num_sms);
  /// Waits for the stream. @throws what a call has found
  void wait();
  void destroy_group();

 private:
  void start_dispatch(int num_sms);
  void start_combine(int num_sms);
  void start_latency_dispatch(int num_sms, bool split);
  void start_latency_combine(int num_sms, bool split);
  void receive();

  const GemmBesidePlan& plan_;
  const Stream stream_;
  DeviceBytes ids_;
  DeviceBytes latency_ids_;
  DeviceBytes weights_;
  DeviceBytes x_;
  DeviceBytes sums_;
  std::shared_ptr<Group> group_;
  Routing routing_;
  Routing latency_routing_;
  Buffer rows_;
  Buffer slab_;
  std::int64_t slab_capacity_ = 0;
  std::int64_t num_local_ = 0;
};

}  // namespace ferry::bench

#endif  // FERRY_BENCHMARKS_GEMM_BESIDE_CALLS_HPP
