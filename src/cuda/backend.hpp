#ifndef FERRY_CUDA_BACKEND_HPP
#define FERRY_CUDA_BACKEND_HPP

/// The CUDA backend: ranks of one host, each with a GPU (which they may share), whose kernels copy rows straight into
/// each other's memory. The host launches; kernels find their peers, agree, move and wait by themselves.

#include <cuda_runtime_api.h>

#include <memory>

#include "call/call_sync.hpp"
#include "core/backend.hpp"
#include "cuda/driver/own_stream.hpp"
#include "cuda/intranode/placements.hpp"
#include "cuda/memory/arena_exchange.hpp"
#include "cuda/memory/deferred_free.hpp"
#include "cuda/memory/device_arena.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "cuda/memory/staging.hpp"
#include "cuda/memory/table_memory.hpp"
#include "cuda/sync/call_log.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

struct HostResult;  // cuda_routing.hpp

/// What a group has on this rank; made step by step by CudaBackend::create.
struct CudaParts {
  int device = 0;
  int num_sms = 0;               ///< of the GPU, over the ranks that share it
  bool has_bulk = true;          ///< the GPU has the bulk copy engine
  std::size_t shared_limit = 0;  ///< most shared memory of a block
  std::unique_ptr<call::CallSync> crew;
  std::shared_ptr<DeviceArena> arena;
  std::unique_ptr<ArenaExchange> exchange;  // after the crew, whose links it uses
  std::shared_ptr<TableMemory> memory;
  std::shared_ptr<PinnedMemory> pinned;
  DeviceReport* report = nullptr;                ///< in `pinned`
  std::shared_ptr<std::byte> control_and_bases;  ///< Control, then [R] peer bases
  CrewParams crew_params;
  std::shared_ptr<OwnStream> stream;           ///< for what waits for nobody: setting up, zeroing
  std::shared_ptr<OwnStream> refusals_stream;  ///< where refused calls wait for the peers
};

class CudaBackend final : public Backend {
 public:
  static Result<std::unique_ptr<Backend>> create(const BackendContext& context);

  CudaBackend(const BackendContext& context, CudaParts parts, Tickets tickets);
  ~CudaBackend() override;

  std::string_view name() const override { return "cuda"; }
  bool takes_streams() const override { return true; }
  bool memory_is_on_host() const override { return false; }
  Result<Buffer> allocate(std::size_t bytes) override;
  MemoryUsage memory_usage() const override;
  Result<std::shared_ptr<RoutingState>> route(const RouteCall& call) override;
  Status dispatch(const DispatchCall& call) override;
  Status combine(const CombineCall& call) override;
  Status wait(Stream stream) override;
  Status poll() override;
  Status destroy() override;

 private:
  /// A call that is being launched: its stream, and how others will know it.
  struct Launch {
    cudaStream_t stream = nullptr;
    bool captured = false;
    std::uint64_t agreement = 0;
    std::int64_t ticket = 0;
  };

  /// Is the group whole, and the stream one of this GPU's? Says whether it is being captured.
  Result<bool> check_stream(Operation operation, Stream stream);
  /// Shows the record to the peers, orders the stream after earlier calls.
  Result<Launch> begin(const CallRecord& record, cudaStream_t stream, bool captured);
  /// After the call's last launch, whether or not it succeeded: what was launched is waited for before memory is
  /// reused.
  Status end(const Launch& launch, cudaError_t launched, std::string_view operation);
  /// This rank cannot make the call for `status`: the peers' kernels hear of it. Returns `status`.
  template <typename Call, typename Refuse>
  Status refuse(const Call& call, const Status& status, Refuse launch_refusal);
  Status refuse_route(const RouteCall& call, const Status& status);
  Status refuse_dispatch(const DispatchCall& call, const Status& status);
  Status refuse_combine(const CombineCall& call, const Status& status);

  /// This rank ran out of host memory inside a call: the others must not wait for it.
  Status out_of_memory(Operation operation);
  Result<std::shared_ptr<RoutingState>> run_route(const RouteCall& call);
  Status run_dispatch(const DispatchCall& call);
  Status run_combine(const CombineCall& call);

  /// Waits until the exchange of an exact route is known.
  Status await_counts(const Launch& launch, const HostResult& host);
  /// A wait that expired in a kernel, as a Status that breaks the group; ok if none did.
  Status check_lost();
  Status describe_fault(const FaultReport& fault, std::string_view operation) const;
  /// Takes the pending fault away and describes it; ok if there is none.
  Status take_fault();

  LiveGroup alive_;  // first, so that it goes last: memory of the parts may have to rest
  std::int64_t timeout_ns_;
  CudaParts parts_;
  Tickets tickets_;
  Placements placements_;
  Staging staging_;
  bool launched_ = false;  // something was, so the last call's event means something
};

/// Entry of the registry.
BackendFactory cuda_backend_factory();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_BACKEND_HPP
