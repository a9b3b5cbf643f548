#ifndef FERRY_TOOLS_DEMO_DEMO_RUN_HPP
#define FERRY_TOOLS_DEMO_DEMO_RUN_HPP

/// One run of the demonstration: the plan that every process has, and the results of each rank.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "common/routing_source.hpp"
#include "demo/model_presets.hpp"
#include "demo/moe_layer.hpp"
#include "demo/text_tokens.hpp"
#include "report/wire.hpp"

namespace ferry::tools {

/// Type of the payload on the way to the experts. It always returns as bf16.
enum class PayloadType { kBfloat16 = 0, kFp8 = 1 };

enum class DemoMode {
  kThroughput = 0,  ///< all tokens at once: route, dispatch, combine
  kLatency = 1,     ///< a few tokens per step, with the calls of latency mode
};

enum class ExpertsMode {
  kFixed = 0,    ///< every expert stays on its rank
  kBalance = 1,  ///< after half of the tokens experts move to even out the load
};

/// Plan, determined before the ranks start and the same in all of them.
struct DemoPlan {
  DemoMode mode = DemoMode::kThroughput;
  ExpertsMode experts = ExpertsMode::kFixed;
  std::int64_t num_places = 0;  ///< places for experts' weights on all ranks; the number of experts unless they move
  int num_steps = 1;            ///< consecutive steps that the tokens of a rank are spread over
  int num_ranks = 1;
  int num_nodes = 1;
  std::string backend;
  std::string transport;
  std::string net_devices;
  std::string ring_memory = "auto";
  bool verify = false;  ///< GroupOptions::verify
  PayloadType payload = PayloadType::kBfloat16;
  std::uint64_t seed = 0;
  std::int64_t timeout_ns = 0;
  std::uint64_t arena_bytes = 0;
  std::int64_t num_tokens = 0;  ///< on all ranks
  LayerShape shape;
  Text text;                        ///< at least num_tokens bytes
  std::optional<Trace> trace;       ///< replaces the router
  std::int64_t spoiled_token = -1;  ///< token whose result is spoiled on purpose, -1 for none

  std::int64_t first_token(int rank) const { return num_tokens * rank / num_ranks; }
  std::int64_t num_tokens_of(int rank) const { return first_token(rank + 1) - first_token(rank); }
  std::int64_t max_tokens_per_rank() const { return (num_tokens + num_ranks - 1) / num_ranks; }
  bool balances() const { return experts == ExpertsMode::kBalance; }
  /// Groups of experts from which the router chooses; a trace has no groups.
  int num_groups() const { return trace ? 1 : shape.gating.num_groups; }
  bool latency() const { return mode == DemoMode::kLatency; }
  /// First token of a step, counted from the rank's own first token.
  std::int64_t first_of_step(int rank, int step) const { return num_tokens_of(rank) * step / num_steps; }
  std::int64_t max_tokens_per_step() const { return (max_tokens_per_rank() + num_steps - 1) / num_steps; }
  int ranks_per_node() const { return num_ranks / num_nodes; }
  std::int64_t row_bytes() const;  ///< size of one dispatched token, scales included
  /// Size of one row between nodes, with its metadata.
  std::int64_t dispatch_wire_row_bytes() const;
  std::int64_t combine_wire_row_bytes() const;
};

enum class Phase { kGate = 0, kRoute, kDispatch, kExperts, kCombine };
inline constexpr std::size_t kNumPhases = 5;
inline constexpr std::array<std::string_view, kNumPhases> kPhaseNames = {"gate", "route", "dispatch", "experts",
                                                                         "combine"};
/// True if a run has the phase: latency mode routes with its dispatch.
inline bool has_phase(const DemoPlan& plan, std::size_t phase_idx) {
  return !plan.latency() || phase_idx != static_cast<std::size_t>(Phase::kRoute);
}

/// Halves of the tokens, if experts move between them.
inline constexpr std::size_t kNumHalves = 2;

/// Figures of the move of experts.
struct MoveFigures {
  std::int64_t balance_ns;  ///< time to compute the placement
  std::int64_t move_ns;     ///< time to move the weights
  std::int64_t num_moved;   ///< experts that changed rank, on all ranks
  std::int64_t num_between_nodes;
};

/// Figures of one half of the tokens.
struct HalfFigures {
  std::int64_t num_received_rows;
  std::int64_t wire_bytes;            ///< that dispatch and combine passed to the network
  std::int64_t formula_bytes;         ///< expected from the ids
  std::int64_t stayed_formula_bytes;  ///< expected if no expert had moved
};

/// Measurements of a rank. Rows are (token, expert) pairs: a token is sent once to each expert that it picked.
struct RankFigures {
  std::int64_t num_tokens;
  std::int64_t num_sent_rows;      ///< including rows to itself
  std::int64_t num_received_rows;  ///< including rows from itself
  std::int64_t num_own_rows;       ///< rows that stayed on the rank
  std::int64_t num_experts;        ///< experts on this rank
  std::array<std::int64_t, kNumPhases> phase_ns;
  std::array<WireFigures, kNumPhases> wire;  ///< all zero on one node
  WireNames wire_names;
  MoveFigures moves;
  std::array<HalfFigures, kNumHalves> halves;  ///< if experts move
};

/// A rank's result area: [ figures | waits for each rank, R i64 | rows per expert, E i32 | rows sent to each rank,
/// R i32 | expert in each place at the end, P i32 | output, max_tokens_per_rank() x H bf16 ].
class RankArea {
 public:
  static std::size_t size_bytes(const DemoPlan& plan);
  RankArea(const DemoPlan& plan, std::span<const std::byte> bytes) : plan_(plan), bytes_(bytes) {}

  const RankFigures& figures() const { return *reinterpret_cast<const RankFigures*>(bytes_.data()); }
  std::span<const std::int64_t> waits_ns() const;
  std::span<const std::int32_t> expert_rows() const;
  std::span<const std::int32_t> rows_to_rank() const;
  std::span<const std::int32_t> placement() const;
  std::span<const std::uint16_t> output() const;

 private:
  const DemoPlan& plan_;
  std::span<const std::byte> bytes_;
};

/// Writable view of the same area.
class MutableRankArea {
 public:
  MutableRankArea(const DemoPlan& plan, std::span<std::byte> bytes) : plan_(plan), bytes_(bytes) {}
  RankFigures& figures() { return *reinterpret_cast<RankFigures*>(bytes_.data()); }
  std::span<std::int64_t> waits_ns();
  std::span<std::int32_t> expert_rows();
  std::span<std::int32_t> rows_to_rank();
  std::span<std::int32_t> placement();
  std::span<std::uint16_t> output();

 private:
  const DemoPlan& plan_;
  std::span<std::byte> bytes_;
};

/// Trace in the order in which ranks hold it, if experts move: all ranks work on its first half, then on its second.
RoutingTable order_by_half(const DemoPlan& plan, const RoutingTable& table);

/// Embedding of tokens [first, first + count) of the run.
std::vector<std::uint16_t> embed_run_tokens(const DemoPlan& plan, std::int64_t first, std::int64_t count);

/// Router's choice for tokens [first, first + count), whose embedding is `x`: computed, or taken from the trace.
Result<Choice> choose_run_experts(const DemoPlan& plan, std::span<const std::uint16_t> x, std::int64_t first,
                                  std::int64_t count);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_DEMO_RUN_HPP
