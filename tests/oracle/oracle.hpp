#ifndef FERRY_ORACLE_ORACLE_HPP
#define FERRY_ORACLE_ORACLE_HPP

/// The oracle computes the results of route, dispatch and combine for all ranks at once, in one thread, in plain loops.
/// latency_dispatch is a route of layout kSlab and a dispatch, so only its source ranges have a function here. The
/// oracle shares no code with the library, only the option structs and dtypes of the public headers, so that a backend
/// and the oracle do not share mistakes. Speed does not matter; the loops follow the specification as directly as
/// possible.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/latency.hpp"
#include "ferry/quantization.hpp"
#include "ferry/routing.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry::oracle {

using Bytes = std::vector<std::byte>;

/// Arguments of one rank's route.
struct RankTokens {
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> topk_idx;  ///< [T, K]
  std::vector<float> topk_weights;     ///< [T, K], empty if none are sent
};

/// Input of route on all ranks. `options.max_recv_rows` is not read.
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

/// Values of the accessors of `Routing` on one rank.
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

/// World after its tokens have picked homes: its experts are the placement's physical experts, and its placement is
/// empty. All functions below take such a world. A world without a placement is returned unchanged. `masked`: ranks
/// masked by all others before a call of latency mode; homes on them are picked only for experts without another home.
/// Entries of experts without any home become -1 if the placement allows it.
World physical_world(const World& world, const std::vector<int>& masked = {});

/// Token count of each expert on `rank`: a token that names an expert several times counts once.
std::vector<std::int64_t> count_rows(const World& world, std::size_t rank);

/// Rank that owns each expert, [E].
std::vector<std::int32_t> expert_owners(const World& world);

/// World as ranks that mask `masked` see it in latency mode: masked ranks have no tokens, and entries of their experts
/// are -1.
World without_ranks(const World& world, const std::vector<int>& masked);

/// @errors kInvalidArgument, kCapacity: the code that every rank must report
Result<std::vector<RankRouting>> route(const World& world);

/// Rows of one local expert that come from one source rank; `first` is counted from the start of the expert's group.
struct SourceRange {
  std::int32_t num_rows = 0;
  std::int32_t first = 0;
  friend bool operator==(const SourceRange&, const SourceRange&) = default;
};

/// Expected `Routing::source_ranges` on the rank of `routing`, [L, R]. An empty range has the `first` that its rows
/// would have.
std::vector<SourceRange> source_ranges(const World& world, const RankRouting& routing);

/// Inputs of dispatch, one element per rank: rows and scale rows packed without gaps.
struct DispatchInputs {
  std::size_t row_bytes = 0;
  std::size_t scale_row_bytes = 0;               ///< 0: no scales are sent
  std::vector<Bytes> x;                          ///< [T, row_bytes]
  std::vector<Bytes> scales;                     ///< [T, scale_row_bytes]
  std::vector<std::vector<float>> topk_weights;  ///< [T, K] in place of route's; empty: those of route
  /// Not kNone: x is bf16, `scales` are not read; `scale_dtype` is the dtype of the computed scales.
  Quantization quantize = Quantization::kNone;
  DType scale_dtype = DType::kFloat32;
};

/// Rows of bf16 quantised as dispatch does, packed without gaps.
struct QuantizedRows {
  std::size_t scale_row_bytes = 0;
  Bytes x;
  Bytes scales;
};

QuantizedRows quantize(const Bytes& x, std::size_t hidden, Quantization mode, DType scale_dtype);

/// Values of rows of `dtype` after they have travelled as WireFormat::kFp8: q * scale in f32, [rows, H]. H is a
/// multiple of 128.
std::vector<float> after_fp8(const Bytes& x, DType dtype);

/// Outputs of dispatch on one rank. Rows without a token have only topk_idx and source defined (-1 and -1, -1); the
/// other outputs are zero here, as `zero_padding` requires.
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
  CombineOrder order = CombineOrder::kExact;  ///< not kExact: weighted, without biases and returned weights
  /// kFp8: with kExact on one node; with kRankSums also on several, and the dtype is bf16.
  WireFormat wire_format = WireFormat::kAsGiven;
  std::vector<Bytes> x;                          ///< [rows, H]
  std::vector<std::vector<float>> weights;       ///< shaped as RankReceived::topk_weights; empty: none are returned
  std::array<std::vector<Bytes>, 2> bias;        ///< [T, H]; empty: no such bias
  std::vector<std::vector<float>> topk_weights;  ///< [T, K] in place of route's; empty: those of route
};

/// Outputs of combine on one rank.
struct RankCombined {
  Bytes x;                     ///< [T, H]
  std::vector<float> weights;  ///< [T, K]; empty if no weights were given
};

std::vector<RankCombined> combine(const World& world, const std::vector<RankRouting>& routings,
                                  const CombineInputs& inputs);

}  // namespace ferry::oracle

#endif  // FERRY_ORACLE_ORACLE_HPP
