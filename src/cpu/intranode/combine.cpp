#include <fmt/format.h>

#include <cstring>

#include "cpu/context/routing.hpp"
#include "cpu/context/run_call.hpp"
#include "cpu/intranode/calls.hpp"
#include "cpu/rows/combine_inputs.hpp"
#include "cpu/rows/rank_sums.hpp"
#include "cpu/rows/row_sum.hpp"
#include "plan/to_size.hpp"

/// Combine on one node: each source rank reads the rows of its own tokens from the peers' memory and sums them. Rows
/// that a peer cannot reach (ordinary pointers of another process) are staged in the arena before the call begins.

namespace ferry::cpu::intranode {
namespace {

using node::CallDescriptor;
using node::Phase;

class Combiner {
 public:
  Combiner(const CombineCall& call, const Context& context)
      : call_(call),
        routing_(static_cast<const CpuRouting&>(*call.routing)),
        context_(context),
        sync_(context.sync),
        peers_(context.sync.peers()) {}

  /// Stages rows that peers cannot reach, and fills the descriptor's locations.
  Status prepare(CallDescriptor& descriptor);
  /// Called after all descriptors are in: sums, and waits until no peer reads this rank's rows any more.
  Status run();

 private:
  Status find_senders();
  void sum_tokens() const;
  void sum_rank_sums() const;
  void sum_weights() const;

  const CombineCall& call_;
  const CpuRouting& routing_;
  const Context& context_;
  call::CallSync& sync_;
  node::Peers& peers_;
  std::vector<CombineRows> senders_;  // by rank
};

Status Combiner::prepare(CallDescriptor& descriptor) {
  const node::Location rows = peers_.locate(call_.x.data, call_.x.num_rows, call_.x.row_bytes, call_.x.stride_bytes);
  bool reachable = true;
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (routing_.num_rows_from_rank[to_size(rank)] > 0 && !peers_.reachable(rows, rank)) reachable = false;
  }
  return publish_combine_inputs(call_, routing_, context_, reachable, descriptor);
}

Status Combiner::find_senders() {
  senders_.resize(to_size(peers_.num_ranks()));
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (routing_.num_rows_to_rank[to_size(rank)] == 0) continue;
    Result<CombineRows> rows = resolve_combine_inputs(call_, routing_, context_, rank);
    if (!rows.ok()) return rows.status();
    senders_[to_size(rank)] = *rows;
  }
  return {};
}

void Combiner::sum_tokens() const {
  const RowSumFunction sum_row = choose_row_sum(call_.x.dtype);
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
    for (const plan::Destination& destination : routing_.destinations_of(token)) {
      if (!call_.weighted && destination.first == 0) continue;
      const CombineRows& sender = senders_[static_cast<std::size_t>(destination.rank)];
      rows.push_back(sender.rows + destination.row * sender.stride_bytes);
      if (call_.weighted) weights.push_back(weight_table[token * routing_.num_topk + destination.topk]);
    }
    sum_row({rows.data(), call_.weighted ? weights.data() : nullptr, rows.size(), call_.out_x.row(token),
             to_size(call_.out_x.row_bytes)});
  }
}

/// sum_tokens() in CombineOrder::kRankSums.
void Combiner::sum_rank_sums() const {
  RankSums sums(choose_row_sum(call_.x.dtype));
  const auto* weight_table = static_cast<const float*>(call_.topk_weights.data);
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    sums.begin(to_size(call_.out_x.row_bytes));
    for (const plan::Destination& destination : routing_.destinations_of(token)) {
      const CombineRows& sender = senders_[static_cast<std::size_t>(destination.rank)];
      sums.add(destination.rank, sender.rows + destination.row * sender.stride_bytes,
               weight_table[token * routing_.num_topk + destination.topk]);
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
      const float* weights = senders_[static_cast<std::size_t>(destination.rank)].weights;
      if (routing_.layout != Layout::kTokens) {
        out[destination.topk] = weights[destination.row];
      } else if (destination.first != 0) {
        const float* row = weights + to_size(destination.row) * num_topk;
        for (std::size_t topk = 0; topk < num_topk; ++topk) out[topk] += row[topk];
      }
    }
  }
}

Status Combiner::run() {
  if (Status status = find_senders(); !status.ok()) return status;
  if (call_.rank_sums) {
    sum_rank_sums();
  } else {
    sum_tokens();
  }
  sum_weights();
  sync_.post(Phase::kDone);
  return sync_.wait(Phase::kDone);
}

}  // namespace

Status combine(const CombineCall& call, const Context& context) { return run_call<Combiner>(call, context); }

}  // namespace ferry::cpu::intranode
