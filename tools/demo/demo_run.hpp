#ifndef FERRY_TOOLS_DEMO_DEMO_RUN_HPP
#define FERRY_TOOLS_DEMO_DEMO_RUN_HPP

/// One run of the demonstration: what every process of it knows, and what each rank hands back.

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

/// How the payload travels to the experts. It always returns as bf16.
enum class PayloadType { kBfloat16 = 0, kFp8 = 1 };

enum class DemoMode {
  kThroughput = 0,  ///< all tokens at once: route, dispatch, combine
  kLatency = 1,     ///< a few tokens per step, by the calls of latency mode
};

enum class ExpertsMode {
  kFixed = 0,    ///< every expert stays where it is
  kBalance = 1,  ///< after half of the tokens experts move to where their load says
};

/// Settled before the ranks start, the same in all of them.
struct DemoPlan {
  DemoMode mode = DemoMode::kThroughput;
  ExpertsMode experts = ExpertsMode::kFixed;
  std::int64_t num_places = 0;  ///< for an expert's weights, on all ranks; the experts' number unless they move
  int num_steps = 1;            ///< that the tokens of a rank are spread over, one after another
  int num_ranks = 1;
  int num_nodes = 1;
  std::string backend;
  std::string transport;
  std::string net_devices;
  std::string ring_memory = "auto";
  PayloadType payload = PayloadType::kBfloat16;
  std::uint64_t seed = 0;
  std::int64_t timeout_ns = 0;
  std::uint64_t arena_bytes = 0;
  std::int64_t num_tokens = 0;  ///< of all ranks
  LayerShape shape;
  Text text;                        ///< at least num_tokens bytes
  std::optional<Trace> trace;       ///< takes the router's place
  std::int64_t spoiled_token = -1;  ///< whose result is spoiled on purpose, -1 for none

  std::int64_t first_token(int rank) const { return num_tokens * rank / num_ranks; }
  std::int64_t num_tokens_of(int rank) const { return first_token(rank + 1) - first_token(rank); }
  std::int64_t max_tokens_per_rank() const { return (num_tokens + num_ranks - 1) / num_ranks; }
  bool balances() const { return experts == ExpertsMode::kBalance; }
  /// Of experts, by which the router chooses; a trace knows none.
  int num_groups() const { return trace ? 1 : shape.gating.num_groups; }
  bool latency() const { return mode == DemoMode::kLatency; }
  /// First of a rank's tokens, counted from its own first one, that belongs to a step.
  std::int64_t first_of_step(int rank, int step) const { return num_tokens_of(rank) * step / num_steps; }
  std::int64_t max_tokens_per_step() const { return (max_tokens_per_rank() + num_steps - 1) / num_steps; }
  int ranks_per_node() const { return num_ranks / num_nodes; }
  std::int64_t row_bytes() const;  ///< of one dispatched token, scales included
  /// Of one row between nodes, with its metadata.
  std::int64_t dispatch_wire_row_bytes() const;
  std::int64_t combine_wire_row_bytes() const;
};

enum class Phase { kGate = 0, kRoute, kDispatch, kExperts, kCombine };
inline constexpr std::size_t kNumPhases = 5;
inline constexpr std::array<std::string_view, kNumPhases> kPhaseNames = {"gate", "route", "dispatch", "experts",
                                                                         "combine"};
/// Those that a run has: latency mode routes with its dispatch.
inline bool has_phase(const DemoPlan& plan, std::size_t phase_idx) {
  return !plan.latency() || phase_idx != static_cast<std::size_t>(Phase::kRoute);
}

/// Halves of the tokens, if experts move between them.
inline constexpr std::size_t kNumHalves = 2;

/// How experts moved.
struct MoveFigures {
  std::int64_t balance_ns;  ///< to compute the placement
  std::int64_t move_ns;     ///< to carry the weights
  std::int64_t num_moved;   ///< between ranks, of all ranks
  std::int64_t num_between_nodes;
};

/// One half of the tokens.
struct HalfFigures {
  std::int64_t num_received_rows;
  std::int64_t wire_bytes;            ///< that dispatch and combine gave to the network
  std::int64_t formula_bytes;         ///< as follows from the ids
  std::int64_t stayed_formula_bytes;  ///< as it would, had no expert moved
};

/// What a rank measured. Rows are (token, expert) pairs: a token goes once to each expert it picked.
struct RankFigures {
  std::int64_t num_tokens;
  std::int64_t num_sent_rows;      ///< own included
  std::int64_t num_received_rows;  ///< own included
  std::int64_t num_own_rows;       ///< that stayed on the rank
  std::int64_t num_experts;        ///< that live here
  std::array<std::int64_t, kNumPhases> phase_ns;
  std::array<WireFigures, kNumPhases> wire;  ///< all zero with one node
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

/// The same, to be filled.
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

/// The trace in the order in which ranks hold it, if experts move: all ranks work on its first half, then on its
/// second.
RoutingTable order_by_half(const DemoPlan& plan, const RoutingTable& table);

/// Embedding of tokens [first, first + count) of the run.
std::vector<std::uint16_t> embed_run_tokens(const DemoPlan& plan, std::int64_t first, std::int64_t count);

/// The router's choice for tokens [first, first + count), whose embedding is `x`: computed, or taken from the trace.
Result<Choice> choose_run_experts(const DemoPlan& plan, std::span<const std::uint16_t> x, std::int64_t first,
                                  std::int64_t count);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_DEMO_RUN_HPP
