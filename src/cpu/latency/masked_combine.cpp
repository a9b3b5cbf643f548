#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/latency/masked_calls.hpp"
#include "cpu/rows/combine_inputs.hpp"
#include "cpu/rows/rank_sums.hpp"
#include "cpu/rows/row_sum.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

using node::CallDescriptor;

/// Of one (expert, source) in source_ranges.
struct Range {
  std::int32_t num_rows = 0;
  std::int32_t first = 0;
};

/// A rank that has rows of this one.
struct Sender {
  const std::byte* rows = nullptr;
  std::int64_t stride = 0;
  std::int64_t num_rows = 0;
  std::vector<Range> ranges;                ///< [L] of this rank's tokens there
  std::vector<std::int32_t> num_seen = {};  ///< [L] tokens so far
};

class MaskedCombine {
 public:
  MaskedCombine(const CombineCall& call, const Context& context, Survivors& survivors)
      : call_(call),
        routing_(static_cast<const CpuRouting*>(call.routing.get())),
        context_(context),
        peers_(context.peers()),
        survivors_(survivors) {}

  Status run();

 private:
  Status publish(CallDescriptor& descriptor) const;
  /// Everything that comes of what the survivors have published. May be made again with fewer of them.
  Status take_all();
  Status find_sender(int rank);
  void sum_tokens();
  /// The row of a destination, null if its rank has none. Tokens come in ascending order.
  const std::byte* take_row(const plan::Destination& destination);

  const CombineCall& call_;
  const CpuRouting* routing_;  // null in a call that this rank refuses
  const Context& context_;
  node::Peers& peers_;
  Survivors& survivors_;
  std::vector<Sender> senders_;  // by rank
};

Status MaskedCombine::publish(CallDescriptor& descriptor) const {
  const node::Location x = peers_.locate(call_.x.data, call_.x.num_rows, call_.x.row_bytes, call_.x.stride_bytes);
  const bool in_arena = x.kind == node::Location::Kind::kArena;
  if (Status status = publish_combine_inputs(call_, *routing_, context_, in_arena, descriptor); !status.ok()) {
    return status;
  }
  const std::size_t ranges_bytes = routing_->source_ranges_table.size() * sizeof(std::int32_t);
  if (ranges_bytes == 0) return {};
  Result<std::byte*> ranges = context_.staging.records(ranges_bytes);
  if (!ranges.ok()) return ranges.status();
  std::memcpy(*ranges, routing_->source_ranges_table.data(), ranges_bytes);
  descriptor.tables = peers_.locate(*ranges, 1, static_cast<std::int64_t>(ranges_bytes), 0);
  return {};
}

Status MaskedCombine::find_sender(int rank) {
  const CallDescriptor& theirs = survivors_.descriptor_of(rank);
  Sender& sender = senders_[to_size(rank)];
  sender.num_rows = theirs.input.num_rows;
  sender.stride = theirs.input.stride_bytes;
  sender.rows = peers_.resolve(theirs.input, rank, {sender.num_rows, call_.x.row_bytes});
  const auto num_ranks = to_size(peers_.num_ranks());
  const std::byte* const table = peers_.resolve(theirs.tables, rank, {1, theirs.tables.row_bytes});
  if (sender.rows == nullptr || table == nullptr) {
    // Not the end of the group yet: the rank may have gone on, and overwritten it.
    return Status(
        ErrorCode::kInternal,
        fmt::format("latency_combine: rank {} published what is not in its arena; please report this bug", rank), rank);
  }
  sender.ranges.resize(to_size(theirs.tables.row_bytes) / (num_ranks * sizeof(Range)));
  sender.num_seen.assign(sender.ranges.size(), 0);
  for (std::size_t local = 0; local < sender.ranges.size(); ++local) {
    const std::size_t at = local * num_ranks + to_size(peers_.rank());
    std::memcpy(&sender.ranges[local], table + at * sizeof(Range), sizeof(Range));
  }
  return {};
}

const std::byte* MaskedCombine::take_row(const plan::Destination& destination) {
  Sender& sender = senders_[static_cast<std::size_t>(destination.rank)];
  const auto local = to_size(destination.row / routing_->slab_capacity);
  if (local >= sender.ranges.size()) return nullptr;
  sender.num_seen[local] += destination.first;
  const std::int32_t ordinal = sender.num_seen[local] - 1;
  const Range& range = sender.ranges[local];
  if (ordinal >= range.num_rows || range.first < 0) return nullptr;
  const std::int64_t row = static_cast<std::int64_t>(local) * routing_->slab_capacity + range.first + ordinal;
  return row < sender.num_rows ? sender.rows + row * sender.stride : nullptr;
}

void MaskedCombine::sum_tokens() {
  const RowSumFunction sum_row = choose_row_sum(call_.x.dtype);
  RankSums sums(sum_row);
  const auto* weight_table = static_cast<const float*>(call_.topk_weights.data);
  std::vector<const std::byte*> rows;
  std::vector<float> weights;
  for (std::int64_t token = 0; token < routing_->num_tokens; ++token) {
    rows.clear();
    weights.clear();
    sums.begin(to_size(call_.out_x.row_bytes));
    for (const plan::Destination& destination : routing_->destinations_of(token)) {
      const std::byte* const row = take_row(destination);
      if (row == nullptr) continue;
      rows.push_back(row);
      weights.push_back(weight_table[token * routing_->num_topk + destination.topk]);
      sums.add(destination.rank, rows.back(), weights.back());
    }
    if (call_.rank_sums) {
      sums.finish(call_.out_x.row(token));
    } else {
      sum_row({rows.data(), weights.data(), rows.size(), call_.out_x.row(token), to_size(call_.out_x.row_bytes)});
    }
  }
}

Status MaskedCombine::take_all() {
  senders_.assign(to_size(peers_.num_ranks()), {});
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (!survivors_.include(rank) || routing_->num_rows_to_rank[to_size(rank)] == 0) continue;
    if (Status status = find_sender(rank); !status.ok()) return status;
  }
  sum_tokens();
  return {};
}

Status MaskedCombine::run() {
  CallDescriptor descriptor;
  descriptor.record = call_.record;
  if (call_.record.code == ErrorCode::kOk) {
    if (Status status = publish(descriptor); !status.ok()) descriptor.record.set_status(status);
  }
  if (Status status = survivors_.begin(descriptor); !status.ok()) return status;
  Status status;
  do {
    status = take_all();
    // What a deserter published it may have overwritten while it was read.
  } while (survivors_.drop_deserters());
  if (!status.ok()) return context_.sync.fail(status.code(), status.peer(), status.message());
  survivors_.finish();
  return {};
}

}  // namespace

Status masked_combine(const CombineCall& call, const Context& context, Survivors& survivors) {
  return MaskedCombine(call, context, survivors).run();
}

}  // namespace ferry::cpu
