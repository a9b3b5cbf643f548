#include "cuda/sync/fault_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "core/checks.hpp"
#include "core/tile_signals.hpp"
#include "plan/route_plan.hpp"

namespace ferry::cuda {
namespace {

constexpr double kNsPerMillisecond = 1e6;

std::string other_call(const CallLog& calls, int peer) {
  const std::optional<CallLog::Difference> difference = calls.find_difference(peer);
  if (!difference) return "";
  return fmt::format("; rank {} called {} where rank {} called {}", difference->rank, to_string(difference->mine), peer,
                     to_string(difference->theirs));
}

}  // namespace

std::string_view awaited_text(Awaited awaited) {
  switch (awaited) {
    case Awaited::kCounts:
      return "to post its counts";
    case Awaited::kEntry:
      return "to make the same call";
    case Awaited::kRows:
    case Awaited::kRow:
      return "to send its rows";
    case Awaited::kDone:
      return "to finish its part";
    case Awaited::kOwn:
      return "to get its own blocks on the GPU (too many kernels share it)";
    case Awaited::kTile:
      return "to finish a tile";
    case Awaited::kRailCall:
      return "to make the same call";
    case Awaited::kRailItems:
      return "to send its tokens or sums";
    case Awaited::kRailRoom:
      return "to make room for more";
    case Awaited::kRailProtocol:
      return "to send what this build sends; run the same build on every rank";
  }
  return "";
}

int rank_missed(const LostReport& lost, const Topology& topology) {
  if (lost.of_group != 0) return lost.peer;
  switch (static_cast<Awaited>(lost.awaited)) {
    case Awaited::kRailCall:
    case Awaited::kRailItems:
    case Awaited::kRailRoom:
    case Awaited::kRailProtocol:
      return lost.peer * topology.ranks_per_node + topology.rail_of(topology.rank);
    default:
      return topology.node_of(topology.rank) * topology.ranks_per_node + lost.peer;
  }
}

std::string describe_lost(const LostReport& lost, const Topology& topology, std::int64_t timeout_ns,
                          const CallLog* calls) {
  // The kind of wait differs from rank to rank and means nothing: all ranks report the same text.
  if (lost.stopped != 0) return "a call on the GPU was stopped while it waited for other ranks";
  const auto awaited = static_cast<Awaited>(lost.awaited);
  if (awaited == Awaited::kTile) {
    return describe(UnfinishedTile{
        .rank = rank_missed(lost, topology),
        .local_expert = static_cast<std::int64_t>(lost.epoch >> 32),
        .tile = static_cast<std::int64_t>(lost.epoch & 0xFFFF'FFFF),
        .word = static_cast<std::int32_t>(lost.seen),
        .threshold = static_cast<std::int32_t>(lost.expected),
        .timeout_ns = static_cast<std::int64_t>(tile_timeout_ns(static_cast<std::uint64_t>(timeout_ns)))});
  }
  // Flags count epochs.
  const std::string seen = awaited == Awaited::kRows ? fmt::format("{} of {} rows", lost.seen, lost.expected)
                                                     : fmt::format("flag {}, expected {}", lost.seen, lost.expected);
  const int missed = rank_missed(lost, topology);
  // Hosts see only the calls of their own node.
  const bool is_known = calls != nullptr && topology.node_of(missed) == topology.node_of(topology.rank);
  const std::string other = is_known ? other_call(*calls, missed) : "";
  return fmt::format("exchange {} on the GPU: timed out after {:.0f} ms waiting for rank {} {} ({}){}", lost.epoch,
                     static_cast<double>(timeout_ns) / kNsPerMillisecond, missed, awaited_text(awaited), seen, other);
}

namespace {

/// A later call on a Routing that was refused has only the kind of fault (report_refused_route).
bool is_repeated(const FaultReport& fault, int num_ranks) {
  return std::all_of(fault.record_numbers, fault.record_numbers + num_ranks,
                     [](std::int64_t number) { return number < 0; });
}

/// Records of all ranks of the refused call, except for masked ranks; fewer if some are overwritten.
std::vector<std::optional<CallRecord>> find_records(const FaultReport& fault, const RankRecords& known) {
  const Topology& topology = known.topology;
  const int first_rank = topology.node_of(topology.rank) * topology.ranks_per_node;
  std::vector<std::optional<CallRecord>> records;
  for (int rank = 0; rank < topology.num_ranks; ++rank) {
    // Ranks of other nodes made the same call as their rail peer here, or in latency mode as this rank, unless another
    // record was found.
    const int local = topology.rail_of(rank);
    const bool in_node = rank - first_rank == local;
    std::int64_t number = fault.record_numbers[local];
    if (fault.of_group != 0) number = fault.record_numbers[in_node ? rank : topology.rank];
    const int holder = fault.of_group != 0 && !in_node ? topology.rank - first_rank : local;
    std::optional<CallRecord> record;
    if (known.found != nullptr && !in_node) {
      const FoundRecord& found = known.found[local * topology.num_nodes() + topology.node_of(rank)];
      if (found.present != 0) record = found.record;
    }
    if (!record) record = known.calls.find(first_rank + holder, number);
    if (record || number == kMaskedRecord) records.push_back(record);
  }
  return records;
}

Status describe_fault_of_route(const FaultReport& fault, const RankRecords& known, std::string_view operation) {
  switch (static_cast<Fault>(fault.fault)) {
    case Fault::kReported:
      return {};
    case Fault::kDisagreement: {
      if (is_repeated(fault, known.topology.ranks_per_node)) {
        return Status(
            ErrorCode::kInvalidArgument,
            fmt::format("{}: the call that made the Routing was refused, as the first wait after it said; use "
                        "the Routing of another",
                        operation));
      }
      const std::vector<std::optional<CallRecord>> records = find_records(fault, known);
      std::vector<const CallRecord*> pointers;
      if (records.size() == static_cast<std::size_t>(known.topology.num_ranks)) {
        for (const auto& record : records) pointers.push_back(record ? &*record : nullptr);
        if (Status status = check_agreement(pointers); !status.ok()) return status;
      }
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: ranks made different calls, or one was refused, and the details have been overwritten; "
                      "call wait after every call to see them",
                      operation));
    }
    case Fault::kBadId:
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("route: topk_idx[{}, {}] of rank {} is {}, expected -1 (no expert) or an expert from 0 "
                                "to {}",
                                fault.row, fault.column, fault.rank, fault.value, fault.limit),
                    fault.rank);
    case Fault::kBadHome:
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("route: placement: physical_to_logical_view[{}] of rank {} is {}, expected -1 (not in "
                                "use) or an expert from 0 to {}",
                                fault.row, fault.rank, fault.value, fault.limit),
                    fault.rank);
    case Fault::kMissingHome:
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("route: placement: no entry of physical_to_logical_view of rank {} is expert {}, "
                                "expected at least one home of each of {} experts; add one, or set allow_homeless",
                                fault.rank, fault.value, fault.limit + 1),
                    fault.rank);
    case Fault::kOtherHomes:
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("route: ranks disagree on placement: physical_to_logical_view of rank {} is not that "
                                "of rank 0; it must be the same on every rank",
                                fault.rank),
                    fault.rank);
    case Fault::kSlabCapacity:
      return plan::full_slab(fault.rank, fault.row, fault.value, fault.limit);
    case Fault::kNotRouted:
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: a Routing made during a capture was used before its graph ran; replay it first", operation));
    case Fault::kRowCapacity:
      return plan::too_many_rows(fault.rank, fault.value, fault.limit);
  }
  return Status(ErrorCode::kInternal,
                fmt::format("{}: unknown report {}; please report this bug", operation, fault.fault));
}

}  // namespace

Status describe_fault(const FaultReport& fault, const RankRecords& records, std::string_view operation) {
  Status status = describe_fault_of_route(fault, records, operation);
  return fault.latency != 0 ? as_error_of(to_string(Operation::kLatencyDispatch), status) : status;
}

}  // namespace ferry::cuda
