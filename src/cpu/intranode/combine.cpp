#include <fmt/format.h>

#include <cstring>
#include <vector>

#include "cpu/context/routing.hpp"
#include "cpu/context/run_call.hpp"
#include "cpu/intranode/calls.hpp"
#include "cpu/intranode/participants.hpp"
#include "cpu/latency/slab_routing.hpp"
#include "cpu/rows/combine_inputs.hpp"
#include "cpu/rows/rank_sums.hpp"
#include "cpu/rows/row_check.hpp"
#include "cpu/rows/row_sum.hpp"
#include "cpu/rows/wire_rows.hpp"
#include "plan/to_size.hpp"

/// Combine on one node: each source rank reads the rows of its own tokens from the peers' memory and sums them. Rows
/// that a peer cannot reach (ordinary pointers of another process) are staged in the arena before the call begins.

namespace ferry::cpu::intranode {
namespace {

using node::CallDescriptor;

class Combiner {
 public:
  Combiner(const CombineCall& call, const Context& context, Participants& ranks)
      : call_(call),
        routing_(static_cast<const CpuRouting&>(*call.routing)),
        context_(context),
        peers_(context.sync.peers()),
        ranks_(ranks) {}

  /// Stages rows that peers cannot reach, and fills the descriptor's locations.
  Status prepare(CallDescriptor& descriptor);
  /// Called after all descriptors are in: sums, and waits until no peer reads this rank's rows any more.
  Status run() {
    return ranks_.complete([this] { return sum(); });
  }

 private:
  /// A rank that holds rows of this rank's tokens.
  struct Sender {
    CombineRows rows;
    const std::uint64_t* checksums = nullptr;  ///< [rows] if the group verifies them
    // With masks, the place of a row depends on the ranks that its receiver masks, so the receiver publishes its
    // source_ranges.
    std::int64_t num_rows = 0;
    std::vector<SourceRange> ranges;     ///< [L] of this rank's tokens there
    std::vector<std::int32_t> num_seen;  ///< [L] tokens so far
  };

  Status publish_ranges(CallDescriptor& descriptor) const;
  Status sum();
  Status find_senders();
  Status find_ranges(int rank, Sender& sender) const;
  const std::byte* row_of(const plan::Destination& destination);
  /// The row's index at its holder; -1 if its rank has no such row.
  std::int64_t row_in_ranges(const plan::Destination& destination, Sender& sender) const;
  Status find_checksums_of(int rank, Sender& sender) const;
  void sum_tokens();
  void sum_rank_sums();
  void sum_weights() const;

  const CombineCall& call_;
  const CpuRouting& routing_;
  const Context& context_;
  node::Peers& peers_;
  Participants& ranks_;
  std::vector<Sender> senders_;  // by rank
  RowCheck check_;
};

Status Combiner::prepare(CallDescriptor& descriptor) {
  if (context_.verify) {
    if (Status status = publish_checksums(call_, routing_, context_, descriptor); !status.ok()) return status;
  }
  const node::Location rows = peers_.locate(call_.x.data, call_.x.num_rows, call_.x.row_bytes, call_.x.stride_bytes);
  if (ranks_.masks()) {
    const bool in_arena = rows.kind == node::Location::Kind::kArena;
    Status status = publish_combine_inputs(call_, routing_, context_, in_arena, descriptor);
    return status.ok() ? publish_ranges(descriptor) : status;
  }
  bool reachable = true;
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (routing_.num_rows_from_rank[to_size(rank)] > 0 && !peers_.reachable(rows, rank)) reachable = false;
  }
  return publish_combine_inputs(call_, routing_, context_, reachable, descriptor);
}

Status Combiner::publish_ranges(CallDescriptor& descriptor) const {
  const std::size_t ranges_bytes = routing_.source_ranges_table.size() * sizeof(std::int32_t);
  if (ranges_bytes == 0) return {};
  Result<std::byte*> ranges = context_.staging.records(ranges_bytes);
  if (!ranges.ok()) return ranges.status();
  std::memcpy(*ranges, routing_.source_ranges_table.data(), ranges_bytes);
  descriptor.tables = peers_.locate(*ranges, 1, static_cast<std::int64_t>(ranges_bytes), 0);
  return {};
}

Status Combiner::find_senders() {
  senders_.assign(to_size(peers_.num_ranks()), {});
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (!ranks_.include(rank) || routing_.num_rows_to_rank[to_size(rank)] == 0) continue;
    Sender& sender = senders_[to_size(rank)];
    if (ranks_.masks()) {
      if (Status status = find_ranges(rank, sender); !status.ok()) return status;
    } else {
      Result<CombineRows> rows = resolve_combine_inputs(call_, routing_, context_, rank);
      if (!rows.ok()) return rows.status();
      sender.rows = *rows;
      sender.num_rows = routing_.num_rows_on_rank[to_size(rank)];
    }
    if (!context_.verify) continue;
    if (Status status = find_checksums_of(rank, sender); !status.ok()) return status;
  }
  return {};
}

Status Combiner::find_checksums_of(int rank, Sender& sender) const {
  sender.checksums = find_checksums(peers_, ranks_.descriptor_of(rank), rank, sender.num_rows);
  if (sender.checksums != nullptr || sender.num_rows == 0) return {};
  return ranks_.bad_location(ranks_.masks() ? Operation::kLatencyCombine : Operation::kCombine, rank);
}

Status Combiner::find_ranges(int rank, Sender& sender) const {
  const CallDescriptor& theirs = ranks_.descriptor_of(rank);
  sender.num_rows = theirs.input.num_rows;
  sender.rows.stride_bytes = theirs.input.stride_bytes;
  sender.rows.rows = peers_.resolve(theirs.input, rank, {sender.num_rows, call_.x.row_bytes});
  const std::byte* const table = peers_.resolve(theirs.tables, rank, {1, theirs.tables.row_bytes});
  if (sender.rows.rows == nullptr || table == nullptr) return ranks_.bad_location(Operation::kLatencyCombine, rank);
  const auto num_ranks = to_size(peers_.num_ranks());
  sender.ranges.resize(to_size(theirs.tables.row_bytes) / (num_ranks * sizeof(SourceRange)));
  sender.num_seen.assign(sender.ranges.size(), 0);
  for (std::size_t local = 0; local < sender.ranges.size(); ++local) {
    const std::size_t at = local * num_ranks + to_size(peers_.rank());
    std::memcpy(&sender.ranges[local], table + at * sizeof(SourceRange), sizeof(SourceRange));
  }
  return {};
}

/// Row of a destination; null if its rank has no such row, because it masks other ranks than this one does. Tokens must
/// ascend. Checks the row, if the group verifies rows, when it is asked for first.
const std::byte* Combiner::row_of(const plan::Destination& destination) {
  Sender& sender = senders_[static_cast<std::size_t>(destination.rank)];
  const std::int64_t row = ranks_.masks() ? row_in_ranges(destination, sender) : destination.row;
  if (row < 0) return nullptr;
  if (sender.checksums != nullptr && destination.first != 0) {
    check_held_row(call_, routing_, peers_.call(),
                   {sender.rows, sender.checksums, destination.rank, context_.sync.rank()}, row, check_);
  }
  return sender.rows.rows + row * sender.rows.stride_bytes;
}

std::int64_t Combiner::row_in_ranges(const plan::Destination& destination, Sender& sender) const {
  const auto local = to_size(destination.row / routing_.slab_capacity);
  if (local >= sender.ranges.size()) return -1;
  sender.num_seen[local] += destination.first;
  const std::int32_t ordinal = sender.num_seen[local] - 1;
  const SourceRange& range = sender.ranges[local];
  if (ordinal >= range.num_rows || range.first < 0) return -1;
  const std::int64_t row = static_cast<std::int64_t>(local) * routing_.slab_capacity + range.first + ordinal;
  return row < sender.num_rows ? row : -1;
}

void Combiner::sum_tokens() {
  const RowSumFunction sum_row = choose_row_sum(call_.x.dtype);
  WireSum wire_sum(call_);
  const auto* weight_table = static_cast<const float*>(call_.topk_weights.data);
  std::vector<const std::byte*> rows;
  std::vector<float> weights;
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    rows.clear();
    weights.clear();
    for (const ConstRows& bias : call_.bias) {
      if (!bias.present()) continue;
      rows.push_back(bias.row(token));
      weights.push_back(1.0F);  // fma(1, b, acc) is acc + b
    }
    const std::size_t num_biases = rows.size();
    for (const plan::Destination& destination : routing_.destinations_of(token)) {
      if (!call_.weighted && destination.first == 0) continue;
      const std::byte* const row = row_of(destination);
      if (row == nullptr) continue;
      rows.push_back(row);
      if (call_.weighted) weights.push_back(weight_table[token * routing_.num_topk + destination.topk]);
    }
    const RowSum terms{rows.data(), call_.weighted ? weights.data() : nullptr, rows.size(), call_.out_x.row(token),
                       to_size(call_.out_x.row_bytes)};
    if (call_.wire_format == WireFormat::kFp8) {
      wire_sum.sum(terms, num_biases);
    } else {
      sum_row(terms);
    }
  }
}

/// sum_tokens() in CombineOrder::kRankSums.
void Combiner::sum_rank_sums() {
  RankSums sums(call_);
  const auto* weight_table = static_cast<const float*>(call_.topk_weights.data);
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    sums.begin(to_size(call_.out_x.row_bytes));
    for (const plan::Destination& destination : routing_.destinations_of(token)) {
      const std::byte* const row = row_of(destination);
      if (row != nullptr) sums.add(destination.rank, row, weight_table[token * routing_.num_topk + destination.topk]);
    }
    sums.finish(call_.out_x.row(token));
  }
}

void Combiner::sum_weights() const {
  if (!call_.weights.present()) return;
  auto* out = static_cast<float*>(call_.out_weights.data);
  const auto num_topk = to_size(routing_.num_topk);
  for (std::size_t token = 0; token < to_size(routing_.num_tokens); ++token, out += num_topk) {
    std::fill_n(out, num_topk, 0.0F);
    for (const plan::Destination& destination : routing_.destinations_of(static_cast<std::int64_t>(token))) {
      const float* weights = senders_[static_cast<std::size_t>(destination.rank)].rows.weights;
      if (routing_.layout != Layout::kTokens) {
        out[destination.topk] = weights[destination.row];
      } else if (destination.first != 0) {
        const float* row = weights + to_size(destination.row) * num_topk;
        for (std::size_t topk = 0; topk < num_topk; ++topk) out[topk] += row[topk];
      }
    }
  }
}

Status Combiner::sum() {
  check_.clear();
  if (Status status = find_senders(); !status.ok()) return status;
  if (call_.rank_sums) {
    sum_rank_sums();
  } else {
    sum_tokens();
  }
  sum_weights();
  return ranks_.refuse_rows(check_.result(context_.sync));
}

}  // namespace

Status combine(const CombineCall& call, const Context& context, Survivors* survivors) {
  Participants ranks(context, survivors);
  return run_call<Combiner>(call, context, ranks);
}

}  // namespace ferry::cpu::intranode
