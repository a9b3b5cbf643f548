#ifndef FERRY_CPU_BACKEND_HPP
#define FERRY_CPU_BACKEND_HPP

/// CPU backend: ranks are processes or threads. Ranks of one node copy rows directly into each other's memory
/// (intranode/). Over several nodes a token crosses the network once per destination node, on the rail of its source,
/// whose peer there (the forwarder) writes it into its final rows; combine takes the same path back (internode/):
///
///   dispatch   x ──ring──> forwarder ──copy──> out.x of each rank of its node that owns an expert
///   combine    rows of the node's ranks ──sum──> forwarder ──ring──> source, which sums over nodes

#include <memory>
#include <optional>

#include "core/backend.hpp"
#include "cpu/context/context.hpp"
#include "cpu/latency/pending_calls.hpp"
#include "cpu/latency/survivors.hpp"

namespace ferry::cpu {

class CpuBackend final : public Backend {
 public:
  static Result<std::unique_ptr<Backend>> create(const BackendContext& context);

  /// `board`: for groups that mask ranks, else null.
  CpuBackend(const BackendContext& context, std::unique_ptr<call::CallSync> sync, std::unique_ptr<MaskBoard> board);

  std::string_view name() const override { return "cpu"; }
  void created() override { sync_->created(); }
  bool takes_streams() const override { return false; }
  bool memory_is_on_host() const override { return true; }
  Result<Buffer> allocate(std::size_t bytes) override { return sync_->peers().arena().allocate(bytes); }
  MemoryUsage memory_usage() const override;
  Status trim() override;
  NetworkUsage network_usage() override { return sync_->network_usage(); }
  FlightRecorder* recorder() override { return &sync_->peers().recorder(); }
  std::vector<std::int64_t> wait_times_ns() const override { return sync_->wait_times_ns(); }
  Result<std::shared_ptr<RoutingState>> route(const RouteCall& call) override;
  Status dispatch(const DispatchCall& call) override;
  Status combine(const CombineCall& call) override;
  Result<std::shared_ptr<RoutingState>> latency_dispatch(const LatencyDispatchCall& call) override;
  Status latency_combine(const LatencyCombineCall& call) override;
  Status latency_receive(const LatencyReceiveCall& call, bool& made) override;
  Status update_mask(int rank, bool masked, Stream stream) override;
  Status query_mask(std::int32_t* out, Stream stream) override;
  Result<std::vector<int>> suspend() override;
  void leave() override { sync_->leave(); }
  Status channel_tables(const ChannelTablesCall& call) override;
  Status wait(Stream /*stream*/) override { return sync_->broken(); }
  Status destroy() override;

 private:
  Context call_context() { return {*sync_, staging_, spare_tables_, verify_}; }
  DispatchCall quantize_rows(const DispatchCall& call);
  Status send(const DispatchCall& call);
  // Implementation of the calls; the public functions first complete pending calls of latency mode.
  Status fill_routing(const RouteCall& call, const std::shared_ptr<CpuRouting>& routing);
  Status make_dispatch(const DispatchCall& call);
  Status make_combine(const CombineCall& call);
  Status make_latency_combine(const LatencyCombineCall& call);
  Status make_latency_dispatch(const LatencyDispatchCall& call, const std::shared_ptr<CpuRouting>& routing);
  Status make_pending(PendingCalls::Call& call);
  void make_pending_calls();

  std::unique_ptr<call::CallSync> sync_;
  bool verify_;
  Staging staging_;
  std::shared_ptr<SpareTables> spare_tables_ = std::make_shared<SpareTables>();
  PendingCalls pending_;
  std::unique_ptr<MaskBoard> mask_board_;
  std::optional<Survivors> survivors_;  // only in groups that mask ranks
};

/// Entry of the registry.
BackendFactory cpu_backend_factory();

}  // namespace ferry::cpu

#endif  // FERRY_CPU_BACKEND_HPP
