#include "bench/bench_plan.hpp"

#include <algorithm>
#include <numeric>

#include "report/wire.hpp"

namespace ferry::tools {

namespace {

constexpr std::int64_t kBfloat16Bytes = 2;

}  // namespace

std::string_view name_of(BenchOp op) {
  switch (op) {
    case BenchOp::kRoute:
      return "route";
    case BenchOp::kDispatch:
      return "dispatch";
    case BenchOp::kCombine:
      return "combine";
    case BenchOp::kPair:
      return "pair";
    case BenchOp::kLatencyDispatch:
      return "latency-dispatch";
    case BenchOp::kLatencyCombine:
      return "latency-combine";
    case BenchOp::kLatencyPair:
      return "latency-pair";
    case BenchOp::kRouteDispatch:
      return "route+dispatch";
    case BenchOp::kRouteDispatchCombine:
      return "route+dispatch+combine";
    case BenchOp::kPut:
      return "put";
    case BenchOp::kGet:
      return "get";
    case BenchOp::kSignal:
      return "signal";
    case BenchOp::kFetchAdd:
      return "fadd";
  }
  return "?";
}

std::string_view name_of(BenchDType dtype) { return dtype == BenchDType::kFp8 ? "fp8" : "bf16"; }

std::string_view name_of(BenchMemory memory) { return memory == BenchMemory::kPlain ? "plain" : "symmetric"; }

std::string_view name_of(Layout layout) {
  switch (layout) {
    case Layout::kTokens:
      return "tokens";
    case Layout::kExperts:
      return "experts";
    case Layout::kSlab:
      return "slab";
  }
  return "?";
}

std::string_view name_of(Quantization quantize) {
  switch (quantize) {
    case Quantization::kNone:
      return "none";
    case Quantization::kFp8:
      return "fp8";
    case Quantization::kFp8PowerOfTwo:
      return "fp8-pow2";
    case Quantization::kFp8Ue8m0:
      return "fp8-ue8m0";
    case Quantization::kInt8:
      return "int8";
  }
  return "?";
}

std::string_view name_of(CombineOrder order) { return order == CombineOrder::kRankSums ? "rank_sums" : "exact"; }

std::string_view name_of(CopyPath path) {
  switch (path) {
    case CopyPath::kAuto:
      return "auto";
    case CopyPath::kBulk:
      return "bulk";
    case CopyPath::kLoadStore:
      return "load-store";
  }
  return "?";
}

std::string_view name_of(WireFormat format) { return format == WireFormat::kFp8 ? "fp8" : "as-given"; }

BenchOp BenchPlan::reference_op() const {
  if (op == BenchOp::kLatencyPair) return BenchOp::kRouteDispatchCombine;
  return op == BenchOp::kLatencyDispatch ? BenchOp::kRouteDispatch : BenchOp::kCombine;
}

DType BenchPlan::received_dtype() const {
  if (quantize == Quantization::kInt8) return DType::kInt8;
  return receives_bfloat16() ? DType::kBfloat16 : DType::kFloat8E4M3;
}

DType BenchPlan::scale_dtype() const { return quantize == Quantization::kFp8Ue8m0 ? DType::kUint8 : DType::kFloat32; }

std::int64_t BenchPlan::input_bytes() const { return dtype == BenchDType::kFp8 ? hidden : hidden * kBfloat16Bytes; }

std::int64_t BenchPlan::input_scale_bytes() const { return dtype == BenchDType::kFp8 ? scale_bytes() : 0; }

std::int64_t BenchPlan::payload_bytes() const { return receives_bfloat16() ? hidden * kBfloat16Bytes : hidden; }

std::int64_t BenchPlan::num_scales() const {
  return receives_bfloat16() ? 0 : (hidden + kQuantBlockSize - 1) / kQuantBlockSize;
}

std::int64_t BenchPlan::scale_bytes() const {
  return num_scales() * static_cast<std::int64_t>(scale_dtype() == DType::kUint8 ? 1 : sizeof(float));
}

std::int64_t BenchPlan::metadata_bytes() const {
  constexpr auto kIdBytes = static_cast<std::int64_t>(sizeof(std::int64_t));
  constexpr auto kWeightBytes = static_cast<std::int64_t>(sizeof(float));
  if (latency()) return 0;  // weights stay with their tokens
  return layout == Layout::kTokens ? num_topk * (kIdBytes + kWeightBytes) : kWeightBytes;
}

std::int64_t BenchPlan::combine_row_bytes() const { return hidden * kBfloat16Bytes; }

std::int64_t BenchPlan::combine_sent_row_bytes() const {
  // CPU ranks read the rows of a sum of ranks as given, and send the rounded sum of a node.
  if (wire_format == WireFormat::kAsGiven || (latency() && !on_gpu())) return combine_row_bytes();
  return hidden + hidden / kQuantBlockSize * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t BenchPlan::dispatch_wire_row_bytes() const {
  return payload_bytes() + dispatch_record_bytes(scale_bytes(), num_topk, !latency());
}

std::int64_t BenchPlan::combine_wire_row_bytes() const {
  return combine_sent_row_bytes() + combine_record_bytes(num_topk, combine_is_weighted() || returns_weights);
}

RoutingTable BenchPlan::routing_of(int rank) const {
  if (!trace) return make_routing(routing, {num_tokens, num_topk, num_experts}, seed, rank);
  RoutingTable slice = slice_routing(trace->table, rank * num_tokens, num_tokens);
  // The ids may be recorded; weights are generated in all cases, see make_routing.
  slice.topk_weights = make_routing(RoutingKind::kOneHot, {num_tokens, num_topk, num_experts}, seed, rank).topk_weights;
  return slice;
}

Placement BenchPlan::placement() const {
  Placement made;
  if (num_replicas < 0) return made;
  for (std::int64_t i = 0; i < num_physical_experts(); ++i) {
    const std::int64_t logical = i < num_experts ? i : (i - num_experts) * num_experts / num_replicas;
    made.physical_to_logical.push_back(static_cast<std::int32_t>(logical));
  }
  return made;
}

Result<RoutingTable> BenchPlan::picked(RoutingTable table, int rank) const {
  if (num_replicas < 0) return table;
  const TensorView ids(table.topk_idx.data(), DType::kInt64, {table.num_tokens, table.num_topk});
  Status status = pick_replicas(ids, num_experts, placement(), {rank, num_ranks, ranks_per_node()}, ids);
  if (!status) return status;
  table.num_experts = num_physical_experts();
  return table;
}

std::vector<std::int64_t> tokens_per_expert(const RoutingTable& table) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(table.num_experts));
  for (auto token = table.topk_idx.begin(); token != table.topk_idx.end(); token += table.num_topk) {
    std::vector<std::int64_t> named(token, token + table.num_topk);
    std::sort(named.begin(), named.end());
    named.erase(std::unique(named.begin(), named.end()), named.end());
    for (const std::int64_t expert : named) {
      if (expert >= 0) ++counts[static_cast<std::size_t>(expert)];
    }
  }
  return counts;
}

std::vector<int> rows_per_token(const RoutingTable& table, Layout layout, int num_ranks) {
  std::vector<int> rows(static_cast<std::size_t>(table.num_tokens));
  const auto num_topk = static_cast<std::size_t>(table.num_topk);
  std::vector<std::int64_t> targets;
  for (std::size_t token = 0; token < rows.size(); ++token) {
    targets.clear();
    for (std::size_t k = 0; k < num_topk; ++k) {
      const std::int64_t expert = table.topk_idx[token * num_topk + k];
      if (expert < 0) continue;
      targets.push_back(layout == Layout::kTokens ? owner_of(expert, table.num_experts, num_ranks) : expert);
    }
    std::sort(targets.begin(), targets.end());
    rows[token] = static_cast<int>(std::unique(targets.begin(), targets.end()) - targets.begin());
  }
  return rows;
}

std::vector<CrossingRows> count_crossing_rows(const BenchPlan& plan) {
  std::vector<CrossingRows> rows(static_cast<std::size_t>(plan.num_ranks));
  const auto num_topk = static_cast<std::size_t>(plan.num_topk);
  std::vector<std::int64_t> owners;
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    const RoutingTable table = plan.routing_of(rank);
    for (std::size_t first = 0; first < table.topk_idx.size(); first += num_topk) {
      owners.clear();
      for (std::size_t k = 0; k < num_topk; ++k) {
        const std::int64_t expert = table.topk_idx[first + k];
        if (expert >= 0) owners.push_back(owner_of(expert, table.num_experts, plan.num_ranks));
      }
      std::sort(owners.begin(), owners.end());
      owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
      for (const std::int64_t owner : owners) {
        if (owner == rank) continue;
        ++rows[static_cast<std::size_t>(rank)].num_sent;
        ++rows[static_cast<std::size_t>(owner)].num_received;
      }
    }
  }
  return rows;
}

std::int64_t estimate_memory_bytes(const BenchPlan& plan) {
  const auto rows = rows_per_token(plan.routing_of(0), plan.layout, plan.num_ranks);
  return memory_bytes_with(plan, std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
}

std::int64_t memory_bytes_with(const BenchPlan& plan, std::int64_t num_rows) {
  const auto id_bytes = static_cast<std::int64_t>(sizeof(std::int64_t) + sizeof(float));
  std::int64_t bytes = plan.num_tokens * plan.num_topk * id_bytes;
  if (plan.op != BenchOp::kRoute) {
    // Buffers of dispatch, then of combine, whose input doubles as dispatch's output if both are bf16. The rows of the
    // limit's copies follow those of combine's input.
    if (plan.needs_dispatch_buffers())
      bytes += plan.num_tokens * (plan.input_bytes() + plan.scale_bytes() + plan.metadata_bytes());
    if (plan.needs_dispatch_buffers() && !plan.receives_bfloat16()) bytes += num_rows * plan.payload_bytes();
    bytes += (num_rows + plan.num_tokens) * plan.combine_row_bytes();
    bytes += 2 * num_rows * (plan.scale_bytes() + plan.metadata_bytes());
    if (plan.measures_combine()) bytes += plan.num_tokens * plan.combine_row_bytes();
  }
  return bytes * plan.num_ranks;
}

}  // namespace ferry::tools
