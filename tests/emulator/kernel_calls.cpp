/// Functions that kernels call on their thread, warp and block.

#include <cstring>

#include "emulator/fibers.hpp"

namespace ferry::emulator {

const ThreadPlace& place() { return fibers().current().place; }

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
  const unsigned lane = thread.place.thread.x % kWarpLanes;
  std::size_t idx = 0;
  while (idx < warp.meetings.size() && (warp.meetings[idx].mask & mask) == 0) ++idx;
  if (idx == warp.meetings.size()) warp.meetings.push_back({mask, 0, operation, {}});
  Meeting& meeting = warp.meetings[idx];
  if (meeting.mask != mask || std::strcmp(meeting.operation, operation) != 0 || (mask >> lane & 1U) == 0) {
    fibers().fail("lanes of a warp diverge: thread " + std::to_string(thread.place.thread.x) + " of block " +
                  std::to_string(thread.place.block.x) + " reaches " + operation + ", others are in " +
                  meeting.operation);
  }
  meeting.arrived |= 1U << lane;
  meeting.lanes[lane] = value;
  if (meeting.arrived != mask) {
    fibers().wait_in(operation);
    return thread.lanes;
  }
  for (int i = 0; i < kWarpLanes; ++i) {
    if ((mask >> i & 1U) == 0) continue;
    std::memcpy(warp.threads[i]->lanes, meeting.lanes, sizeof(meeting.lanes));
    if (warp.threads[i] != &thread) fibers().set_ready(*warp.threads[i]);
  }
  warp.meetings.erase(warp.meetings.begin() + static_cast<std::ptrdiff_t>(idx));
  if (!warp.polled) fibers().moved();  // lanes that only poll together make no progress
  warp.polled = false;
  return thread.lanes;
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
  return thread.vote;
}

void await_grid_before() {
  const Grid* const before = fibers().current().block->grid->before;
  while (before != nullptr && before->num_alive > 0) poll();
}

std::byte* dynamic_shared() { return fibers().current().block->shared; }

}  // namespace ferry::emulator
