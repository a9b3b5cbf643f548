/// Meetings of a team's hosts: barriers, exchanges, and the last meeting.

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "one_sided/fabric.hpp"
#include "one_sided/words.hpp"

namespace ferry::one_sided {
namespace {

/// Calls that make exchanges.
constexpr std::string_view kCollectives = "allocate, free or split";

/// Layout of a word of `arrived`: lowest, one bit for each kind of meeting that the mate, and the ranks that it has
/// heard from, have reached; above them the number of the meeting.
constexpr int kKindBits = 8;
constexpr std::uint64_t kKinds = (std::uint64_t{1} << kKindBits) - 1;

std::uint64_t number_in(const std::uint64_t* word) { return load(word) >> kKindBits; }

}  // namespace

std::size_t Fabric::arrived_offset(int slot, std::uint64_t number, std::size_t step) {
  return offsetof(Control, arrived) +
         ((static_cast<std::size_t>(slot) * kMeetingsAtOnce + number % kMeetingsAtOnce) * kMaxSteps + step) *
             sizeof(std::uint64_t);
}

Entry* Fabric::entries(int rank, int slot) const {
  const std::size_t first = static_cast<std::size_t>(slot) * all_ranks_.size();
  return reinterpret_cast<Entry*>(memory_of(rank) + sizeof(Control)) + first;
}

Status Fabric::set(int rank, std::size_t offset, std::uint64_t value, std::string_view operation) {
  const net::AtomicOp op{.kind = net::AtomicOp::Kind::kSet, .offset = offset, .operand = value};
  if (std::byte* theirs = memory_of(rank); theirs != nullptr) {
    net::apply_atomic(theirs, op);
    ring(rank, offset);
    return {};
  }
  return issue({.kind = NetworkRequest::Kind::kAtomic, .peer = rank, .op = op, .counts = false}, operation);
}

Status Fabric::wait_for_mates(const TeamState& team, std::string_view operation, Meeting kind) {
  const bool last = kind == Meeting::kLast;
  const auto num_mates = static_cast<int>(team.ranks.size());
  if (!std::exchange(team.in_barrier, true)) {
    ++team.num_barriers;
    team.num_told = 0;
    team.kinds = static_cast<std::uint64_t>(kind);
  }
  const std::uint64_t number = team.num_barriers;
  const auto& words =
      control(topology_.rank).arrived[static_cast<std::size_t>(team.my_slot())][number % kMeetingsAtOnce];
  const std::uint64_t* finished = &control(topology_.rank).finished;
  const auto place_after = [&](int steps) {
    return static_cast<std::size_t>(((team.my_place + steps) % num_mates + num_mates) % num_mates);
  };
  std::size_t step = 0;
  for (int distance = 1; distance < num_mates; distance *= 2, ++step) {
    const std::size_t told = place_after(distance);
    Status status = step < team.num_told ? Status()
                                         : set(team.ranks[told], arrived_offset(team.slots[told], number, step),
                                               number << kKindBits | team.kinds, operation);
    if (status.ok()) team.num_told = std::max(team.num_told, step + 1);
    const int awaited = team.ranks[place_after(-distance)];
    if (status.ok()) {
      status = wait({.operation = operation,
                     .what =
                         [&] {
                           return Awaited{fmt::format("rank {} (of {} in the team)", awaited, num_mates), awaited};
                         },
                     .ranks = team.ranks,
                     .timeout_ns = timeout_ns_,
                     .word = last ? kAnyWord : arrived_offset(team.my_slot(), number, step),
                     .team = &team},
                    [&] { return number_in(&words[step]) >= number || (last && load(finished) != 0); });
    }
    // A rank that has seen all others arrive may have left meanwhile; it set `finished` before.
    if (!status.ok() && !(last && load(finished) != 0)) return conclude(team, operation, status);
    // This word may be missing if a rank left; it then holds the kinds of the meeting before last.
    const std::uint64_t word = load(&words[step]);
    if (word >> kKindBits >= number) team.kinds |= word & kKinds;
  }
  team.in_barrier = false;
  note_through(team);
  // All ranks have the same set of kinds here.
  if (last || (team.kinds & (team.kinds - 1)) == 0) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: ranks disagree: some call barrier, others {}; make collective calls in the same order "
                            "on every rank",
                            operation, kCollectives));
}

/// Refuses a call that would leave the team's mates waiting in the previous one.
Status Fabric::refuse(const TeamState& team, std::string_view operation, std::string_view earlier) const {
  if (const std::optional<Finding> loss = find_loss(team.ranks, &team); loss) {
    const Status lost = status_of(*loss);
    return Status(lost.code(), fmt::format("{}: {}", operation, lost.message()), lost.peer());
  }
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: this rank's last {} of the team ended by its deadline and is unfinished, and other "
                  "ranks may wait for it; repeat that call with equal arguments first, or destroy this OneSided",
                  operation, earlier));
}

Status Fabric::barrier(const TeamState& team, std::string_view operation) {
  if (team.exchange_step != ExchangeStep::kNone) return refuse(team, operation, kCollectives);
  return wait_for_mates(team, operation, Meeting::kBarrier);
}

/// Writes the entry into the memory of all ranks of the team.
Status Fabric::show(const TeamState& team, const Entry& mine, std::string_view operation) {
  const auto my_idx = static_cast<std::size_t>(topology_.rank);
  for (std::size_t place = 0; place < team.ranks.size(); ++place) {
    const int rank = team.ranks[place];
    const int slot = team.slots[place];
    if (memory_of(rank) != nullptr) {
      entries(rank, slot)[my_idx] = mine;
      continue;
    }
    const auto offset =
        static_cast<std::size_t>(reinterpret_cast<std::byte*>(entries(topology_.rank, slot) + my_idx) - memory_);
    Entry copy = mine;
    if (Status status = issue({.kind = NetworkRequest::Kind::kPut,
                               .peer = rank,
                               .offset = offset,
                               .local = copy.data(),
                               .num_bytes = copy.size(),
                               .copy_source = true},
                              operation);
        !status.ok()) {
      return status;
    }
  }
  return quiet(operation, &team);
}

Result<std::vector<Entry>> Fabric::exchange(const TeamState& team, const Entry& mine, std::string_view operation) {
  ExchangeStep& step = team.exchange_step;
  if (step == ExchangeStep::kNone && team.in_barrier) return refuse(team, operation, "barrier");
  if (step >= ExchangeStep::kMet && team.shown != mine) return refuse(team, operation, kCollectives);
  if (step < ExchangeStep::kMet) {
    team.shown = mine;
    step = ExchangeStep::kBegun;
    // Until this barrier, ranks of the team may read the last entries; after the second barrier all new ones are there.
    Status status = wait_for_mates(team, operation, Meeting::kExchange);
    if (!status.ok() && !team.in_barrier) step = ExchangeStep::kNone;  // over: other ranks made another call
    if (!status.ok()) return status;
    step = ExchangeStep::kMet;
  }
  if (step == ExchangeStep::kMet) {
    // Repeated after a failure: no rank reads the entry before this rank enters the second barrier.
    if (Status status = show(team, mine, operation); !status.ok()) return conclude(team, operation, status);
    step = ExchangeStep::kShown;
  }
  if (Status status = wait_for_mates(team, operation, Meeting::kShown); !status.ok()) return status;
  step = ExchangeStep::kNone;
  std::vector<Entry> all;
  const Entry* shown = entries(topology_.rank, team.my_slot());
  for (const int rank : team.ranks) all.push_back(shown[static_cast<std::size_t>(rank)]);
  return all;
}

Status Fabric::leave(const TeamState& world, std::string_view operation) {
  // Finish a call that ended by its deadline first: mates then complete it and reach their last meeting later.
  Status status;
  if (world.exchange_step != ExchangeStep::kNone) {
    const Entry mine = world.shown;
    status = exchange(world, mine, operation).status();
    // Other ranks made another call: the exchange is over and has no result.
    const bool is_over = world.exchange_step == ExchangeStep::kNone && !world.in_barrier;
    if (is_over && status.code() == ErrorCode::kInvalidArgument) status = {};
  } else if (world.in_barrier) {
    status = wait_for_mates(world, operation, Meeting::kLast);
  }
  if (status.ok() || load(&control(topology_.rank).finished) != 0) {
    status = wait_for_mates(world, operation, Meeting::kLast);
  }
  if (status.ok()) {
    for (const int rank : world.ranks) {
      if (rank == topology_.rank) continue;
      // A failure is harmless: another rank has set the word of a rank that is gone.
      (void)set(rank, offsetof(Control, finished), 1, operation);
    }
  }
  if (status.ok()) {
    if (driver_ != nullptr) say_goodbye();
    driver_.reset();
  }
  abandon();
  return status;
}

}  // namespace ferry::one_sided
