#include "cuda/internode/steps.hpp"

#include <algorithm>

#include "plan/carver.hpp"
#include "plan/to_size.hpp"
#include "rail/rail_memory.hpp"

namespace ferry::cuda {
namespace {

/// Blocks of kernels whose only partners are the ranks of the node: as many as kernels of one node take.
constexpr int kMostBlocks = 16;
/// Blocks of copies inside a GPU, which need few.
constexpr int kMostOwnBlocks = 8;
/// An H200 fills a ring of 16 chunks of 128 KiB in host memory and empties another at 7, 12 and 16.5 GB/s each way with
/// one, two and four blocks at each, and at 5 with eight, most of which poll over PCIe (benchmarks/gpu_rings).
constexpr int kMostBlocksPerRing = 4;
/// The same with 1 MiB chunks in GPU memory takes 28, 53, 97 and 160 GB/s with one, two, four and eight blocks. The
/// other half of the call's multiprocessors copies this node's items, or adds up tokens, meanwhile.
constexpr int kMostBlocksPerWideRing = 8;
/// Blocks of all rings together of up to nine nodes; more nodes have one block at each ring.
constexpr int kMostRingBlocks = 16;
static_assert(kMostBlocks * kExchangeWarps <= kMaxSumWarps);
static_assert(kMostRingBlocks + kMostOwnBlocks == kMostCallSms);

/// Largest product of ranks of a node and nodes for which a block's shared memory holds the progress of all stagings.
/// In larger groups rows are taken once all have arrived.
constexpr int kMostPullFlows = 2048;

/// Nodes have agreed on the call before its later kernels begin: the entries of these only report that memory is ready.
constexpr std::uint64_t kAgreed = 1;

int num_rings(int num_nodes) { return 2 * (num_nodes - 1); }

ExchangeParams exchange_of(const NodePlace& place) {
  ExchangeParams params;
  params.ranks = place.ranks;
  params.rails = place.rails;
  params.rail_timeout_ns = place.ranks.timeout_ns;
  return params;
}

/// Whether blocks of the exchange take the rows as they arrive; otherwise a kernel after it takes them. Blocks that
/// wait for rows slow those that serve rings, and a rank that is alone in its node takes its rows without links soon
/// after the exchange: on 2 H200, 4096 tokens of 14 KiB, in turn, a dispatch took 13 and 14 ms instead of 15 to 23
/// (four runs) between threads, 19 and 19 instead of 22 to 23 over shared memory. Where kernels route, batches
/// are small, and one kernel less is worth more.
bool pulls_in_exchange(const NodePlace& place, const RoutedTokens& routed) {
  if (place.ranks_per_node == 1 && !routed.by_kernels) return false;
  return place.ranks_per_node * place.rails.num_nodes <= kMostPullFlows;
}

/// Whether the exchange writes rows and records to where the caller wants them. A rank alone in its node receives each
/// token that comes, in the order in which they come: by node and token. Where kernels route, nodes have room for as
/// many tokens as may come. Every chunk has room for a whole item.
bool lands_in_place(const NodePlace& place, const RoutedTokens& routed, std::int64_t item_bytes) {
  const std::size_t least_chunk =
      std::min(place.rails.rings.chunk_bytes, rail::kMaxChunkBytes) - rail::kChunkHeaderBytes;
  return place.ranks_per_node == 1 && routed.by_token && !routed.by_kernels && to_size(item_bytes) <= least_chunk;
}

std::int64_t offset_in(const NodePlace& place, const void* data) {
  return data == nullptr ? 0 : static_cast<const std::byte*>(data) - place.ranks.peer_bases[place.ranks.rank];
}

}  // namespace

StepBlocks StepBlocks::of(const Limits& limits) {
  const int rings = num_rings(limits.num_nodes);
  const int num_sms = limits.num_sms;
  const int most_own = std::max(1, num_sms - rings);
  const int copying = std::clamp(limits.num_copy_sms, 1, most_own);
  const int most_for_rings = std::min(kMostRingBlocks, limits.wide_rings ? num_sms / 2 : num_sms - copying);
  const int most_per_ring = limits.wide_rings ? kMostBlocksPerWideRing : kMostBlocksPerRing;
  const int per_ring = std::clamp(most_for_rings / rings, 1, most_per_ring);
  const int most_copying = limits.takes_rows ? kMostBlocks : kMostOwnBlocks;
  const int num_left = std::clamp(std::min(num_sms, kMostCallSms) - per_ring * rings, 1, kMostBlocks);
  const int num_own = limits.num_copy_sms > 0 ? copying : std::min(num_left, most_copying);
  StepBlocks blocks;
  blocks.per_ring = per_ring;
  blocks.num_own = num_own;
  blocks.num_other = std::clamp(num_sms, 1, kMostBlocks);
  blocks.num_sums = num_left;
  blocks.num_all = std::max(num_sms, 1);
  return blocks;
}

ExchangeParams agreement_only(const NodePlace& place, const CallIdentity& call) {
  ExchangeParams params = exchange_of(place);
  params.begins_call = true;
  params.ranks.timeout_ns += params.ranks.timeout_ns / 2;
  params.entry.agreement = call.agreement;
  params.entry.record_number = call.record_number;
  params.entry.tables_offset = offset_in(place, place.rails.log);
  params.entry.num_blocks = 1;
  params.record = call.record;
  params.fault = call.fault;
  params.found = call.found;
  return params;
}

DispatchStaging DispatchStaging::at(std::byte* base, const RoutedTokens& routed, const DispatchTensors& tensors) {
  const std::size_t record_bytes = to_size(tensors.format.size_bytes());
  plan::Carver carver(base);
  DispatchStaging staging;
  staging.rows = carver.take<std::byte>(to_size(routed.num_items_in * tensors.row_bytes));
  staging.records = carver.take<std::byte>(to_size(routed.num_items_in) * record_bytes);
  staging.size_bytes = carver.used_bytes();
  return staging;
}

DispatchSteps dispatch_steps(const NodePlace& place, const CallIdentity& call, const RoutedTokens& routed,
                             const DispatchTensors& tensors, const DispatchStaging& staging, const StepBlocks& blocks) {
  const std::int64_t record_bytes = tensors.format.size_bytes();
  DispatchSteps steps;
  ExchangeParams& exchange = steps.exchange;
  exchange = agreement_only(place, call);
  exchange.flows = routed.tables.to_nodes;
  exchange.items = routed.tables.out_tokens;
  if (routed.by_kernels) exchange.routed = routed.tables.summary;
  exchange.row = {tensors.x, tensors.x_stride, staging.rows, tensors.row_bytes, tensors.row_bytes};
  exchange.item_record = {nullptr, 0, staging.records, record_bytes, record_bytes};
  exchange.makes_records = true;
  exchange.source.num_topk = routed.num_topk;
  exchange.source.format = tensors.format;
  exchange.source.scales = tensors.scales;
  exchange.source.ids = routed.tables.ids;
  exchange.source.weights = tensors.weights;
  exchange.lands = lands_in_place(place, routed, exchange.item_bytes());
  if (exchange.lands) {
    exchange.row.to = tensors.out.x;
    exchange.row.to_stride = tensors.out.x_stride;
  }
  exchange.blocks_per_ring = blocks.per_ring;
  exchange.num_own_blocks = blocks.num_own;
  exchange.chunk_items = blocks.chunk_items;
  exchange.carries_rows = true;

  exchange.pulls = pulls_in_exchange(place, routed);
  PullParams& pull = exchange.pull;
  pull.ranks = place.ranks;
  pull.entry.agreement = kAgreed;
  pull.entry.record_number = call.record_number;
  pull.entry.rows_offset = offset_in(place, staging.rows);
  pull.entry.tables_offset = offset_in(place, staging.records);
  pull.entry.num_blocks = blocks.num_other;
  exchange.entry.rows_offset = pull.entry.rows_offset;
  exchange.entry.scales_offset = pull.entry.tables_offset;
  pull.gate = &place.rails.state->gate;
  pull.num_rows = routed.num_used_rows;
  pull.row_items = routed.tables.row_items;
  pull.row_experts = routed.by_token ? nullptr : routed.tables.row_experts;
  pull.owner = routed.owner;
  pull.local_expert = routed.local_expert;
  pull.num_experts = routed.num_experts;
  pull.num_topk = routed.num_topk;
  pull.group_rank = place.group_rank;
  pull.row_bytes = tensors.row_bytes;
  pull.format = tensors.format;
  pull.out = tensors.out;
  pull.num_blocks = blocks.num_other;
  pull.num_sources = place.ranks_per_node * place.rails.num_nodes;
  return steps;
}

bool sums_nodes(const NodePlace& place, const RoutedTokens& routed, const CombineTensors& tensors) {
  return place.ranks_per_node > 1 || !routed.by_token || routed.by_kernels || tensors.weighted;
}

CombineStaging CombineStaging::at(std::byte* base, const NodePlace& place, const RoutedTokens& routed,
                                  const CombineTensors& tensors) {
  const std::size_t num_in = to_size(routed.num_items_in);
  const std::size_t num_back = to_size(routed.num_items_back);
  const std::size_t num_topk = static_cast<std::size_t>(routed.num_topk);
  plan::Carver carver(base);
  CombineStaging staging;
  const std::size_t num_sums = sums_nodes(place, routed, tensors) ? num_in : 0;
  staging.topk_weights = carver.take<float>(tensors.weighted ? num_in * num_topk : 0);
  staging.sums = carver.take<std::byte>(num_sums * to_size(tensors.row_bytes));
  staging.sum_weights = carver.take<float>(tensors.returns_weights ? num_sums * num_topk : 0);
  staging.returned = carver.take<std::byte>(num_back * to_size(tensors.row_bytes));
  staging.returned_weights = carver.take<float>(tensors.returns_weights ? num_back * num_topk : 0);
  staging.size_bytes = carver.used_bytes();
  return staging;
}

CombineSteps combine_steps(const NodePlace& place, const CallIdentity& call, const RoutedTokens& routed,
                           const CombineTensors& tensors, const CombineStaging& staging, const StepBlocks& blocks) {
  const std::int64_t entries_bytes = std::int64_t{routed.num_topk} * static_cast<std::int64_t>(sizeof(float));
  const bool returns_weights = tensors.returns_weights;
  const auto bytes_of = [](auto* table) { return reinterpret_cast<std::byte*>(table); };
  CombineSteps steps;
  const bool makes_sums = sums_nodes(place, routed, tensors);
  ExchangeParams first = agreement_only(place, call);
  first.chunk_items = blocks.chunk_items;
  if (routed.by_kernels) first.routed = routed.tables.summary;

  ExchangeParams& give_back = steps.give_back;
  if (tensors.weighted) {
    ExchangeParams& begin = steps.begin.emplace(first);
    begin.flows = routed.tables.to_nodes;
    begin.items = routed.tables.out_tokens;
    begin.item_record = {reinterpret_cast<const std::byte*>(tensors.topk_weights), entries_bytes,
                         bytes_of(staging.topk_weights), entries_bytes, entries_bytes};
    begin.num_own_blocks = 1;
    give_back = exchange_of(place);
    give_back.entry.agreement = kAgreed;
    give_back.entry.record_number = call.record_number;
    give_back.entry.num_blocks = blocks.num_sums;
  } else {
    give_back = first;
  }
  give_back.blocks_per_ring = blocks.per_ring;
  give_back.chunk_items = blocks.chunk_items;
  give_back.carries_rows = true;
  give_back.flows = routed.tables.from_nodes;
  const std::byte* const sums = makes_sums ? staging.sums : tensors.x;
  const std::int64_t sum_stride = makes_sums ? tensors.row_bytes : tensors.x_stride;
  const float* const sum_weights = makes_sums ? staging.sum_weights : tensors.weights;
  give_back.row = {sums, sum_stride, staging.returned, tensors.row_bytes, tensors.row_bytes};
  if (returns_weights) {
    give_back.item_record = {reinterpret_cast<const std::byte*>(sum_weights), entries_bytes,
                             bytes_of(staging.returned_weights), entries_bytes, entries_bytes};
  }
  give_back.sums_tokens = true;
  give_back.num_own_blocks = blocks.num_sums;

  give_back.sums_nodes = makes_sums;
  if (makes_sums) {
    give_back.entry.rows_offset = offset_in(place, tensors.x);
    give_back.entry.rows_stride = tensors.x_stride;
    give_back.entry.weights_offset = offset_in(place, tensors.weights);
  }
  NodeSumParams& node_sums = give_back.node_sums;
  node_sums.destinations = routed.tables.destinations;
  node_sums.to_nodes = routed.tables.to_nodes;
  node_sums.num_topk = routed.num_topk;
  node_sums.one_row_per_token = routed.by_token;
  node_sums.weighted = tensors.weighted;
  node_sums.returns_weights = returns_weights;
  node_sums.topk_weights = staging.topk_weights;
  node_sums.row_bytes = tensors.row_bytes;
  node_sums.sums = staging.sums;
  node_sums.sum_weights = staging.sum_weights;

  TokenSumParams& token_sums = give_back.token_sums;
  token_sums.item_of_token = routed.tables.item_of_token;
  token_sums.node = place.rails.node;
  token_sums.num_nodes = place.rails.num_nodes;
  token_sums.num_tokens = routed.num_tokens;
  token_sums.num_topk = routed.num_topk;
  token_sums.one_row_per_token = routed.by_token;
  token_sums.float32 = tensors.float32;
  token_sums.returns_weights = returns_weights;
  token_sums.row_bytes = tensors.row_bytes;
  token_sums.own = sums;
  token_sums.own_stride = sum_stride;
  token_sums.own_weights = sum_weights;
  token_sums.returned = staging.returned;
  token_sums.returned_weights = staging.returned_weights;
  token_sums.ids = routed.tables.ids;
  token_sums.owner = routed.owner;
  token_sums.ranks_per_node = place.ranks_per_node;
  std::copy(std::begin(tensors.bias), std::end(tensors.bias), std::begin(token_sums.bias));
  token_sums.out_x = tensors.out_x;
  token_sums.out_stride = tensors.out_stride;
  token_sums.out_weights = tensors.out_weights;
  return steps;
}

cudaError_t launch(const CombineSteps& steps, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (steps.begin) error = launch_rail_exchange(*steps.begin, stream);
  return error == cudaSuccess ? launch_rail_exchange(steps.give_back, stream) : error;
}

}  // namespace ferry::cuda
