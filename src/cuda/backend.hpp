#ifndef FERRY_CUDA_BACKEND_HPP
#define FERRY_CUDA_BACKEND_HPP

/// The CUDA backend: each rank has a GPU, which ranks may share. Kernels copy rows straight into other ranks' memory,
/// and between nodes into rings that the network empties. The host only launches; kernels find their peers, agree, move
/// rows and wait without it.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/backend.hpp"
#include "cuda/context/context.hpp"
#include "cuda/internode/calls.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/latency/calls.hpp"
#include "cuda/placement/placements.hpp"

namespace ferry::cuda {

class CudaBackend final : public Backend {
 public:
  static Result<std::unique_ptr<Backend>> create(const BackendContext& context);

  /// `nodes_scratch`: not null in groups of several nodes. `far`: kept by the parts.
  CudaBackend(const BackendContext& context, Parts parts, std::unique_ptr<internode::CallScratch> nodes_scratch,
              FarLink* far);

  std::string_view name() const override { return "cuda"; }
  void created() override { context_.parts().sync->created(); }
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
  NetworkUsage network_usage() override {
    NetworkUsage usage = context_.parts().sync->network_usage();
    if (far_ != nullptr) far_->add_traffic(usage);
    return usage;
  }
  FlightRecorder* recorder() override { return &context_.parts().sync->peers().recorder(); }
  std::vector<std::int64_t> wait_times_ns() const override;
  Result<std::shared_ptr<RoutingState>> latency_dispatch(const LatencyDispatchCall& call) override {
    return latency_.dispatch(call);
  }
  Status latency_combine(const LatencyCombineCall& call) override { return latency_.combine(call); }
  Status latency_receive(const LatencyReceiveCall& call, bool& made) override { return latency_.receive(call, made); }
  Status update_mask(int rank, bool masked, Stream stream) override {
    return latency_.update_mask(rank, masked, stream);
  }
  Status query_mask(std::int32_t* out, Stream stream) override { return latency_.query_mask(out, stream); }
  Result<std::vector<int>> suspend() override;
  void leave() override { context_.parts().sync->leave(); }
  std::optional<Status> renew(const BackendContext& context) override;
  Status channel_tables(const ChannelTablesCall& call) override {
    return over_nodes() ? internode::channel_tables(context_, call) : intranode::channel_tables(context_, call);
  }
  Status wait(Stream stream) override { return context_.wait(stream); }
  Status poll() override { return context_.poll(); }
  Status destroy() override { return context_.destroy(); }

 private:
  bool over_nodes() const { return nodes_scratch_ != nullptr; }

  std::unique_ptr<internode::CallScratch> nodes_scratch_;  // declared before the context, which waits for its last call
  Context context_;
  RouteHistory history_;
  LatencyMode latency_;       // declared after the two members that it uses
  const FarLink* const far_;  // null: the group has one node, or no memory for latency mode
  mutable std::mutex shown_mutex_;
  mutable std::vector<std::int64_t> shown_ns_;  // guarded by shown_mutex_; values that wait_times_ns has returned
};

/// Factory of this backend, for the registry.
BackendFactory backend_factory();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_BACKEND_HPP
