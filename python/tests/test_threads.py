"""Calls of one group from several threads: they take turns, and destroy waits for the running call."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from world import World, make_world

import ferry

NUM_THREADS = 3
NUM_CALLS = 100


def dispatch_from_threads(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60)
    routing = group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)
    expected = group.dispatch(routing, world.x[rank]).x
    failed: list[BaseException] = []

    def dispatch() -> None:
        try:
            for _ in range(NUM_CALLS):
                assert torch.equal(group.dispatch(routing, world.x[rank]).x, expected)
        except BaseException as error:  # for the test's own thread to raise
            failed.append(error)

    threads = [threading.Thread(target=dispatch) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    group.destroy()


def test_equal_calls_of_several_threads() -> None:
    run_ranks(2, dispatch_from_threads, make_world(2, 6, [7, 4]))


def destroy_during_a_call(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60)

    def call() -> None:
        # Refused if destroy is first, else ended by the other rank's destroy.
        with pytest.raises(ferry.FerryError):
            group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)

    if rank == 0:
        thread = threading.Thread(target=call)
        thread.start()
        with pytest.raises(ferry.FerryError):
            while True:
                group.destroy()
        thread.join()
    else:
        with pytest.raises(ferry.FerryError):
            while True:
                group.destroy()


def test_destroy_while_another_thread_waits() -> None:
    run_ranks(2, destroy_during_a_call, make_world(2, 6, [7, 4]))
