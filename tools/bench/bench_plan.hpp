#ifndef FERRY_TOOLS_BENCH_BENCH_PLAN_HPP
#define FERRY_TOOLS_BENCH_BENCH_PLAN_HPP

/// Plan of a measurement: determined before the ranks start, the same in all of them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/routing_source.hpp"
#include "ferry/exchange.hpp"
#include "ferry/latency.hpp"
#include "ferry/placement.hpp"
#include "ferry/routing.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

enum class BenchOp {
  kRoute = 0,
  kDispatch = 1,
  kCombine = 2,
  kPair = 3,
  kLatencyDispatch = 4,
  kLatencyCombine = 5,
  kLatencyPair = 6,
  // References of the calls of latency mode; not selectable as operations.
  kRouteDispatch = 7,
  kRouteDispatchCombine = 8,
  // Calls of the one-sided layer (bench/one_sided.hpp), which has its own plans:
  kPut = 9,
  kGet = 10,
  kSignal = 11,
  kFetchAdd = 12,
};
enum class BenchDType { kBfloat16 = 0, kFp8 = 1 };
enum class BenchMemory { kSymmetric = 0, kPlain = 1 };

std::string_view name_of(BenchOp op);
std::string_view name_of(BenchDType dtype);
std::string_view name_of(BenchMemory memory);
std::string_view name_of(Layout layout);
std::string_view name_of(Quantization quantize);
std::string_view name_of(CombineOrder order);
std::string_view name_of(CopyPath path);
std::string_view name_of(WireFormat format);

struct BenchPlan {
  BenchOp op = BenchOp::kPair;
  int num_ranks = 1;
  int num_nodes = 1;
  bool shares_clock = true;  ///< all ranks are on one host, so that times of different ranks are comparable
  std::string backend;
  std::string transport;
  std::string net_devices;
  std::string ring_memory = "auto";
  bool verify = false;      ///< GroupOptions::verify
  std::string tuning_file;  ///< like GroupOptions::tuning_file
  std::int64_t timeout_ns = 0;
  std::uint64_t arena_bytes = 0;
  std::uint64_t seed = 0;
  std::int64_t num_tokens = 0;     ///< T, per rank
  std::int64_t hidden = 0;         ///< H
  int num_topk = 0;                ///< K
  std::int64_t num_experts = 0;    ///< E
  std::int64_t num_replicas = -1;  ///< route: a placement with this many more homes than experts; -1: no placement
  bool counts_load = false;        ///< routes add the load to counters of all kinds
  BenchDType dtype = BenchDType::kBfloat16;
  Layout layout = Layout::kTokens;
  BenchMemory memory = BenchMemory::kSymmetric;
  WireFormat wire_format = WireFormat::kAsGiven;  ///< of combine; in latency mode of the ranks' sums
  bool returns_weights = false;                   ///< combine: weights of kTokens return with the rows
  bool cached = true;                             ///< dispatch reuses one Routing; otherwise it routes first each time
  std::string routing_name;                       ///< as given by the user
  RoutingKind routing = RoutingKind::kRandom;
  std::optional<Trace> trace;  ///< replaces `routing`
  // Latency mode:
  Quantization quantize = Quantization::kNone;
  CombineOrder order = CombineOrder::kExact;
  bool late_weights = false;      ///< weights are given to the combine of latency mode, not to the dispatch
  bool split = false;             ///< each call is made as send half and receive half, one right after the other
  bool masks_lost_ranks = false;  ///< GroupOptions::mask_lost_ranks
  std::int64_t late_ns = 0;       ///< delay of the last rank at the start of timed calls
  double network_gbps = 0;        ///< several nodes: rate of a rank's network each way, GB/s; 0: not known
  int num_iterations = 0;
  int num_warmup = 0;
  std::vector<KernelOptions> kernels{KernelOptions{}};  ///< CUDA: each is measured, one after the other
  bool measures_limit = true;                           ///< also time plain copies or raw exchanges
  bool compares = true;  ///< latency mode: also time a pair as a whole, and the calls that do the same without it

  /// Every expert has a home, and evenly spaced ones have a second home.
  Placement placement() const;
  /// Table of a rank after its tokens have picked their homes, if there is a placement.
  Result<RoutingTable> picked(RoutingTable table, int rank) const;
  /// P; E without a placement.
  std::int64_t num_physical_experts() const { return num_experts + (num_replicas < 0 ? 0 : num_replicas); }
  bool on_gpu() const { return backend == "cuda"; }
  int ranks_per_node() const { return num_ranks / num_nodes; }
  bool combine_is_weighted() const { return layout != Layout::kTokens; }
  /// Copies inside a machine set no limit for transfers over a network.
  bool has_limit() const { return measures_limit && num_nodes == 1; }
  bool latency() const { return op >= BenchOp::kLatencyDispatch && op <= BenchOp::kLatencyPair; }
  bool measures_dispatch() const { return is_pair() || op == dispatch_op(); }
  bool measures_combine() const { return is_pair() || op == combine_op(); }
  bool is_pair() const { return op == BenchOp::kPair || op == BenchOp::kLatencyPair; }
  BenchOp dispatch_op() const { return latency() ? BenchOp::kLatencyDispatch : BenchOp::kDispatch; }
  BenchOp combine_op() const { return latency() ? BenchOp::kLatencyCombine : BenchOp::kCombine; }
  /// Call that does the same without latency mode.
  BenchOp reference_op() const;
  /// Latency mode combines rows of its own dispatch.
  bool needs_dispatch_buffers() const { return latency() || measures_dispatch(); }
  /// Rows have the same type in both directions, so one block is both dispatch's output and combine's input.
  bool receives_bfloat16() const { return dtype == BenchDType::kBfloat16 && quantize == Quantization::kNone; }
  DType received_dtype() const;
  DType scale_dtype() const;
  /// Bytes of one input row of dispatch, and of its scales.
  std::int64_t input_bytes() const;
  std::int64_t input_scale_bytes() const;
  /// Bytes of one dispatched row: payload, scales, and its ids and weights.
  std::int64_t payload_bytes() const;
  std::int64_t scale_bytes() const;
  std::int64_t metadata_bytes() const;
  std::int64_t dispatch_row_bytes() const { return payload_bytes() + scale_bytes() + metadata_bytes(); }
  /// Bytes of one returned row, which is always bf16.
  std::int64_t combine_row_bytes() const;
  /// The same as it crosses to another rank of the node.
  std::int64_t combine_sent_row_bytes() const;
  /// Bytes of these rows on the network, where ids are i32 and the metadata of a row is padded.
  std::int64_t dispatch_wire_row_bytes() const;
  std::int64_t combine_wire_row_bytes() const;
  /// FP8 and INT8 have one scale per 128 channels.
  std::int64_t num_scales() const;
  /// Ids and weights of one rank.
  RoutingTable routing_of(int rank) const;
};

/// Number of rows of each token of a rank: distinct destination ranks (kTokens) or distinct experts (kExperts, kSlab).
/// Computed from the ids alone, to check the result of route.
std::vector<int> rows_per_token(const RoutingTable& table, Layout layout, int num_ranks);

/// Minimum number of rows between one rank and the others: each token once to every other rank that owns one of its
/// experts.
struct CrossingRows {
  std::int64_t num_sent = 0;
  std::int64_t num_received = 0;
};
/// By rank, computed from the ids of all ranks.
std::vector<CrossingRows> count_crossing_rows(const BenchPlan& plan);

/// Number of tokens of a table that name each expert.
std::vector<std::int64_t> tokens_per_expert(const RoutingTable& table);

/// Memory of all ranks together, estimated from rank 0's ids; 10 % more is not unusual.
std::int64_t estimate_memory_bytes(const BenchPlan& plan);
/// The same for ranks with `num_rows` rows each. With 0 it is what the tokens alone take, without a look at any id.
std::int64_t memory_bytes_with(const BenchPlan& plan, std::int64_t num_rows);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_BENCH_PLAN_HPP
