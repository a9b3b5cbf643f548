#ifndef FERRY_TOOLS_COMMON_ROUTING_SOURCE_HPP
#define FERRY_TOOLS_COMMON_ROUTING_SOURCE_HPP

/// Expert ids without a router: from a recorded trace or a distribution.

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/status.hpp"

namespace ferry::tools {

/// Router decisions of consecutive tokens.
struct RoutingTable {
  std::int64_t num_tokens = 0;
  int num_topk = 0;
  std::int64_t num_experts = 0;
  std::vector<std::int64_t> topk_idx;  ///< [num_tokens, num_topk], -1 = no expert
  std::vector<float> topk_weights;     ///< [num_tokens, num_topk]
};

/// A recorded router: JSON lines. The first may be {"type": "meta", "model": …, "num_experts": E, "topk": K}; every
/// other one is {"topk_ids": [K ids], "topk_weights": [K numbers]}. Without a meta line E is the largest id + 1.
struct Trace {
  RoutingTable table;
  std::string model;  ///< from the meta line; empty without one
};

/// `path`: the file, or a folder with one file *.jsonl.
/// @errors kInvalidArgument naming the file, the line and the fault; kSystem: cannot be read
Result<Trace> read_trace(const std::string& path);

/// Distribution of the experts of generated tokens.
enum class RoutingKind {
  kRandom = 0,  ///< K distinct experts, all equally likely
  kZipf = 1,    ///< K distinct experts; the r-th most popular is chosen with weight 1/r, popularity is a seeded order
  kOneHot = 2,  ///< every token goes to experts 0 … K-1
};

struct RoutingShape {
  std::int64_t num_tokens = 0;
  int num_topk = 0;
  std::int64_t num_experts = 0;
};

/// Ids and weights of one rank. Weights are powers of two, so that sums of weighted equal rows are exact.
RoutingTable make_routing(RoutingKind kind, const RoutingShape& shape, std::uint64_t seed, int rank);

/// Tokens [first, first + num_tokens) of a table, wrapping around at its end.
RoutingTable slice_routing(const RoutingTable& table, std::int64_t first, std::int64_t num_tokens);

/// Owner in the contiguous placement: rank r owns experts [r*E/R, (r+1)*E/R), rounded down.
std::int64_t owner_of(std::int64_t expert, std::int64_t num_experts, std::int64_t num_ranks);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_COMMON_ROUTING_SOURCE_HPP
