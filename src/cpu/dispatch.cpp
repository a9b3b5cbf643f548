#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "cpu/cpu_backend.hpp"
#include "cpu/cpu_routing.hpp"
#include "cpu/row_copy.hpp"
#include "cpu/token_records.hpp"
#include "plan/to_size.hpp"

/// Dispatch on one rank. A row takes one of two ways, chosen per pair of ranks:
///
///   push   the source reaches the receiver's output (it is in an arena, or both are threads of one process):
///          x ──copy──> out.x                                        the source copies each row once
///   pull   it does not (an ordinary pointer in another process):
///          x ──copy──> source's arena ──copy──> out.x               the receiver copies from what the source staged;
///                                                                   nothing is staged if x is in the source's arena
///
/// Scales, ids and weights are packed beside each other in the source's arena before the call begins, and every
/// receiver reads the records of its rows: they are small, and only the receiver knows its outputs' types and strides.

namespace ferry::cpu {
namespace {

class Dispatcher {
 public:
  Dispatcher(const DispatchCall& call, Crew& crew, Staging& staging)
      : call_(call), routing_(static_cast<const CpuRouting&>(*call.routing)), crew_(crew), staging_(staging) {}

  /// Pack the records; fills the ticket's locations.
  Status prepare(Ticket& ticket);
  /// After all tickets are in: move everything, and wait for everybody.
  Status run();

 private:
  bool pushes_to(int rank) const { return crew_.reachable(crew_.ticket_of(rank).output, rank); }
  bool pulls_from(int rank) const;
  int me() const { return crew_.rank(); }
  Status bad_peer(int rank) const;
  /// Make this rank's rows readable for peers that must pull them.
  Status stage();
  Status push();
  Status pull();
  Status receive_records();

  const DispatchCall& call_;
  const CpuRouting& routing_;
  Crew& crew_;
  Staging& staging_;
};

Status Dispatcher::prepare(Ticket& ticket) {
  ticket.input = crew_.locate(call_.x.data, call_.x.num_rows, call_.x.row_bytes, call_.x.stride_bytes);
  ticket.output = crew_.locate(call_.out_x.data, call_.out_x.num_rows, call_.out_x.row_bytes, call_.out_x.stride_bytes);
  const plan::TokenRecord format = record_format(call_);
  const std::size_t records_bytes = format.size_bytes * to_size(routing_.num_tokens);
  if (records_bytes > 0) {
    Result<std::byte*> records = staging_.records(records_bytes);
    if (!records.ok()) return records.status();
    pack_records(call_, routing_, *records);
    const auto record_bytes = static_cast<std::int64_t>(format.size_bytes);
    ticket.records = crew_.locate(*records, routing_.num_tokens, record_bytes, record_bytes);
  }
  // After the records, which take room of the same arena.
  for (int rank = 0; rank < crew_.num_ranks(); ++rank) {
    if (routing_.num_rows_to_rank[to_size(rank)] == 0 || crew_.reachable(ticket.input, rank)) continue;
    // Whether that peer must pull is not known yet; if it must, lack of room would come too late to be refused.
    Status room = staging_.check_room_for_rows(to_size(call_.x.num_rows * call_.x.row_bytes));
    if (!room.ok()) return Status(room.code(), fmt::format("dispatch: {}", room.message()));
    break;
  }
  return {};
}

Status Dispatcher::bad_peer(int rank) const {
  return crew_.fail(ErrorCode::kInternal, rank,
                    fmt::format("dispatch: rank {} named memory outside its arena; please report this bug", rank));
}

bool Dispatcher::pulls_from(int rank) const {
  return rank != me() && routing_.num_rows_from_rank[to_size(rank)] > 0 &&
         !crew_.reachable(crew_.ticket_of(me()).output, rank);
}

Status Dispatcher::stage() {
  bool pulled = false;    // some peer pulls from this rank
  bool reachable = true;  // and finds x where it is
  for (int rank = 0; rank < crew_.num_ranks(); ++rank) {
    if (routing_.num_rows_to_rank[to_size(rank)] == 0 || pushes_to(rank)) continue;
    pulled = true;
    reachable = reachable && crew_.reachable(crew_.ticket_of(me()).input, rank);
  }
  if (!pulled) return {};
  if (!reachable) {
    const auto row_bytes = to_size(call_.x.row_bytes);
    Result<std::byte*> staged = staging_.rows(to_size(call_.x.num_rows) * row_bytes);
    if (!staged.ok()) {
      return crew_.fail(staged.status().code(), me(),
                        fmt::format("dispatch: rank {} cannot stage its rows: {}", me(), staged.status().message()));
    }
    const CopyMode mode = choose_copy_mode(call_.x.num_rows * call_.x.row_bytes);
    for (std::int64_t row = 0; row < call_.x.num_rows; ++row) {
      copy_row(*staged + row * call_.x.row_bytes, call_.x.row(row), row_bytes, mode);
    }
    finish_copies(mode);
    crew_.set_staged(crew_.locate(*staged, call_.x.num_rows, call_.x.row_bytes, call_.x.row_bytes));
  }
  crew_.post(Phase::kStaged);
  return {};
}

Status Dispatcher::push() {
  std::vector<std::byte*> targets(to_size(crew_.num_ranks()), nullptr);
  std::vector<std::int64_t> strides(targets.size(), 0);
  std::int64_t num_pushed_rows = 0;
  for (int rank = 0; rank < crew_.num_ranks(); ++rank) {
    const std::int64_t num_rows = routing_.num_rows_to_rank[to_size(rank)];
    if (num_rows == 0 || !pushes_to(rank)) continue;
    const Location& output = crew_.ticket_of(rank).output;
    targets[to_size(rank)] =
        rank == me() ? call_.out_x.data
                     : crew_.resolve(output, rank, {routing_.num_rows_on_rank[to_size(rank)], call_.x.row_bytes});
    strides[to_size(rank)] = output.stride_bytes;
    if (targets[to_size(rank)] == nullptr) return bad_peer(rank);
    num_pushed_rows += num_rows;
  }
  const CopyMode mode = choose_copy_mode(num_pushed_rows * call_.x.row_bytes);
  const auto row_bytes = to_size(call_.x.row_bytes);
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const std::byte* row = call_.x.row(token);
    const auto begin = to_size(routing_.first_place[to_size(token)]);
    const auto end = to_size(routing_.first_place[to_size(token) + 1]);
    for (std::size_t i = begin; i < end; ++i) {
      const Place& place = routing_.places[i];
      const auto rank = static_cast<std::size_t>(place.rank);
      if (place.first && targets[rank] != nullptr)
        copy_row(targets[rank] + place.row * strides[rank], row, row_bytes, mode);
    }
  }
  finish_copies(mode);
  return {};
}

Status Dispatcher::pull() {
  const auto num_ranks = to_size(crew_.num_ranks());
  std::vector<bool> awaited(num_ranks, false);
  for (int rank = 0; rank < crew_.num_ranks(); ++rank) awaited[to_size(rank)] = pulls_from(rank);
  if (std::find(awaited.begin(), awaited.end(), true) == awaited.end()) return {};
  if (Status status = crew_.wait(Phase::kStaged, &awaited); !status.ok()) return status;

  std::vector<const std::byte*> sources(num_ranks, nullptr);
  std::vector<std::int64_t> strides(num_ranks, 0);
  for (int rank = 0; rank < crew_.num_ranks(); ++rank) {
    if (!awaited[to_size(rank)]) continue;
    const Ticket& ticket = crew_.ticket_of(rank);
    const Location& location = crew_.reachable(ticket.input, rank) ? ticket.input : ticket.staged;
    sources[to_size(rank)] =
        crew_.resolve(location, rank, {routing_.num_tokens_of_rank[to_size(rank)], call_.out_x.row_bytes});
    strides[to_size(rank)] = location.stride_bytes;
    if (sources[to_size(rank)] == nullptr) return bad_peer(rank);
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
  const auto record_bytes = static_cast<std::int64_t>(record_format(call_).size_bytes);
  if (record_bytes > 0) {
    std::vector<RecordSource> sources(to_size(crew_.num_ranks()));
    for (int rank = 0; rank < crew_.num_ranks(); ++rank) {
      if (routing_.num_rows_from_rank[to_size(rank)] == 0) continue;
      const Location& location = crew_.ticket_of(rank).records;
      const std::byte*& records = sources[to_size(rank)].records;
      records = crew_.resolve(location, rank, {routing_.num_tokens_of_rank[to_size(rank)], record_bytes});
      if (records == nullptr || location.row_bytes != record_bytes) return bad_peer(rank);
    }
    unpack_records(call_, routing_, sources);
  }
  fill_local_outputs(call_, routing_);
  return {};
}

Status Dispatcher::run() {
  if (Status status = stage(); !status.ok()) return status;
  if (Status status = push(); !status.ok()) return status;
  if (Status status = pull(); !status.ok()) return status;
  if (Status status = receive_records(); !status.ok()) return status;
  crew_.post(Phase::kDone);
  return crew_.wait(Phase::kDone);
}

}  // namespace

Status CpuBackend::run_dispatch(const DispatchCall& call) {
  if (!crew_.broken().ok()) return crew_.broken();
  Ticket ticket;
  ticket.record = call.record;
  if (call.record.code != ErrorCode::kOk) return crew_.begin(ticket);
  Dispatcher dispatcher(call, crew_, staging_);
  if (Status status = dispatcher.prepare(ticket); !status.ok()) ticket.record.set_status(status);
  if (Status status = crew_.begin(ticket); !status.ok()) return status;
  return dispatcher.run();
}

}  // namespace ferry::cpu
