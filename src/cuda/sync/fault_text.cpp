#include "cuda/sync/fault_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "core/checks.hpp"
#include "plan/route_plan.hpp"

namespace ferry::cuda {
namespace {

constexpr double kNsPerMillisecond = 1e6;

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
  }
  return "";
}

std::string other_call(const CallLog& calls, int peer) {
  const std::optional<CallLog::Difference> difference = calls.find_difference(peer);
  if (!difference) return "";
  return fmt::format("; rank {} called {} where rank {} called {}", difference->rank, to_string(difference->mine), peer,
                     to_string(difference->theirs));
}

}  // namespace

std::string describe_lost(const LostReport& lost, std::int64_t timeout_ns, const CallLog* calls) {
  // Which wait it was differs from rank to rank and means nothing: all are to say the same.
  if (lost.stopped != 0) return "a call on the GPU was stopped while it waited for other ranks";
  const auto awaited = static_cast<Awaited>(lost.awaited);
  // Flags count epochs.
  const std::string seen = awaited == Awaited::kRows ? fmt::format("{} of {} rows", lost.seen, lost.expected)
                                                     : fmt::format("flag {}, expected {}", lost.seen, lost.expected);
  const std::string other = calls == nullptr ? "" : other_call(*calls, lost.peer);
  return fmt::format("exchange {} on the GPU: timed out after {:.0f} ms waiting for rank {} {} ({}){}", lost.epoch,
                     static_cast<double>(timeout_ns) / kNsPerMillisecond, lost.peer, awaited_text(awaited), seen,
                     other);
}

namespace {

/// A later call on a Routing that was refused has only the kind of fault (report_refused_route).
bool is_repeated(const FaultReport& fault, int num_ranks) {
  return std::all_of(fault.record_numbers, fault.record_numbers + num_ranks,
                     [](std::int64_t number) { return number < 0; });
}

Status describe_fault_of_route(const FaultReport& fault, const CallLog& call_log, int num_ranks,
                               std::string_view operation) {
  switch (static_cast<Fault>(fault.fault)) {
    case Fault::kDisagreement: {
      if (is_repeated(fault, num_ranks)) {
        return Status(
            ErrorCode::kInvalidArgument,
            fmt::format("{}: the call that made the Routing was refused, as the first wait after it said; use "
                        "the Routing of another",
                        operation));
      }
      std::vector<CallRecord> records;
      std::vector<const CallRecord*> pointers;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::optional<CallRecord> record = call_log.find(rank, fault.record_numbers[rank]);
        if (record) records.push_back(*record);
      }
      if (records.size() == static_cast<std::size_t>(num_ranks)) {
        for (const CallRecord& record : records) pointers.push_back(&record);
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

Status describe_fault(const FaultReport& fault, const CallLog& call_log, int num_ranks, std::string_view operation) {
  Status status = describe_fault_of_route(fault, call_log, num_ranks, operation);
  return fault.latency != 0 ? as_error_of(to_string(Operation::kLatencyDispatch), status) : status;
}

}  // namespace ferry::cuda
