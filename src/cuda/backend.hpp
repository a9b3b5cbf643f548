#ifndef FERRY_CUDA_BACKEND_HPP
#define FERRY_CUDA_BACKEND_HPP

/// The CUDA backend: ranks with a GPU each (which they may share), whose kernels copy rows straight into each other's
/// memory, and over several nodes into rings that the network empties. The host launches; kernels find their peers,
/// agree, move and wait by themselves.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "core/backend.hpp"
#include "cuda/context/context.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/internode/latency.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/latency/calls.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda {

class CudaBackend final : public Backend {
 public:
  static Result<std::unique_ptr<Backend>> create(const BackendContext& context);

  /// `nodes_scratch`: in groups of several nodes.
  CudaBackend(const BackendContext& context, Parts parts, std::unique_ptr<internode::CallScratch> nodes_scratch);

  std::string_view name() const override { return "cuda"; }
  bool takes_streams() const override { return true; }
  bool memory_is_on_host() const override { return false; }
  Result<Buffer> allocate(std::size_t bytes) override;
  MemoryUsage memory_usage() const override;
  Status trim() override { return context_.trim(); }
  Result<std::shared_ptr<RoutingState>> route(const RouteCall& call) override {
    return over_nodes() ? internode::route(context_, history_.placements, *nodes_scratch_, call)
                        : intranode::route(context_, history_, call);
  }
  Status dispatch(const DispatchCall& call) override {
    return over_nodes() ? internode::dispatch(context_, call) : intranode::dispatch(context_, call);
  }
  Status combine(const CombineCall& call) override {
    return over_nodes() ? internode::combine(context_, call) : intranode::combine(context_, call);
  }
  NetworkUsage network_usage() override { return context_.parts().sync->network_usage(); }
  std::vector<std::int64_t> wait_times_ns() const override;
  Result<std::shared_ptr<RoutingState>> latency_dispatch(const LatencyDispatchCall& call) override {
    return over_nodes() ? nodes_latency_.dispatch(call) : latency_.dispatch(call);
  }
  Status latency_combine(const LatencyCombineCall& call) override {
    return over_nodes() ? nodes_latency_.combine(call) : latency_.combine(call);
  }
  Status latency_receive(const LatencyReceiveCall& call, bool& made) override {
    return over_nodes() ? nodes_latency_.receive(call, made) : latency_.receive(call, made);
  }
  Status update_mask(int rank, bool masked, Stream stream) override {
    return latency_.update_mask(rank, masked, stream);
  }
  Status query_mask(std::int32_t* out, Stream stream) override { return latency_.query_mask(out, stream); }
  Status channel_tables(const ChannelTablesCall& call) override {
    return over_nodes() ? internode::channel_tables(context_, call) : intranode::channel_tables(context_, call);
  }
  Status wait(Stream stream) override { return context_.wait(stream); }
  Status poll() override { return context_.poll(); }
  Status destroy() override { return context_.destroy(); }

 private:
  bool over_nodes() const { return nodes_scratch_ != nullptr; }

  std::unique_ptr<internode::CallScratch> nodes_scratch_;  // before the context, which waits for its last call
  Context context_;
  RouteHistory history_;
  LatencyMode latency_;                    // after the two that it uses, like the next
  internode::NodesLatency nodes_latency_;  // in groups of several nodes
  mutable std::mutex shown_mutex_;
  mutable std::vector<std::int64_t> shown_ns_;  // guarded by shown_mutex_; what wait_times_ns has said
};

/// Entry of the registry.
BackendFactory backend_factory();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_BACKEND_HPP
