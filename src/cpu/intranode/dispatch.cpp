#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "cpu/context/routing.hpp"
#include "cpu/context/run_call.hpp"
#include "cpu/intranode/calls.hpp"
#include "cpu/intranode/participants.hpp"
#include "cpu/intranode/route_steps.hpp"
#include "cpu/latency/slab_routing.hpp"
#include "cpu/rows/row_check.hpp"
#include "cpu/rows/row_copy.hpp"
#include "cpu/rows/token_records.hpp"
#include "plan/to_size.hpp"

/// Dispatch on one node. A row takes one of two paths, chosen per pair of ranks:
///
///   push   the source can reach the receiver's output (it is in an arena, or both are threads of one process):
///          x ──copy──> out.x                                        the source copies each row once
///   pull   it cannot (an ordinary pointer in another process):
///          x ──copy──> source's arena ──copy──> out.x               the receiver copies the rows staged by the source;
///                                                                   nothing is staged if x is in the source's arena
///
/// In latency mode of groups that mask lost ranks (Participants) every row is pulled, and sources put all of x into
/// their arenas before the call begins.
///
/// Groups that verify their rows wait, where rows are pushed, until all have been written, and check them before any
/// rank reuses its memory.
///
/// Scales, ids and weights are packed together in the source's arena before the call begins, and every receiver reads
/// the records of its rows: they are small, and only the receiver knows the types and strides of its outputs.

namespace ferry::cpu::intranode {
namespace {

using node::CallDescriptor;
using node::Location;
using node::Phase;

class Dispatcher {
 public:
  Dispatcher(const DispatchCall& call, const Context& context, Participants& ranks)
      : call_(call),
        routing_(static_cast<const CpuRouting&>(*call.routing)),
        sync_(context.sync),
        peers_(context.sync.peers()),
        staging_(context.staging),
        ranks_(ranks),
        verify_(context.verify),
        format_(record_format(call, context.verify)) {}

  /// Packs the records, and fills the descriptor's locations.
  Status prepare(CallDescriptor& descriptor);
  /// Called after all descriptors are in: moves the rows and waits for all ranks.
  Status run() {
    return ranks_.complete([this] { return move(); });
  }
  /// The moves, and the checks of the rows, without the end of the call.
  Status move();

 private:
  bool pushes_to(int rank) const {
    return !ranks_.masks() && peers_.reachable(peers_.descriptor_of(rank).output, rank);
  }
  bool pulls_from(int rank) const;
  Status bad_location(int rank) const {
    return ranks_.bad_location(ranks_.masks() ? Operation::kLatencyDispatch : Operation::kDispatch, rank);
  }
  int me() const { return peers_.rank(); }
  /// Copies this rank's rows to its arena.
  Result<Location> copy_rows();
  /// Makes this rank's rows readable for peers that must pull them.
  Status stage();
  Status push();
  Status pull();
  Status receive_records();
  /// Checks the rows that this rank has received, when all are written.
  Status verify_rows();

  const DispatchCall& call_;
  const CpuRouting& routing_;
  call::CallSync& sync_;
  node::Peers& peers_;
  Staging& staging_;
  Participants& ranks_;
  bool verify_;
  plan::TokenRecord format_;
  std::vector<RecordSource> records_;  // by rank
};

Status Dispatcher::prepare(CallDescriptor& descriptor) {
  descriptor.input = peers_.locate(call_.x.data, call_.x.num_rows, call_.x.row_bytes, call_.x.stride_bytes);
  if (!ranks_.masks()) {
    descriptor.output =
        peers_.locate(call_.out_x.data, call_.out_x.num_rows, call_.out_x.row_bytes, call_.out_x.stride_bytes);
  } else if (descriptor.input.kind != Location::Kind::kArena) {
    Result<Location> rows = copy_rows();
    if (!rows.ok()) return rows.status();
    descriptor.input = *rows;
  }
  const std::size_t records_bytes = to_size(format_.size_bytes() * routing_.num_tokens);
  if (records_bytes > 0) {
    Result<std::byte*> records = staging_.records(records_bytes);
    if (!records.ok()) return records.status();
    pack_records(call_, routing_, format_, *records);
    const std::int64_t record_bytes = format_.size_bytes();
    if (verify_) seal_records(call_, {next_call(peers_), me(), 0}, to_size(record_bytes), *records);
    descriptor.records = peers_.locate(*records, routing_.num_tokens, record_bytes, record_bytes);
  }
  if (ranks_.masks()) return {};
  // After the records, which use the same arena.
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (routing_.num_rows_to_rank[to_size(rank)] == 0 || peers_.reachable(descriptor.input, rank)) continue;
    // It is not known yet whether that peer must pull; a lack of room found later could no longer refuse the call.
    Status room = staging_.check_room_for_rows(to_size(call_.x.num_rows * call_.x.row_bytes));
    if (!room.ok()) return Status(room.code(), fmt::format("dispatch: {}", room.message()));
    break;
  }
  return {};
}

bool Dispatcher::pulls_from(int rank) const {
  if (routing_.num_rows_from_rank[to_size(rank)] == 0) return false;
  return ranks_.masks() || (rank != me() && !peers_.reachable(peers_.descriptor_of(me()).output, rank));
}

Result<Location> Dispatcher::copy_rows() {
  const auto row_bytes = to_size(call_.x.row_bytes);
  Result<std::byte*> copy = staging_.rows(to_size(call_.x.num_rows) * row_bytes);
  if (!copy.ok()) return copy.status();
  const CopyMode mode = choose_copy_mode(call_.x.num_rows * call_.x.row_bytes);
  for (std::int64_t row = 0; row < call_.x.num_rows; ++row) {
    copy_row(*copy + row * call_.x.row_bytes, call_.x.row(row), row_bytes, mode);
  }
  finish_copies(mode);
  return peers_.locate(*copy, call_.x.num_rows, call_.x.row_bytes, call_.x.row_bytes);
}

Status Dispatcher::stage() {
  bool pulled = false;    // a peer pulls from this rank
  bool reachable = true;  // every such peer can reach x in place
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (routing_.num_rows_to_rank[to_size(rank)] == 0 || pushes_to(rank)) continue;
    pulled = true;
    reachable = reachable && peers_.reachable(peers_.descriptor_of(me()).input, rank);
  }
  if (!pulled) return {};
  if (!reachable) {
    const Result<Location> staged = copy_rows();
    if (!staged.ok()) {
      return sync_.fail(staged.status().code(), me(),
                        fmt::format("dispatch: rank {} cannot stage its rows: {}", me(), staged.status().message()));
    }
    peers_.set_staged(*staged);
  }
  sync_.post(Phase::kStaged);
  return {};
}

Status Dispatcher::push() {
  std::vector<std::byte*> targets(to_size(peers_.num_ranks()), nullptr);
  std::vector<std::int64_t> strides(targets.size(), 0);
  std::int64_t num_pushed_rows = 0;
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    const std::int64_t num_rows = routing_.num_rows_to_rank[to_size(rank)];
    if (num_rows == 0 || !pushes_to(rank)) continue;
    const Location& output = peers_.descriptor_of(rank).output;
    targets[to_size(rank)] =
        rank == me() ? call_.out_x.data
                     : peers_.resolve(output, rank, {routing_.num_rows_on_rank[to_size(rank)], call_.x.row_bytes});
    strides[to_size(rank)] = output.stride_bytes;
    if (targets[to_size(rank)] == nullptr) return sync_.bad_location(Operation::kDispatch, rank);
    num_pushed_rows += num_rows;
  }
  const CopyMode mode = choose_copy_mode(num_pushed_rows * call_.x.row_bytes);
  const auto row_bytes = to_size(call_.x.row_bytes);
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const std::byte* row = call_.x.row(token);
    for (const plan::Destination& destination : routing_.destinations_of(token)) {
      const auto rank = static_cast<std::size_t>(destination.rank);
      if (destination.first != 0 && targets[rank] != nullptr) {
        copy_row(targets[rank] + destination.row * strides[rank], row, row_bytes, mode);
      }
    }
  }
  finish_copies(mode);
  return {};
}

Status Dispatcher::pull() {
  const auto num_ranks = to_size(peers_.num_ranks());
  std::vector<bool> awaited(num_ranks, false);
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) awaited[to_size(rank)] = pulls_from(rank);
  if (std::find(awaited.begin(), awaited.end(), true) == awaited.end()) return {};
  if (!ranks_.masks()) {  // else sources have staged x before the call began
    if (Status status = sync_.wait(Phase::kStaged, &awaited); !status.ok()) return status;
  }

  std::vector<const std::byte*> sources(num_ranks, nullptr);
  std::vector<std::int64_t> strides(num_ranks, 0);
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
    if (!awaited[to_size(rank)]) continue;
    const CallDescriptor& descriptor = ranks_.descriptor_of(rank);
    const Location& location = peers_.reachable(descriptor.input, rank) ? descriptor.input : descriptor.staged;
    sources[to_size(rank)] =
        peers_.resolve(location, rank, {routing_.num_tokens_of_rank[to_size(rank)], call_.out_x.row_bytes});
    strides[to_size(rank)] = location.stride_bytes;
    if (sources[to_size(rank)] == nullptr) return bad_location(rank);
  }
  const CopyMode mode = choose_copy_mode(routing_.num_used_rows * call_.out_x.row_bytes);
  for (std::int64_t row = 0; row < routing_.num_used_rows; ++row) {
    const std::int32_t source = routing_.source_table[to_size(row) * 2];
    if (source < 0 || sources[to_size(source)] == nullptr) continue;
    const std::int64_t token = routing_.source_table[to_size(row) * 2 + 1];
    copy_row(call_.out_x.row(row), sources[to_size(source)] + token * strides[to_size(source)],
             to_size(call_.out_x.row_bytes), mode);
  }
  finish_copies(mode);
  return {};
}

Status Dispatcher::receive_records() {
  const std::int64_t record_bytes = format_.size_bytes();
  if (record_bytes > 0) {
    records_.assign(to_size(peers_.num_ranks()), {});
    for (int rank = 0; rank < peers_.num_ranks(); ++rank) {
      if (routing_.num_rows_from_rank[to_size(rank)] == 0) continue;
      const Location& location = ranks_.descriptor_of(rank).records;
      const std::byte*& records = records_[to_size(rank)].records;
      records = peers_.resolve(location, rank, {routing_.num_tokens_of_rank[to_size(rank)], record_bytes});
      if (records == nullptr || location.row_bytes != record_bytes) {
        return bad_location(rank);
      }
    }
    unpack_records(call_, routing_, format_, records_);
  }
  fill_local_outputs(call_, routing_);
  return {};
}

Status Dispatcher::move() {
  if (!ranks_.masks()) {
    if (Status status = stage(); !status.ok()) return status;
    if (Status status = push(); !status.ok()) return status;
  }
  if (Status status = pull(); !status.ok()) return status;
  if (Status status = receive_records(); !status.ok() || !verify_) return status;
  return verify_rows();
}

Status Dispatcher::verify_rows() {
  if (!ranks_.masks()) {
    sync_.post(Phase::kWritten);
    if (Status status = sync_.wait(Phase::kWritten); !status.ok()) return status;
  }
  RowCheck check;
  check_received_rows({.call = call_,
                       .routing = routing_,
                       .record_bytes = to_size(format_.size_bytes()),
                       .sources = records_,
                       .call_number = peers_.call(),
                       .rank = me()},
                      check);
  return ranks_.refuse_rows(check.result(sync_));
}

}  // namespace

Status dispatch(const DispatchCall& call, const Context& context) {
  Participants all(context, nullptr);
  return run_call<Dispatcher>(call, context, all);
}

Status dispatch_among(const LatencyDispatchCall& call, DispatchCall dispatch,
                      const std::shared_ptr<CpuRouting>& routing, const Context& context, Survivors& survivors) {
  const bool has_room = dispatch.record.code == ErrorCode::kOk;
  CallDescriptor descriptor;
  descriptor.record = has_room ? call.record : dispatch.record;
  descriptor.record.operation = call.record.operation;
  dispatch.routing = routing;
  const plan::RouteShape shape = route_shape(call.route, context.topology());
  Participants ranks(context, &survivors);
  Dispatcher dispatcher(dispatch, context, ranks);
  if (descriptor.record.code == ErrorCode::kOk) {
    copy_inputs_among(call.route, context.peers(), ranks, *routing);
    Status status = publish_tables(call.route, shape, *routing, context, descriptor);
    if (status.ok()) status = dispatcher.prepare(descriptor);
    if (!status.ok()) descriptor.record.set_status(status);
  }
  if (Status status = ranks.begin(descriptor); !status.ok()) return status;
  return ranks.complete([&] {
    Status status = plan_among(call.route, shape, context.peers(), ranks, *routing);
    if (!status.ok()) return status;
    write_source_ranges(*routing);
    return dispatcher.move();
  });
}

}  // namespace ferry::cpu::intranode
