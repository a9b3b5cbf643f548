/// Functions that kernels call on their thread, warp and block.

#include <cstring>

#include "emulator/fibers.hpp"

namespace ferry::emulator {

void poll() {
  Thread& thread = fibers().current();
  thread.warp->polled = true;
  fibers().poll();
}

void about_to_store() {
  fibers().moved();
  fibers().maybe_give_turn();
}

const std::uint64_t* meet_lanes(const char* operation, std::uint32_t mask, std::uint64_t value) {
  Thread& thread = fibers().current();
  Warp& warp = *thread.warp;
  fibers().forget_meeting(thread);
  const unsigned lane = thread.place.thread.x % kWarpLanes;
  int idx = 0;
  while (idx < warp.num_meetings && (warp.meetings[idx]->mask & mask) == 0) ++idx;
  if (idx == warp.num_meetings) warp.meetings[warp.num_meetings++] = &fibers().begin_meeting(mask, operation);
  Meeting& meeting = *warp.meetings[idx];
  const bool same = meeting.operation == operation || std::strcmp(meeting.operation, operation) == 0;
  if (meeting.mask != mask || !same || (mask >> lane & 1U) == 0) {
    fibers().fail("lanes of a warp diverge: thread " + std::to_string(thread.place.thread.x) + " of block " +
                  std::to_string(thread.place.block.x) + " reaches " + operation + ", others are in " +
                  meeting.operation);
  }
  meeting.arrived |= 1U << lane;
  meeting.lanes[lane] = value;
  thread.met = &meeting;
  if (meeting.arrived != mask) {
    fibers().wait_in(operation);
    return meeting.lanes;
  }
  warp.meetings[idx] = warp.meetings[--warp.num_meetings];
  for (int i = 0; i < kWarpLanes; ++i) {
    if ((mask >> i & 1U) != 0 && warp.threads[i] != &thread) fibers().set_ready(*warp.threads[i]);
  }
  if (!warp.polled) fibers().moved();  // lanes that only poll together make no progress
  warp.polled = false;
  return meeting.lanes;
}

BlockVote meet_block(bool vote) {
  Thread& thread = fibers().current();
  Block& block = *thread.block;
  block.vote.all = block.vote.all && vote;
  block.vote.any = block.vote.any || vote;
  block.vote.count += vote ? 1 : 0;
  if (++block.num_arrived == block.num_alive) {
    fibers().release(block, &thread);
  } else {
    fibers().wait_in(kMeetsBlock);
  }
  return block.voted;
}

void await_grid_before() {
  const Grid* const before = fibers().current().block->grid->before;
  while (before != nullptr && before->num_alive > 0) poll();
}

std::byte* dynamic_shared() { return fibers().current().block->shared; }

}  // namespace ferry::emulator
