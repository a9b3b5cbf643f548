#ifndef FERRY_TOOLS_PLANNING_SHAPE_HPP
#define FERRY_TOOLS_PLANNING_SHAPE_HPP

/// Calls to predict, and the rows and bytes that follow from them: exact expectations for experts at random.

#include <cstdint>

#include "ferry/latency.hpp"
#include "ferry/status.hpp"

namespace ferry::tools {

enum class PlanDType { kBfloat16 = 0, kFp8 = 1 };
enum class PlanRings { kHost = 0, kGpu = 1 };

/// Limits of the command: EP2048, as nodes of 8.
inline constexpr int kMaxPlanRanks = 2048;
/// Limits of groups of GPU ranks (docs/support.md). Larger shapes are computed, with a warning.
inline constexpr int kMaxGroupNodes = 32;
inline constexpr int kMaxNodeRanks = 128;

/// The busiest rank relative to the mean of experts at random (plan/load.hpp).
struct PlanLoad {
  double items_sent = 1;  ///< to other nodes, or received from them
  double items_held = 1;
  double rows_received = 1;
  double rows_over_links = 1;  ///< taken, or given
  double entries = 1;
};

struct PlanShape {
  std::int64_t num_tokens = 4096;             ///< T, per rank
  std::int64_t latency_tokens = 128;          ///< T of calls of latency mode
  std::int64_t hidden = 7168;                 ///< H
  int num_topk = 8;                           ///< K
  std::int64_t num_experts = 256;             ///< E
  PlanDType dtype = PlanDType::kBfloat16;     ///< of dispatched rows; combine returns bf16
  bool weights = true;                        ///< ids and weights are dispatched with the rows
  bool plain = false;                         ///< tensors are not from Group::allocate; one node
  CombineOrder order = CombineOrder::kExact;  ///< of latency mode
  bool fp8_sums = false;                      ///< its sums of ranks travel as FP8
  int num_nodes = 1;
  int ranks_per_node = 8;
  int node_limit = 0;  ///< experts of a token are in at most this many nodes; 0: in any
  int num_sms = 0;     ///< of each call; 0: as many as Ferry takes by itself
  PlanRings rings = PlanRings::kHost;

  PlanLoad load;

  int num_ranks() const { return num_nodes * ranks_per_node; }
};

/// @errors kInvalidArgument: names options of the command
Status check(const PlanShape& shape);

/// Bytes of one row: payload and, where it crosses a link, its scales, ids and weights.
struct RowBytes {
  std::int64_t dispatch_payload = 0;
  std::int64_t dispatch = 0;  ///< with the record that travels with it
  std::int64_t combine = 0;
};
RowBytes row_bytes(const PlanShape& shape);
RowBytes latency_row_bytes(const PlanShape& shape);

/// Messages of a rank to the ranks of other nodes in a call of latency mode, one each (docs/inside-latency.md).
struct FarTraffic {
  struct Call {
    double bytes = 0;
    bool words = false;  ///< rows are words, which need no order of a card's writes (cuda/latency/far_message.hpp)
    bool small = false;  ///< has kernels of its own for few tokens
  };
  int num_messages = 0;
  Call dispatch;
  Call combine;
};
FarTraffic far_traffic_of(const PlanShape& shape);

/// Probability that a token has an expert among `num_experts / num_parts` given ones: a node's, or a rank's. Experts of
/// a token are distinct; with a node limit its nodes are drawn first, then experts of those.
double reach_probability(const PlanShape& shape, int num_parts);

/// Expected numbers of one rank in one call of `num_tokens` a rank.
struct Traffic {
  double items_sent = 0;       ///< its tokens times other nodes that they go to
  double items_held = 0;       ///< tokens of its rail with an expert in its node, its own included; 0 on one node
  double rows_received = 0;    ///< rows of dispatch, those of its own tokens included
  double rows_over_links = 0;  ///< of these, from memory of other ranks of its node
  double entries = 0;          ///< (token, expert) of its own experts
  double chunk_bytes = 0;      ///< of a call's exchange; 0 on one node
  double num_chunks = 0;       ///< that it sends, and receives
};
/// `item_bytes`: of an item that crosses the network.
Traffic traffic_of(const PlanShape& shape, std::int64_t num_tokens, std::int64_t item_bytes);

/// Bytes of a chunk of the rings of GPU ranks, and of all rings of a rank (docs/nodes.md).
std::int64_t ring_chunk_bytes(int num_nodes, PlanRings rings = PlanRings::kHost);
std::int64_t ring_bytes(int num_nodes, PlanRings rings = PlanRings::kHost);

/// Multiprocessors of a call.
int dispatch_sms(const PlanShape& shape);
int combine_sms(const PlanShape& shape);
/// Least multiprocessors that a call over this many nodes needs.
int least_sms(int num_nodes);

/// Expected memory of a rank's GPU, or of its host for rings there. Staging for several nodes is a bound.
struct PlanMemory {
  double tensors = 0;  ///< x of dispatch, its output, combine's input
  double staging = 0;  ///< one batch
  double tables = 0;   ///< of one Routing, and control words
  double gpu_rings = 0;
  double host_rings = 0;

  double gpu_bytes() const { return tensors + staging + tables + gpu_rings; }
};
PlanMemory memory_of(const PlanShape& shape);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_PLANNING_SHAPE_HPP
