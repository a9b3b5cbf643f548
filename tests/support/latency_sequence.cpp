#include "support/latency_sequence.hpp"

#include <algorithm>

namespace ferry::test {

LatencySequence::LatencySequence(RankContext& context, Group& group, std::span<const PreparedCase> cases,
                                 std::span<const PreparedCase> others, std::uint64_t seed)
    : context_(context),
      group_(group),
      cases_(cases),
      others_(others),
      plan_(seed),
      mine_(1000 * seed + static_cast<std::uint64_t>(context.rank())) {}

bool LatencySequence::step() {
  std::optional<Open>& slot = open_[plan_() % open_.size()];
  const std::uint64_t drawn = plan_();
  bool ok = true;
  if (!slot) {
    ok = begin(slot, drawn);
  } else if (drawn % 8 == 0) {
    ok = slot->phase == Phase::kReady || receive(*slot);
    slot.reset();
  } else if (drawn % 16 == 1 && !others_.empty()) {
    const std::size_t failures = context_.failures().size();
    check_case(context_, group_, others_[plan_() % others_.size()]);
    ok = context_.failures().size() == failures;
  } else {
    ok = combine(*slot, drawn);
  }
  while (ok && mine_() % 2 == 0) {
    if (std::ranges::none_of(open_, [](const auto& open) { return open && open->phase != Phase::kReady; })) break;
    ok = receive_any({});
  }
  return ok;
}

bool LatencySequence::finish_all() {
  for (std::optional<Open>& slot : open_) {
    if (slot && slot->phase != Phase::kReady && !receive(*slot)) return false;
    slot.reset();
  }
  return true;
}

bool LatencySequence::begin(std::optional<Open>& slot, std::uint64_t drawn) {
  ++num_calls_;
  const PreparedCase& one = cases_[plan_() % cases_.size()];
  const std::size_t dispatch_idx = plan_() % one.dispatches.size();
  const bool split = drawn % 4 != 0;
  if (split && !make_room(Phase::kDispatchSent)) return false;
  slot.emplace(Open{LatencyExchange(context_, group_, one, dispatch_idx)});
  if (!split) return slot->exchange.dispatch();
  slot->phase = Phase::kDispatchSent;
  return slot->exchange.send_dispatch();
}

bool LatencySequence::combine(Open& open, std::uint64_t drawn) {
  ++num_calls_;
  const std::size_t combine_idx = plan_() % open.exchange.prepared().combines.size();
  const bool split = drawn % 3 != 0;
  if (open.phase != Phase::kReady && !receive(open)) return false;
  if (!split) return open.exchange.combine(combine_idx);
  if (!make_room(Phase::kCombineSent)) return false;
  open.phase = Phase::kCombineSent;
  return open.exchange.send_combine(combine_idx);
}

bool LatencySequence::receive(Open& open) {
  open.phase = Phase::kReady;
  return open.exchange.receive();
}

/// Receives a random call in flight, in `phase` if one is given.
bool LatencySequence::receive_any(std::optional<Phase> phase) {
  for (;;) {
    std::optional<Open>& slot = open_[mine_() % open_.size()];
    if (slot && slot->phase != Phase::kReady && (!phase || slot->phase == *phase)) return receive(*slot);
  }
}

bool LatencySequence::make_room(Phase phase) {
  const auto in_flight =
      std::ranges::count_if(open_, [phase](const auto& open) { return open && open->phase == phase; });
  return in_flight < kMaxLatencyCallsInFlight || receive_any(phase);
}

}  // namespace ferry::test
