#include "core/other_call.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string_view>
#include <vector>

#include "core/flight_snapshot.hpp"

namespace ferry {
namespace {

bool leaves_group_usable(ErrorCode code) {
  return code == ErrorCode::kInvalidArgument || code == ErrorCode::kUnsupported || code == ErrorCode::kCapacity;
}

/// Collective calls of one rank that can be compared with those of other ranks.
struct History {
  int rank = 0;
  /// Oldest first. Ends with the error that broke the group: a program may end, or try anything, after it.
  std::vector<const RecordedCall*> calls{};
  std::int64_t settled = 0;  ///< ranks that differed in calls up to this number have gone on since

  explicit History(const RecordedRank& record) : rank(record.rank) {
    std::int64_t refused = 0;
    for (const RecordedCall& call : record.calls) {
      const bool collective = is_collective(call.operation);
      if (collective) calls.push_back(&call);
      // A program that destroys its group after an error does not go on.
      if (collective && call.operation != "destroy") settled = std::max(settled, refused);
      if (call.phase == CallPhase::kFailed) {
        if (!leaves_group_usable(call.code)) return;
        if (call.code == ErrorCode::kInvalidArgument) refused = call.number;  // a difference is refused with this code
      } else if (call.phase == CallPhase::kReturned && (collective || call.operation == "wait")) {
        // All ranks have made this call. A wait proves less: the last call's error may have been returned before it.
        settled = std::max(settled, collective ? call.number : call.number - 1);
      }
    }
  }

  const RecordedCall* find(std::int64_t number) const {
    const auto found = std::ranges::find(calls, number, &RecordedCall::number);
    return found == calls.end() ? nullptr : *found;
  }

  /// Operation that followed the longest part of this history that ends as it does before call `number`, the latest
  /// such part. Programs repeat their steps, so it is the expected one. Empty: the last call was the first of its kind.
  std::string_view expected(std::int64_t number) const {
    const auto now = std::ranges::find(calls, number, &RecordedCall::number);
    std::string_view operation;
    std::ptrdiff_t longest = 1;
    for (auto before = calls.begin(); before != now; ++before) {
      const auto same = [](const RecordedCall* left, const RecordedCall* right) {
        return left->operation == right->operation;
      };
      const auto [end, unused] =
          std::mismatch(std::reverse_iterator(before), calls.rend(), std::reverse_iterator(now), calls.rend(), same);
      const std::ptrdiff_t length = end - std::reverse_iterator(before);
      if (length < longest) continue;
      longest = length;
      operation = (*before)->operation;
    }
    return operation;
  }
};

/// Ranks that made the same call under a number.
struct Party {
  std::string_view operation;
  std::vector<const History*> ranks;

  int first_rank() const { return ranks.front()->rank; }
  /// Whether none of the ranks has made this call after the same calls before.
  bool departs(std::int64_t number) const {
    return std::ranges::all_of(ranks, [this, number](const History* rank) {
      const std::string_view usual = rank->expected(number);
      return !usual.empty() && usual != operation;
    });
  }
};

/// Parties of a call number, the one at fault first: that of the fewest ranks; of equally few the only one that departs
/// from its own history, or else the one without the lowest rank.
std::vector<Party> parties_of(const std::vector<History>& histories, std::int64_t number) {
  std::vector<Party> parties;
  for (const History& history : histories) {
    const RecordedCall* const call = history.find(number);
    if (call == nullptr) continue;
    auto party = std::ranges::find(parties, call->operation, &Party::operation);
    if (party == parties.end()) party = parties.insert(party, Party{call->operation, {}});
    party->ranks.push_back(&history);
  }
  std::ranges::sort(parties, [](const Party& left, const Party& right) {
    if (left.ranks.size() != right.ranks.size()) return left.ranks.size() < right.ranks.size();
    return left.first_rank() > right.first_rank();
  });
  const auto is_odd = [&](const Party& party) {
    return party.ranks.size() == parties.front().ranks.size() && party.departs(number);
  };
  if (parties.size() > 1 && std::ranges::count_if(parties, is_odd) == 1) {
    const auto odd = std::ranges::find_if(parties, is_odd);
    std::rotate(parties.begin(), odd, odd + 1);
  }
  return parties;
}

/// Whether a route was refused on some ranks only. These leave out the calls with its Routing (docs/errors.md), so
/// numbers beyond it are of different calls.
bool puts_numbers_out_of_step(const Party& party, std::int64_t number) {
  const auto refused = std::ranges::count_if(
      party.ranks, [number](const History* rank) { return rank->find(number)->phase == CallPhase::kFailed; });
  return party.operation == "route" && refused != 0 && refused != std::ssize(party.ranks);
}

}  // namespace

std::optional<Diagnosis> find_other_call(const RecordedGroup& group) {
  std::vector<History> histories;
  std::set<std::int64_t> numbers;
  std::int64_t settled = 0;
  for (const RecordedRank& rank : group.ranks) {
    const History& history = histories.emplace_back(rank);
    for (const RecordedCall* call : history.calls) numbers.insert(call->number);
    settled = std::max(settled, history.settled);
  }
  for (const std::int64_t number : numbers) {
    const std::vector<Party> parties = parties_of(histories, number);
    if (parties.size() > 1 && number > settled) {
      const Party& odd = parties.front();
      const Party& usual = parties.back();
      std::vector<int> others;
      for (const History* history : usual.ranks) others.push_back(history->rank);
      return Diagnosis{DiagnosisKind::kOtherCall, odd.first_rank(), usual.first_rank(),
                       fmt::format("rank {} called {} as call {}, where {} called {}", odd.first_rank(), odd.operation,
                                   number, name_ranks(others), usual.operation)};
    }
    if (parties.size() == 1 && puts_numbers_out_of_step(parties.front(), number)) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace ferry
