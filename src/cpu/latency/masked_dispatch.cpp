#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/intranode/route_steps.hpp"
#include "cpu/latency/masked_calls.hpp"
#include "cpu/latency/slab_routing.hpp"
#include "cpu/rows/row_copy.hpp"
#include "cpu/rows/token_records.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

using node::CallDescriptor;

class MaskedDispatch {
 public:
  MaskedDispatch(const LatencyDispatchCall& call, DispatchCall dispatch, const std::shared_ptr<CpuRouting>& routing,
                 const Context& context, Survivors& survivors)
      : call_(call),
        dispatch_(std::move(dispatch)),
        routing_(*routing),
        context_(context),
        peers_(context.peers()),
        survivors_(survivors),
        shape_(route_shape(call.route, context.topology())) {
    dispatch_.routing = routing;
  }

  Status run();

 private:
  Status publish(CallDescriptor& descriptor);
  /// Of ids, what they pick among the homes that are left as the call begins.
  void copy_ids();
  /// Everything that comes of what the survivors have published. May be made again with fewer of them.
  Status take_all();
  /// Of one rank; counts are copied, so that they stay as they were checked. Without tokens if it is masked.
  Status take_tables(int rank, intranode::PeerTables& tables);
  Status take_rows() const;
  static Status bad_location(int rank);

  const LatencyDispatchCall& call_;
  DispatchCall dispatch_;
  CpuRouting& routing_;
  const Context& context_;
  node::Peers& peers_;
  Survivors& survivors_;
  plan::RouteShape shape_;
  std::vector<std::vector<std::int32_t>> counts_;  // by rank, [R] and [E]
};

void MaskedDispatch::copy_ids() {
  const ExpertPlacement& placement = *call_.route.placement;
  std::vector<bool> is_lost;
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) is_lost.push_back(!survivors_.include(rank));
  const bool none_lost = std::find(is_lost.begin(), is_lost.end(), true) == is_lost.end();
  if (none_lost || !placement.homes.present()) {
    copy_inputs(call_.route, peers_.rank(), routing_);
    return;
  }
  const plan::HomeTable left = plan::without_lost_homes(placement.homes, placement.expert_to_rank, is_lost);
  copy_inputs(call_.route, left, peers_.rank(), routing_);
}

Status MaskedDispatch::publish(CallDescriptor& descriptor) {
  copy_ids();
  Status status = intranode::publish_tables(call_.route, shape_, routing_, context_, descriptor);
  if (!status.ok()) return status;
  const ConstRows& x = dispatch_.x;
  descriptor.input = peers_.locate(x.data, x.num_rows, x.row_bytes, x.stride_bytes);
  if (descriptor.input.kind != node::Location::Kind::kArena) {
    Result<std::byte*> staged = context_.staging.rows(to_size(x.num_rows * x.row_bytes));
    if (!staged.ok()) return staged.status();
    for (std::int64_t row = 0; row < x.num_rows; ++row) {
      copy_row(*staged + row * x.row_bytes, x.row(row), to_size(x.row_bytes), CopyMode::kCached);
    }
    descriptor.input = peers_.locate(*staged, x.num_rows, x.row_bytes, x.row_bytes);
  }
  const std::int64_t record_bytes = record_format(dispatch_).size_bytes();
  if (record_bytes == 0 || routing_.num_tokens == 0) return {};
  Result<std::byte*> records = context_.staging.records(to_size(record_bytes * routing_.num_tokens));
  if (!records.ok()) return records.status();
  pack_records(dispatch_, routing_, *records);
  descriptor.records = peers_.locate(*records, routing_.num_tokens, record_bytes, record_bytes);
  return {};
}

/// Not the end of the group yet: the rank may have gone on, and overwritten it.
Status MaskedDispatch::bad_location(int rank) {
  return Status(
      ErrorCode::kInternal,
      fmt::format("latency_dispatch: rank {} published what is not in its arena; please report this bug", rank), rank);
}

Status MaskedDispatch::take_tables(int rank, intranode::PeerTables& tables) {
  std::vector<std::int32_t>& counts = counts_.emplace_back(shape_.num_ranks + shape_.num_experts, 0);
  intranode::RankTables taken;
  if (survivors_.include(rank)) {
    Result<intranode::RankTables> found = intranode::find_tables(shape_, peers_, rank, survivors_.descriptor_of(rank));
    if (!found.ok()) return found.status();
    taken = *found;
    std::copy_n(taken.counts.rank_counts, shape_.num_ranks, counts.begin());
    const auto of_experts = counts.begin() + static_cast<std::ptrdiff_t>(shape_.num_ranks);
    std::copy_n(taken.counts.expert_counts, shape_.num_experts, of_experts);
  }
  taken.counts.rank_counts = counts.data();
  taken.counts.expert_counts = counts.data() + shape_.num_ranks;
  if (!plan::counts_fit(shape_, taken.counts)) return bad_location(rank);
  tables.add(taken);
  return {};
}

Status MaskedDispatch::take_all() {
  counts_.clear();
  counts_.reserve(shape_.num_ranks);
  intranode::PeerTables tables;
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (Status status = take_tables(rank, tables); !status.ok()) return status;
  }
  // Nothing goes to masked ranks. What would have still counts against their capacity.
  std::vector<std::int64_t> ids = routing_.ids;
  for (std::int64_t& id : ids) {
    if (id >= 0 && !survivors_.include(static_cast<int>(shape_.owner(to_size(id))))) id = -1;
  }
  const auto my_rank = to_size(peers_.rank());
  Status status = intranode::plan_from_tables(call_.route, shape_, tables, my_rank, ids, routing_);
  if (!status.ok()) return status;
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (!survivors_.include(rank)) routing_.num_rows_to_rank[to_size(rank)] = 0;
  }
  for (std::size_t expert = 0; expert < shape_.num_experts; ++expert) {
    if (survivors_.include(static_cast<int>(shape_.owner(expert)))) continue;
    routing_.expert_rows[expert] = 0;
    routing_.own_expert_counts[expert] = 0;
  }
  write_source_ranges(routing_);
  return take_rows();
}

Status MaskedDispatch::take_rows() const {
  struct Source {
    const std::byte* rows = nullptr;
    std::int64_t stride = 0;
  };
  std::vector<Source> sources(shape_.num_ranks);
  std::vector<RecordSource> records(shape_.num_ranks);
  const std::int64_t record_bytes = record_format(dispatch_).size_bytes();
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (routing_.num_rows_from_rank[to_size(rank)] == 0) continue;
    const CallDescriptor& theirs = survivors_.descriptor_of(rank);
    const std::int64_t num_tokens = routing_.num_tokens_of_rank[to_size(rank)];
    sources[to_size(rank)] = {peers_.resolve(theirs.input, rank, {num_tokens, dispatch_.out_x.row_bytes}),
                              theirs.input.stride_bytes};
    if (sources[to_size(rank)].rows == nullptr) return bad_location(rank);
    if (record_bytes == 0) continue;
    records[to_size(rank)].records = peers_.resolve(theirs.records, rank, {num_tokens, record_bytes});
    if (records[to_size(rank)].records == nullptr || theirs.records.row_bytes != record_bytes) {
      return bad_location(rank);
    }
  }
  const CopyMode mode = choose_copy_mode(routing_.num_used_rows * dispatch_.out_x.row_bytes);
  for (std::int64_t row = 0; row < routing_.num_used_rows; ++row) {
    if (!routing_.holds_token(row)) continue;
    const Source& source = sources[to_size(routing_.source_table[to_size(row) * 2])];
    const std::int64_t token = routing_.source_table[to_size(row) * 2 + 1];
    copy_row(dispatch_.out_x.row(row), source.rows + token * source.stride, to_size(dispatch_.out_x.row_bytes), mode);
  }
  finish_copies(mode);
  if (record_bytes > 0) unpack_records(dispatch_, routing_, records);
  fill_local_outputs(dispatch_, routing_);
  return {};
}

Status MaskedDispatch::run() {
  CallDescriptor descriptor;
  descriptor.record = dispatch_.record.code == ErrorCode::kOk ? call_.record : dispatch_.record;
  descriptor.record.operation = call_.record.operation;
  if (descriptor.record.code == ErrorCode::kOk) {
    if (Status status = publish(descriptor); !status.ok()) descriptor.record.set_status(status);
  }
  if (Status status = survivors_.begin(descriptor); !status.ok()) return status;
  Status status;
  do {
    status = take_all();
    // What a deserter published it may have overwritten while it was read.
  } while (survivors_.drop_deserters());
  if (status.code() == ErrorCode::kInternal) {
    return context_.sync.fail(status.code(), status.peer(), status.message());
  }
  survivors_.finish();
  return status;
}

}  // namespace

Status masked_dispatch(const LatencyDispatchCall& call, DispatchCall dispatch,
                       const std::shared_ptr<CpuRouting>& routing, const Context& context, Survivors& survivors) {
  return MaskedDispatch(call, std::move(dispatch), routing, context, survivors).run();
}

}  // namespace ferry::cpu
