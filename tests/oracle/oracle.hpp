#ifndef FERRY_ORACLE_ORACLE_HPP
#define FERRY_ORACLE_ORACLE_HPP

/// The oracle: what route, dispatch and combine must produce, for all ranks at once, in one thread, in plain loops.
/// latency_dispatch is a route of layout kSlab and a dispatch, so only its source ranges are its own.
/// It shares no code with the library, only the option structs and dtypes of the public headers, so that a backend and
/// the oracle do not share mistakes. Speed does not matter; the loops follow the specification as directly as possible.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/latency.hpp"
#include "ferry/quantization.hpp"
#include "ferry/routing.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::oracle {

using Bytes = std::vector<std::byte>;

/// What one rank passes to route.
struct RankTokens {
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> topk_idx;  ///< [T, K]
  std::vector<float> topk_weights;     ///< [T, K], empty if none are sent
};

/// Everything that route sees, on all ranks. `options.max_recv_rows` is not read.
struct World {
  int num_ranks = 1;
  int ranks_per_node = 1;
  int num_topk = 1;
  RouteOptions options;
  std::vector<std::int64_t> max_recv_rows;  ///< per rank, 0 = known on the host; empty = 0 on all ranks
  std::vector<RankTokens> ranks;            ///< [R]
};

struct Source {
  std::int32_t rank = -1;
  std::int32_t token = -1;
  bool holds_token() const { return rank >= 0; }
  friend bool operator==(const Source&, const Source&) = default;
};

/// What `Routing`'s accessors must return on one rank.
struct RankRouting {
  std::int64_t num_recv_rows = 0;
  std::int64_t num_used_rows = 0;
  std::vector<std::int32_t> num_rows_per_local_expert;  ///< [L]
  std::vector<std::int64_t> expert_row_offsets;         ///< [L + 1], empty for kTokens
  std::vector<std::int64_t> num_rows_from_rank;         ///< [R]
  std::vector<std::int64_t> num_rows_to_rank;           ///< [R]
  std::vector<std::int32_t> local_expert_ids;           ///< [L]
  std::vector<std::int32_t> slots;                      ///< [T, K]
  std::vector<Source> source;                           ///< [num_used_rows]
};

/// The world after its tokens have picked homes: its experts are the physical ones of the placement, and there is no
/// placement any more. That is the world that all functions below take. A world without a placement is returned as is.
/// `masked`: by all ranks, before a call of latency mode; homes there are picked only of experts that have no other.
World physical_world(const World& world, const std::vector<int>& masked = {});

/// By expert: a rank's tokens that name it, each once.
std::vector<std::int64_t> count_rows(const World& world, std::size_t rank);

/// Rank that owns each expert, [E].
std::vector<std::int32_t> expert_owners(const World& world);

/// What is left of the world for ranks that mask these in latency mode: they have no tokens, and entries whose expert
/// is theirs have none.
World without_ranks(const World& world, const std::vector<int>& masked);

/// @errors kInvalidArgument, kCapacity: the code that every rank must report
Result<std::vector<RankRouting>> route(const World& world);

/// Rows of one local expert that come from one source rank; `first` is counted from the start of the expert's group.
struct SourceRange {
  std::int32_t num_rows = 0;
  std::int32_t first = 0;
  friend bool operator==(const SourceRange&, const SourceRange&) = default;
};

/// What `Routing::source_ranges` must show on the rank of `routing`, [L, R]. Of none, `first` is where they would be.
std::vector<SourceRange> source_ranges(const World& world, const RankRouting& routing);

/// Inputs of dispatch, one element per rank: rows and scale rows packed without gaps.
struct DispatchInputs {
  std::size_t row_bytes = 0;
  std::size_t scale_row_bytes = 0;               ///< 0: no scales are sent
  std::vector<Bytes> x;                          ///< [T, row_bytes]
  std::vector<Bytes> scales;                     ///< [T, scale_row_bytes]
  std::vector<std::vector<float>> topk_weights;  ///< [T, K] in place of route's; empty: those of route
  /// Not kNone: x is bf16, `scales` are not read; `scale_dtype` is that of the scales that come of it.
  Quantization quantize = Quantization::kNone;
  DType scale_dtype = DType::kFloat32;
};

/// Rows of bf16 as dispatch quantises them, packed without gaps.
struct QuantizedRows {
  std::size_t scale_row_bytes = 0;
  Bytes x;
  Bytes scales;
};

QuantizedRows quantize(const Bytes& x, std::size_t hidden, Quantization mode, DType scale_dtype);

/// Outputs of dispatch on one rank. Of rows without a token only topk_idx and source are defined (-1 and -1, -1); the
/// other outputs are zero here, as `zero_padding` must leave them.
struct RankReceived {
  std::vector<bool> holds_token;       ///< [rows]
  Bytes x;                             ///< [rows, row_bytes]
  Bytes scales;                        ///< [rows, scale_row_bytes]
  std::vector<std::int64_t> topk_idx;  ///< kTokens: [rows, K]
  std::vector<float> topk_weights;     ///< kTokens: [rows, K], otherwise [rows]; zeros when no weights are sent
  std::vector<Source> source;          ///< [rows]
};

std::vector<RankReceived> dispatch(const World& world, const std::vector<RankRouting>& routings,
                                   const DispatchInputs& inputs);

/// Inputs of combine, one element per rank.
struct CombineInputs {
  DType dtype = DType::kBfloat16;  ///< kBfloat16 or kFloat32
  std::int64_t hidden = 0;
  bool weighted = false;
  CombineOrder order = CombineOrder::kExact;     ///< not kExact: weighted, without biases and returned weights
  std::vector<Bytes> x;                          ///< [rows, H]
  std::vector<std::vector<float>> weights;       ///< shaped as RankReceived::topk_weights; empty: none are returned
  std::array<std::vector<Bytes>, 2> bias;        ///< [T, H]; empty: no such bias
  std::vector<std::vector<float>> topk_weights;  ///< [T, K] in place of route's; empty: those of route
};

/// Outputs of combine on one rank.
struct RankCombined {
  Bytes x;                     ///< [T, H]
  std::vector<float> weights;  ///< [T, K]; empty where no weights were given
};

std::vector<RankCombined> combine(const World& world, const std::vector<RankRouting>& routings,
                                  const CombineInputs& inputs);

}  // namespace ferry::oracle

#endif  // FERRY_ORACLE_ORACLE_HPP
