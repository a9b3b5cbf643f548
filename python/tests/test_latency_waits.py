"""What calls of latency mode have waited for each rank, added to a tensor of the program's."""

from __future__ import annotations

import time

import torch
from ranks import run_ranks
from slabs import make_group, options_of
from world import World, make_world

LATE_RANK = 1
LATE_SECONDS = 0.002


def check_wait_times(rank: int, world: World, kind: str) -> None:
    group = make_group(rank, kind, world, 8)
    world = world.to(group.device)
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    sums = torch.zeros(world.num_ranks, dtype=torch.int64, device=group.device)
    before_ns = group.wait_times_ns
    for call in range(20):
        if rank == LATE_RANK:
            time.sleep(LATE_SECONDS)
        split = call % 2 == 0
        sent = group.latency_dispatch(x, ids, weights, split=split, wait_times_ns=sums, **options_of(world, 8))
        if split:
            sent.receive()
        combined = group.latency_combine(sent.x, sent, split=split, wait_times_ns=sums)
        if split:
            combined.receive()
    group.wait()
    if kind == "cpu":
        assert sums.tolist() == [now - then for now, then in zip(group.wait_times_ns, before_ns, strict=True)]
    assert sums[rank] == 0
    assert rank == LATE_RANK or sums[LATE_RANK] > 0
    group.destroy()


def test_what_calls_wait_for_a_late_rank(device: str) -> None:
    run_ranks(3, check_wait_times, make_world(3, 6, [5, 8, 6], hidden=128), device)
