#ifndef FERRY_CORE_BACKEND_HPP
#define FERRY_CORE_BACKEND_HPP

/// Interface of a backend. Core checks arguments, resolves them to the plain structs below and passes them on; a
/// backend moves bytes. Every call reaches the backend even if this rank's own checks failed (`call.record.code`),
/// because the peers must learn of the failure: the backend passes all records to check_agreement before it moves
/// anything.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/agreement.hpp"
#include "core/backend_context.hpp"
#include "core/expert_placement.hpp"
#include "core/flight_recorder.hpp"
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

/// S, the number of columns of a tensor of scales.
inline std::int64_t num_scales(const ConstTensorView& scales) { return scales.extent(scales.num_dims - 1); }

/// Checked arguments of channel_tables. Tables with null pointers are not written.
struct ChannelTablesCall {
  const RoutingState* routing = nullptr;
  Stream stream;
  int num_channels = 1;
  std::int64_t num_rows = 0;                    ///< rows of source_token
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
  /// Latency mode: [1] i32, see LatencyDispatchInput; absent: all tokens count.
  ConstTensorView num_tokens_view;
  RouteOptions options;  ///< num_experts is P; without expert_to_rank and the vectors of placement
  std::shared_ptr<const ExpertPlacement> placement;  ///< null if the call is refused
  /// See Group::route; null: none. Returns checked tables to write along with the route, which has no Routing yet, or
  /// null.
  const std::function<const ChannelTablesCall*()>* while_waiting = nullptr;
};

/// Number of tokens that may have experts, from the first on. Only if the call's memory is on the host.
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
  Quantization quantize = Quantization::kNone;  ///< if set, x is bf16 without scales (core/quantized_dispatch.hpp)
  ConstTensorView scales;                       ///< [T, S] any strides, or absent
  ConstTensorView topk_weights;                 ///< weights to send, or absent
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
  ConstTensorView weights;  ///< summed back, or absent
  std::array<ConstRows, 2> bias;
  ConstTensorView topk_weights;  ///< present when weighted
  bool weighted = false;
  bool rank_sums = false;  ///< CombineOrder::kRankSums, in latency mode; weighted
  /// If kFp8, H is a multiple of kQuantBlockSize. With rank_sums, x is bf16 and the ranks' sums travel so, else the
  /// rows of x.
  WireFormat wire_format = WireFormat::kAsGiven;
  Rows out_x;
  TensorView out_weights;
  KernelOptions kernel;
};

/// This rank's checked arguments of latency_dispatch: those of a route of layout kSlab and of a dispatch, whose own
/// records are unused; the dispatch has no Routing.
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
  bool own_weights = false;  ///< combine.topk_weights belong to this call, not to the dispatch
  TileSignals signals;       ///< words [L, ceil(C / tile_rows)], or absent
  bool split = false;
  std::int64_t* wait_times_ns = nullptr;  ///< [R] to add to; null: none
};

/// The half to receive, given by the phase of `routing`, which is never null.
struct LatencyReceiveCall {
  std::shared_ptr<const RoutingState> routing;
  Stream stream;
};

/// Backend::update_mask: every rank but this one.
inline constexpr int kEveryRank = -1;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;
  /// Called once before the first call, when every rank has its backend. One that is destroyed without it belongs to a
  /// group that has failed to form, and waits for no rank.
  virtual void created() {}
  /// Whether `Stream::handle` may be non-null.
  virtual bool takes_streams() const = 0;
  /// Whether core can read the memory of callers' views. If not, the backend checks the ids of route.
  virtual bool memory_is_on_host() const = 0;
  virtual Result<Buffer> allocate(std::size_t bytes) = 0;
  virtual MemoryUsage memory_usage() const = 0;
  /// Implements Group::trim; waits for no rank.
  virtual Status trim() = 0;
  /// Not const: it may have to query the engine.
  virtual NetworkUsage network_usage() { return {}; }
  /// Group::wait_times_ns.
  virtual std::vector<std::int64_t> wait_times_ns() const { return {}; }

  /// Recorder of this rank's calls, for core, which begins and ends their entries; null: there is none.
  virtual FlightRecorder* recorder() { return nullptr; }

  virtual Result<std::shared_ptr<RoutingState>> route(const RouteCall& call) = 0;
  virtual Status dispatch(const DispatchCall& call) = 0;
  virtual Status combine(const CombineCall& call) = 0;
  /// A split call whose record is ok returns before any peer has made it, with the results available by then;
  /// latency_receive adds the others. Core tracks the calls in flight: a call is in flight until it is received or no
  /// owner of its RoutingState is left, so a backend holds the RoutingState while it works for the call.
  virtual Result<std::shared_ptr<RoutingState>> latency_dispatch(const LatencyDispatchCall& call) = 0;
  virtual Status latency_combine(const LatencyCombineCall& call) = 0;
  /// `made` becomes true unless the half remains to be received.
  virtual Status latency_receive(const LatencyReceiveCall& call, bool& made) = 0;
  /// Local; only in groups with GroupOptions::mask_lost_ranks. `rank` is another rank, or kEveryRank; `out` is [R].
  virtual Status update_mask(int rank, bool masked, Stream stream) = 0;
  virtual Status query_mask(std::int32_t* out, Stream stream) = 0;
  /// Implements Group::suspend, in groups of one node. No call may be made until `renew`, also after an error; in any
  /// case this rank has left. Absent ranks are among the silent ones.
  virtual Result<std::vector<int>> suspend() = 0;
  /// Makes the other ranks find, when they next look, that this one has left. Any number of times.
  virtual void leave() = 0;
  /// Collective, see core/create_together.hpp: implements Group::renew in place, for a backend whose memory stays where
  /// it is. Nullopt: it has no such memory, so that core makes a new backend instead. Where the renewal fails, core
  /// calls `leave`, and may call it again.
  virtual std::optional<Status> renew(const BackendContext& /*context*/) { return std::nullopt; }
  /// Local.
  virtual Status channel_tables(const ChannelTablesCall& call) = 0;
  /// Wait for this rank's work on `stream`, and report errors since the last wait.
  virtual Status wait(Stream stream) = 0;
  /// Report errors known so far since the last wait.
  virtual Status poll() { return {}; }
  /// Wait for the peers to call it too, then leave. The destructor leaves without waiting.
  virtual Status destroy() = 0;
};

/// One entry of the registry.
struct BackendFactory {
  std::string_view name;
  std::string_view description;
  /// Ok if the backend can run on this machine, else the reason why not. No side effects.
  Status (*probe)();
  /// Collective, see core/create_together.hpp.
  Result<std::unique_ptr<Backend>> (*create)(const BackendContext& context);
  /// ferry::bytes_required for a shape whose numbers were checked; `topology` is the view of rank 0.
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
