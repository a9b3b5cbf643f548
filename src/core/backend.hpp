#ifndef FERRY_CORE_BACKEND_HPP
#define FERRY_CORE_BACKEND_HPP

/// What a backend provides. Core checks arguments, resolves them to the plain structs below and hands them over; a
/// backend moves bytes. Every call reaches the backend even when this rank's own checks failed (`call.record.code`),
/// because the peers must learn of the failure: the backend passes all records to check_agreement before it moves
/// anything.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/agreement.hpp"
#include "core/backend_context.hpp"
#include "core/expert_placement.hpp"
#include "core/routing_state.hpp"
#include "ferry/group.hpp"
#include "ferry/latency.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

struct LocalOps;

/// Equally long rows, evenly spaced.
struct ConstRows {
  const std::byte* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t stride_bytes = 0;
  DType dtype = DType::kUint8;

  bool present() const { return row_bytes != 0; }
  const std::byte* row(std::int64_t row_idx) const { return data + row_idx * stride_bytes; }
};

struct Rows {
  std::byte* data = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t stride_bytes = 0;
  DType dtype = DType::kUint8;

  bool present() const { return row_bytes != 0; }
  std::byte* row(std::int64_t row_idx) const { return data + row_idx * stride_bytes; }
};

/// Columns of a tensor of scales: S.
inline std::int64_t num_scales(const ConstTensorView& scales) { return scales.extent(scales.num_dims - 1); }

/// Checked arguments of channel_tables. Pointers that are null are not written.
struct ChannelTablesCall {
  const RoutingState* routing = nullptr;
  Stream stream;
  int num_channels = 1;
  std::int64_t num_rows = 0;                    ///< of source_token
  std::int32_t* rank_prefix = nullptr;          ///< [R, R]
  std::int32_t* send_channel_prefix = nullptr;  ///< [R, C]
  std::int32_t* recv_channel_prefix = nullptr;  ///< [R, C]
  std::int32_t* source_token = nullptr;         ///< [num_rows]
  std::int32_t* send_index = nullptr;           ///< [T, R]
};

/// This rank's checked arguments of route. Ids are in range, options are sane.
struct RouteCall {
  CallRecord record;
  Stream stream;
  ConstTensorView topk_idx;      ///< [T, K] i32 | i64 contiguous
  ConstTensorView topk_weights;  ///< [T, K] f32 contiguous or absent
  std::int64_t num_tokens = 0;
  int num_topk = 0;
  /// Of latency mode, [1] i32 or absent: see LatencyDispatchInput.
  ConstTensorView num_tokens_view;
  RouteOptions options;  ///< num_experts is P; without expert_to_rank and the contents of placement
  std::shared_ptr<const ExpertPlacement> placement;  ///< null if the call is refused
  /// See Group::route; null: none. Returns checked tables to write along with the route, without a Routing, or null.
  const std::function<const ChannelTablesCall*()>* while_waiting = nullptr;
};

/// Tokens that may have experts, from the first on. Only where the call's memory is on the host.
inline std::int64_t num_counted_tokens(const RouteCall& call) {
  if (!call.num_tokens_view.present()) return call.num_tokens;
  return std::clamp<std::int64_t>(*static_cast<const std::int32_t*>(call.num_tokens_view.data), 0, call.num_tokens);
}

/// This rank's checked arguments of dispatch. Present views have the right shapes.
struct DispatchCall {
  CallRecord record;
  Stream stream;
  std::shared_ptr<const RoutingState> routing;  ///< null if the caller's belongs to another group
  ConstRows x;
  Quantization quantize = Quantization::kNone;  ///< else x is bf16 and scales are absent (core/quantized_dispatch.hpp)
  ConstTensorView scales;                       ///< [T, S] any strides, or absent
  ConstTensorView topk_weights;                 ///< the ones to send, or absent
  Rows out_x;
  TensorView out_scales;  ///< [rows, S] any strides, in latency mode also [L, C, S]; or absent
  TensorView out_topk_idx;
  TensorView out_topk_weights;
  TensorView out_source;
  bool zero_padding = false;
  bool clear_if_refused = false;
  KernelOptions kernel;
};

/// This rank's checked arguments of combine.
struct CombineCall {
  CallRecord record;
  Stream stream;
  std::shared_ptr<const RoutingState> routing;  ///< null if the caller's belongs to another group
  ConstRows x;
  ConstTensorView weights;  ///< to be summed back, or absent
  std::array<ConstRows, 2> bias;
  ConstTensorView topk_weights;  ///< present when weighted
  bool weighted = false;
  bool rank_sums = false;  ///< CombineOrder::kRankSums, in latency mode; weighted
  Rows out_x;
  TensorView out_weights;
  KernelOptions kernel;
};

/// This rank's checked arguments of latency_dispatch: those of a route of layout kSlab and of a dispatch. The records
/// of the two are not used, and the dispatch has no Routing.
struct LatencyDispatchCall {
  CallRecord record;
  Stream stream;
  RouteCall route;
  DispatchCall dispatch;
  std::int64_t max_tokens = 0;         ///< M
  std::int64_t num_local_experts = 0;  ///< L
  bool split = false;
  std::int64_t* wait_times_ns = nullptr;  ///< [R] to add to; null: none
};

/// This rank's checked arguments of latency_combine.
struct LatencyCombineCall {
  CombineCall combine;
  bool own_weights = false;  ///< combine.topk_weights are this call's, not those of the dispatch
  bool split = false;
  std::int64_t* wait_times_ns = nullptr;  ///< [R] to add to; null: none
};

/// The half that is to be received: the phase of `routing` says which. Never null.
struct LatencyReceiveCall {
  std::shared_ptr<const RoutingState> routing;
  Stream stream;
};

/// Backend::update_mask: all but this one.
inline constexpr int kEveryRank = -1;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;
  /// Whether `Stream::handle` may be non-null.
  virtual bool takes_streams() const = 0;
  /// Whether core can read what callers' views point to. If not, the backend checks the ids of route.
  virtual bool memory_is_on_host() const = 0;
  virtual Result<Buffer> allocate(std::size_t bytes) = 0;
  virtual MemoryUsage memory_usage() const = 0;
  /// Gives back what Group::trim says, and waits for nobody.
  virtual Status trim() = 0;
  /// Not const: it may have to query the engine.
  virtual NetworkUsage network_usage() { return {}; }
  /// Group::wait_times_ns.
  virtual std::vector<std::int64_t> wait_times_ns() const { return {}; }

  virtual Result<std::shared_ptr<RoutingState>> route(const RouteCall& call) = 0;
  virtual Status dispatch(const DispatchCall& call) = 0;
  virtual Status combine(const CombineCall& call) = 0;
  /// A split call whose record is ok returns before any peer has made it, with what is known by then; what it lacks,
  /// latency_receive adds. Core keeps track of what is in flight: a call is until it is received, or nobody holds its
  /// RoutingState any more; so a backend holds it as long as it works for the call.
  virtual Result<std::shared_ptr<RoutingState>> latency_dispatch(const LatencyDispatchCall& call) = 0;
  virtual Status latency_combine(const LatencyCombineCall& call) = 0;
  /// `made` becomes true unless the half is still to be received.
  virtual Status latency_receive(const LatencyReceiveCall& call, bool& made) = 0;
  /// Local; only of groups with GroupOptions::mask_lost_ranks. `rank` is another, or kEveryRank; `out` is [R].
  virtual Status update_mask(int rank, bool masked, Stream stream) = 0;
  virtual Status query_mask(std::int32_t* out, Stream stream) = 0;
  /// Local.
  virtual Status channel_tables(const ChannelTablesCall& call) = 0;
  /// Wait for this rank's work on `stream`, and report what went wrong since the last wait.
  virtual Status wait(Stream stream) = 0;
  /// Report what is known so far to have gone wrong since the last wait.
  virtual Status poll() { return {}; }
  /// Wait for the peers to get here too, then leave. The destructor leaves without waiting.
  virtual Status destroy() = 0;
};

/// One entry of the registry.
struct BackendFactory {
  std::string_view name;
  std::string_view description;
  /// Ok if the backend can run on this machine, else why not. No side effects.
  Status (*probe)();
  /// Collective: succeeds on all ranks or fails on all.
  Result<std::unique_ptr<Backend>> (*create)(const BackendContext& context);
  /// ferry::bytes_required for a shape whose numbers were checked; `topology` is that of its rank 0.
  Result<std::size_t> (*bytes_required)(const MemoryShape& shape, const Topology& topology);
  /// ferry::latency_bytes_required for a shape whose numbers were checked.
  std::size_t (*latency_bytes_required)(const LatencyShape& shape);
  /// Calls that need no group (local/local_ops.hpp).
  const LocalOps* local;
};

/// The backends of this build, best first. Defined in src/registry.cpp.
std::span<const BackendFactory> backend_factories();

}  // namespace ferry

#endif  // FERRY_CORE_BACKEND_HPP
