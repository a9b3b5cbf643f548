#include "planning/shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ferry/types.hpp"
#include "report/wire.hpp"

namespace ferry::tools {

namespace {

constexpr std::int64_t kScaleGroup = 128;
constexpr std::int64_t kBfloat16Bytes = 2;
constexpr std::int64_t kScaleBytes = 4;

/// Rings of GPU ranks, as docs/nodes.md describes them.
constexpr std::int64_t kRingChunks = 16;
constexpr std::int64_t kMostChunkBytes = std::int64_t{512} << 10;
constexpr std::int64_t kLeastChunkBytes = std::int64_t{8} << 10;
constexpr std::int64_t kShortChunkBytes = std::int64_t{128} << 10;
constexpr std::int64_t kRingBudgetBytes = std::int64_t{128} << 20;
constexpr std::int64_t kGpuMultiple = 2;  ///< of the two in GPU memory
constexpr std::int64_t kAlignment = 64;

/// Defaults of calls of one node and of several (docs/performance-gpus.md, docs/nodes.md).
constexpr int kSendSms = 8;
constexpr int kSumSms = 9;
constexpr int kLeastSumSms = 12;
constexpr int kMostSumSms = 16;
constexpr int kNodeSms = 24;

std::int64_t scale_bytes(std::int64_t hidden) { return (hidden + kScaleGroup - 1) / kScaleGroup * kScaleBytes; }

Status refuse(const std::string& message) { return {ErrorCode::kInvalidArgument, message}; }

/// Share of the draws of `num_drawn` of `num_all` that miss `num_missed` given ones: C(all - missed, drawn) / C(all,
/// drawn).
double miss_probability(double num_all, double num_missed, int num_drawn) {
  double share = 1.0;
  for (int i = 0; i < num_drawn; ++i) share *= std::max(0.0, num_all - num_missed - i) / (num_all - i);
  return share;
}

Status check_topology(const PlanShape& shape) {
  if (shape.num_ranks() < 2) {
    return refuse("--nodes 1 --ranks-per-node 1 is one rank, which exchanges with none; give 2 ranks or more");
  }
  if (shape.num_ranks() > kMaxPlanRanks) {
    return refuse(
        fmt::format("--nodes {} times --ranks-per-node {} are {} ranks; expected at most {}: lower one of the "
                    "two",
                    shape.num_nodes, shape.ranks_per_node, shape.num_ranks(), kMaxPlanRanks));
  }
  if (shape.node_limit > shape.num_nodes) {
    return refuse(
        fmt::format("--node-limit {} of --nodes {}: give at most the number of nodes, or leave the option out",
                    shape.node_limit, shape.num_nodes));
  }
  if (shape.plain && shape.num_nodes > 1) {
    return refuse("--memory plain with several nodes is not modelled; leave the option out");
  }
  return {};
}

}  // namespace

Status check(const PlanShape& shape) {
  if (Status status = check_topology(shape); !status) return status;
  if (shape.num_experts % shape.num_ranks() != 0) {
    const std::int64_t next = (shape.num_experts / shape.num_ranks() + 1) * shape.num_ranks();
    return refuse(
        fmt::format("--experts {} over {} ranks: expected a multiple of the ranks, such as {}; with experts "
                    "that have several homes give the number of homes",
                    shape.num_experts, shape.num_ranks(), next));
  }
  if (shape.num_topk > shape.num_experts) {
    return refuse(fmt::format("--topk {} of --experts {}: a token picks distinct experts, so give at most {}",
                              shape.num_topk, shape.num_experts, shape.num_experts));
  }
  const std::int64_t in_reach = shape.num_experts / shape.num_nodes * shape.node_limit;
  if (shape.node_limit > 0 && shape.num_topk > in_reach) {
    return refuse(fmt::format("--topk {} with --node-limit {}: that many nodes have {} experts; raise the limit",
                              shape.num_topk, shape.node_limit, in_reach));
  }
  if (shape.fp8_sums && shape.order != CombineOrder::kRankSums) {
    return refuse("--combine-wire fp8 with --order exact: sums of ranks alone travel as FP8; add --order rank_sums");
  }
  if (shape.hidden % kRowGranuleBytes != 0) {
    return refuse(fmt::format("--hidden {}: rows are multiples of {} bytes in bf16 and fp8; give a multiple of {}",
                              shape.hidden, kRowGranuleBytes, kRowGranuleBytes));
  }
  if (shape.num_sms > 0 && shape.num_nodes > 1 && shape.num_sms < least_sms(shape.num_nodes)) {
    return refuse(fmt::format("--sms {} over {} nodes: expected at least {}, two for each other node and one",
                              shape.num_sms, shape.num_nodes, least_sms(shape.num_nodes)));
  }
  return {};
}

RowBytes row_bytes(const PlanShape& shape) {
  const bool fp8 = shape.dtype == PlanDType::kFp8;
  RowBytes bytes;
  bytes.combine = shape.hidden * kBfloat16Bytes;
  bytes.dispatch_payload = fp8 ? shape.hidden : bytes.combine;
  const std::int64_t record = dispatch_record_bytes(fp8 ? scale_bytes(shape.hidden) : 0, shape.num_topk, shape.weights);
  bytes.dispatch = bytes.dispatch_payload + record;
  return bytes;
}

RowBytes latency_row_bytes(const PlanShape& shape) {
  PlanShape without = shape;
  without.weights = false;
  RowBytes bytes = row_bytes(without);
  if (shape.fp8_sums) bytes.combine = shape.hidden + scale_bytes(shape.hidden);
  return bytes;
}

FarTraffic far_traffic_of(const PlanShape& shape) {
  // As cuda/latency/far_message.hpp has them.
  constexpr double kHeaderBytes = 256;
  constexpr double kWordBytes = 16;
  constexpr double kPayloads = 3;  // of a word
  constexpr double kRecordPayloads = 2;
  constexpr std::int64_t kWordTokens = 32;
  constexpr std::int64_t kMostWordRow = 16384;
  constexpr std::int64_t kMostLongerSums = std::int64_t{1} << 20;
  constexpr int kSmallRanks = 8;
  const int num_far = shape.num_ranks() - shape.ranks_per_node;
  const RowBytes row = latency_row_bytes(shape);
  const auto tokens = static_cast<double>(shape.latency_tokens);
  const double rows = tokens * reach_probability(shape, shape.num_ranks()) * shape.load.rows_received;
  const double entries = tokens * shape.num_topk / shape.num_ranks() * shape.load.entries;
  const bool sums = shape.order == CombineOrder::kRankSums;
  const bool in_gpu = shape.rings == PlanRings::kGpu;
  const bool few_ranks = shape.num_ranks() <= kSmallRanks;
  const bool few_tokens = shape.latency_tokens <= kWordTokens;
  // Words of whole lines, half as many bytes more, or of whole steps of FP8 sums.
  const auto words_bytes = [](std::int64_t row_bytes) {
    constexpr std::int64_t kLineBytes = 512;
    const std::int64_t num_lines = (row_bytes + kLineBytes - 1) / kLineBytes;
    return (num_lines + (num_lines + 1) / 2) * kLineBytes;
  };
  constexpr std::int64_t kFp8StepChannels = 1024;
  constexpr std::int64_t kFp8StepWordsBytes = 1536;
  const std::int64_t sum_words_bytes =
      shape.fp8_sums ? (shape.hidden + kFp8StepChannels - 1) / kFp8StepChannels * kFp8StepWordsBytes
                     : words_bytes(row.combine);
  const std::int64_t longer_bytes = shape.latency_tokens * num_far * (sum_words_bytes - row.combine);
  const bool row_fits = shape.hidden * kBfloat16Bytes <= kMostWordRow;
  FarTraffic far;
  far.num_messages = num_far;
  far.dispatch.words = in_gpu && few_tokens && row.dispatch <= kMostWordRow;
  far.dispatch.small = far.dispatch.words && few_ranks;
  const std::int64_t most_sums = shape.fp8_sums ? 4 * kWordTokens : 2 * kWordTokens;
  far.combine.small = in_gpu && sums && few_ranks && row_fits && shape.latency_tokens <= most_sums &&
                      (few_tokens || longer_bytes <= kMostLongerSums);
  far.combine.words = far.combine.small || (in_gpu && few_tokens && row_fits && !shape.fp8_sums);
  const std::int64_t sent_row = far.dispatch.words ? words_bytes(row.dispatch) : row.dispatch;
  const std::int64_t returned_row = far.combine.words ? sum_words_bytes : row.combine;
  const double counts = kWordBytes * std::ceil(static_cast<double>(shape.num_experts) / kPayloads);
  const double record = kWordBytes * std::ceil((kRecordPayloads + 2 * shape.num_topk) / kPayloads);
  far.dispatch.bytes = num_far * (kHeaderBytes + counts + tokens * record + rows * static_cast<double>(sent_row));
  far.combine.bytes = num_far * (kHeaderBytes + (sums ? rows : entries) * static_cast<double>(returned_row));
  return far;
}

double reach_probability(const PlanShape& shape, int num_parts) {
  const auto experts = static_cast<double>(shape.num_experts);
  const double of_part = experts / num_parts;
  if (shape.node_limit == 0) return 1.0 - miss_probability(experts, of_part, shape.num_topk);
  const double node_share = static_cast<double>(shape.node_limit) / shape.num_nodes;
  return node_share * (1.0 - miss_probability(experts * node_share, of_part, shape.num_topk));
}

Traffic traffic_of(const PlanShape& shape, std::int64_t num_tokens, std::int64_t item_bytes) {
  const auto tokens = static_cast<double>(num_tokens);
  const double in_node = reach_probability(shape, shape.num_nodes);
  Traffic traffic;
  const double rows = tokens * shape.num_ranks() * reach_probability(shape, shape.num_ranks());
  traffic.rows_received = rows * shape.load.rows_received;
  traffic.rows_over_links = rows * (shape.ranks_per_node - 1) / shape.ranks_per_node * shape.load.rows_over_links;
  traffic.entries = tokens * shape.num_topk * shape.load.entries;
  if (shape.num_nodes == 1) return traffic;
  const int num_peers = shape.num_nodes - 1;
  traffic.items_sent = tokens * num_peers * in_node * shape.load.items_sent;
  traffic.items_held = tokens * shape.num_nodes * in_node * shape.load.items_held;
  const double sent_bytes = traffic.items_sent * static_cast<double>(item_bytes);
  const double most = static_cast<double>(ring_chunk_bytes(shape.num_nodes, shape.rings));
  const double wanted = std::max(static_cast<double>(kShortChunkBytes), sent_bytes / num_peers / kRingChunks);
  traffic.chunk_bytes = std::min(wanted, most);
  traffic.num_chunks = num_peers * std::ceil(sent_bytes / num_peers / traffic.chunk_bytes);
  return traffic;
}

std::int64_t ring_chunk_bytes(int num_nodes, PlanRings rings) {
  if (num_nodes < 2) return 0;
  const std::int64_t multiple = rings == PlanRings::kGpu ? kGpuMultiple : 1;
  const std::int64_t budget = multiple * kRingBudgetBytes;
  const std::int64_t share = budget / (2 * (num_nodes - 1) * kRingChunks) / kAlignment * kAlignment;
  return std::clamp(share, kLeastChunkBytes, multiple * kMostChunkBytes);
}

std::int64_t ring_bytes(int num_nodes, PlanRings rings) {
  return 2 * (num_nodes - 1) * kRingChunks * ring_chunk_bytes(num_nodes, rings);
}

int least_sms(int num_nodes) { return num_nodes < 2 ? 1 : 2 * (num_nodes - 1) + 1; }

int dispatch_sms(const PlanShape& shape) {
  if (shape.num_sms > 0) return shape.num_sms;
  if (shape.num_nodes > 1) return std::max(kNodeSms, least_sms(shape.num_nodes));
  const int num_others = shape.ranks_per_node - 1;
  return kSendSms + (kSendSms + num_others - 1) / num_others;
}

int combine_sms(const PlanShape& shape) {
  if (shape.num_sms > 0 || shape.num_nodes > 1) return dispatch_sms(shape);
  return std::clamp(kSumSms * shape.ranks_per_node / (shape.ranks_per_node - 1), kLeastSumSms, kMostSumSms);
}

PlanMemory memory_of(const PlanShape& shape) {
  const RowBytes rows = row_bytes(shape);
  const auto payload = static_cast<double>(rows.dispatch_payload);
  const auto record = static_cast<double>(rows.dispatch - rows.dispatch_payload);
  const auto combine = static_cast<double>(rows.combine);
  const auto tokens = static_cast<double>(shape.num_tokens);
  const auto experts = static_cast<double>(shape.num_experts);
  const double topk = shape.num_topk;
  const Traffic traffic = traffic_of(shape, shape.num_tokens, rows.dispatch);
  const double received = traffic.rows_received;
  PlanMemory memory;
  memory.tensors = tokens * payload + received * (payload + combine);
  if (shape.plain) {
    memory.tensors = 0;
    memory.staging = received * std::max(payload, combine);
  }
  constexpr double kControlBytes = 69 << 10;
  if (shape.num_nodes == 1) {
    constexpr double kRouteBlockTokens = 64;
    constexpr double kMostRouteBlocks = 128;
    const double blocks = std::clamp(std::ceil(tokens / kRouteBlockTokens), 1.0, kMostRouteBlocks);
    memory.staging += received * record;
    memory.tables = kControlBytes * shape.num_ranks() + (shape.weights ? 36.0 : 32.0) * tokens * topk +
                    4 * tokens * shape.num_ranks() + 8 * received + 4 * blocks * (shape.num_ranks() + experts);
    return memory;
  }
  // Sums for every token of the rail that has an expert here, and those that may come back.
  const double sums_back = tokens * std::min<double>(topk, shape.num_nodes - 1);
  const double weights_back = shape.weights ? 4 * topk : 0;
  const double staged_in = tokens * record + traffic.items_held * (payload + record);
  const double staged_back = (traffic.items_held + sums_back) * (combine + weights_back);
  memory.staging = std::max(staged_in, staged_back);
  memory.tables = kControlBytes * shape.ranks_per_node + (36.0 + 12.0) * tokens * topk + 16 * received;
  (shape.rings == PlanRings::kHost ? memory.host_rings : memory.gpu_rings) =
      static_cast<double>(ring_bytes(shape.num_nodes, shape.rings));
  return memory;
}

}  // namespace ferry::tools
