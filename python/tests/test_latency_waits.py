"""Waits of calls of latency mode for each rank, added to a tensor of the program."""

from __future__ import annotations

import time

import torch
from ranks import all_ranks, run_ranks
from slabs import make_group, options_of
from world import World, make_world

LATE_RANK = 1
LATE_SECONDS = 0.002
# In at least one of this many calls every other rank arrives before the late one, even on a busy machine.
MOST_CALLS = 400


def check_wait_times(rank: int, world: World, kind: str) -> None:
    group = make_group(rank, kind, world, 8)
    world = world.to(group.device)
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    sums = torch.zeros(world.num_ranks, dtype=torch.int64, device=group.device)
    before_ns = group.wait_times_ns
    for call in range(MOST_CALLS):
        group.wait()
        assert sums[rank] == 0
        if all_ranks(call >= 2 and (rank == LATE_RANK or bool(sums[LATE_RANK] > 0))):
            break
        if rank == LATE_RANK:
            time.sleep(LATE_SECONDS)
        split = call % 2 == 0
        sent = group.latency_dispatch(x, ids, weights, split=split, wait_times_ns=sums, **options_of(world, 8))
        if split:
            sent.receive()
        combined = group.latency_combine(sent.x, sent, split=split, wait_times_ns=sums)
        if split:
            combined.receive()
    else:
        raise AssertionError(f"not every rank has waited for the late one: {sums.tolist()}")
    if kind == "cpu":
        assert sums.tolist() == [now - then for now, then in zip(group.wait_times_ns, before_ns, strict=True)]
    group.destroy()


def test_what_calls_wait_for_a_late_rank(device: str) -> None:
    run_ranks(3, check_wait_times, make_world(3, 6, [5, 8, 6], hidden=128), device)
