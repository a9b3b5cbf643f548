"""Signals, Ctrl-C among them, are answered while a call waits for other ranks."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist
from ranks import run_ranks
from world import World, make_world

import ferry

SIGNAL_AFTER_S = 0.2


class Answered(Exception):
    """What the program's handler raises."""


def answer(_signal: int, _frame: object) -> None:
    raise Answered


def interrupt_one(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60)

    def route() -> ferry.Routing:
        return group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)

    route()
    if rank == 0:
        signal.signal(signal.SIGALRM, answer)
        signal.setitimer(signal.ITIMER_REAL, SIGNAL_AFTER_S)
        with pytest.raises(Answered):  # the other rank comes only after it
            route()
        with pytest.raises(ferry.PeerLost, match="rank 0 waits no longer"):
            route()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(ferry.PeerLost, match="rank 0 waits no longer") as lost:
            for _ in range(2):  # the first may have all that it needs of the other rank
                route()
        assert lost.value.peer == 0
    dist.barrier()
    with pytest.raises(ferry.PeerLost):
        group.destroy()


def test_a_handler_that_raises_ends_the_wait() -> None:
    run_ranks(2, interrupt_one, make_world(2, 6, [7, 4]))


def answer_and_go_on(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60)
    if rank == 0:
        answered: list[int] = []

        def note(number: int, _frame: object) -> None:
            answered.append(number)
            dist.barrier()  # the other rank's call waits for this handler

        signal.signal(signal.SIGALRM, note)
        signal.setitimer(signal.ITIMER_REAL, SIGNAL_AFTER_S)
    else:
        dist.barrier()
    group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)
    if rank == 0:
        assert answered == [signal.SIGALRM]
    group.destroy()


def test_a_handler_that_returns_leaves_the_call_alone() -> None:
    run_ranks(2, answer_and_go_on, make_world(2, 6, [7, 4]))
