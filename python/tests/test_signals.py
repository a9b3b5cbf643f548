"""Signals, Ctrl-C among them, are handled while a call waits for other ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from world import World, make_world

import ferry

SIGNAL_AFTER_S = 0.2


class Answered(Exception):
    """Error that the program's handler raises."""


def answer(_signal: int, _frame: object) -> None:
    raise Answered


def arm(handler: Callable[[int, object], None]) -> None:
    """The handler runs while this rank waits in the call that follows."""
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_AFTER_S)


def test_a_handler_that_raises_ends_balance() -> None:
    loads = torch.arange(64).repeat(1 << 18, 1)  # takes far longer than the signal
    before = signal.getsignal(signal.SIGALRM)
    arm(answer)
    try:
        with pytest.raises(Answered):
            ferry.balance(loads, num_replicas=66, num_ranks=6)
    finally:
        signal.signal(signal.SIGALRM, before)


def make_calls(group: ferry.Group, rank: int, world: World) -> dict[str, Callable[[], object]]:
    """Every call that waits for other ranks."""

    def route() -> ferry.Routing:
        return group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)

    routing = route()
    received = group.dispatch(routing, world.x[rank])
    slab = group.latency_dispatch(world.x[rank], world.topk_idx[rank], num_experts=world.num_experts, max_tokens=8)
    return {
        "route": route,
        "dispatch": lambda: group.dispatch(routing, world.x[rank]),
        "combine": lambda: group.combine(routing, received.x),
        "latency_dispatch": lambda: group.latency_dispatch(
            world.x[rank], world.topk_idx[rank], num_experts=world.num_experts, max_tokens=8
        ),
        "latency_combine": lambda: group.latency_combine(slab.x, slab, world.topk_weights[rank]),
    }


def end_a_wait(rank: int, world: World, name: str, ranks_per_node: int) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60, latency_bytes=1 << 20, ranks_per_node=ranks_per_node)
    calls = make_calls(group, rank, world)
    if rank == 0:
        arm(answer)
        with pytest.raises(Answered):
            try:
                calls[name]()  # the other rank comes only after it
            finally:
                group.destroy()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(ferry.PeerLost, match="rank 0 waits no longer") as lost:
            calls[name]()  # may have all that it needs of the other rank
            calls["route"]()
        assert lost.value.peer == 0
    dist.barrier()


@pytest.mark.parametrize("name", ["route", "dispatch", "combine", "latency_dispatch", "latency_combine"])
def test_a_handler_that_raises_ends_the_wait(name: str) -> None:
    run_ranks(2, end_a_wait, make_world(2, 6, [7, 4]), name, 2)


@pytest.mark.parametrize("name", ["route", "dispatch"])
def test_a_handler_that_raises_ends_the_wait_for_other_nodes(name: str) -> None:
    run_ranks(2, end_a_wait, make_world(2, 6, [7, 4]), name, 1)


def end_destroy(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60)
    if rank == 0:
        arm(answer)
        with pytest.raises(Answered):
            group.destroy()
    dist.barrier()
    dist.barrier()


def test_a_handler_that_raises_ends_destroy() -> None:
    run_ranks(2, end_destroy, make_world(2, 6, [7, 4]))


def end_a_refusal(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60, arena_bytes=1 << 20)
    other = ferry.Group(dist.group.WORLD, timeout=60)
    routing = group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)
    too_large = torch.ones(len(world.x[rank]), 1 << 20)
    if rank == 0:
        arm(answer)
        with pytest.raises(Answered):
            group.dispatch(routing, too_large)
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(ferry.FerryError):
            group.dispatch(routing, too_large)
    with pytest.raises(ferry.InvalidArgument):  # not the error of the handler again
        other.route(world.topk_idx[rank], num_experts=-3)
    dist.barrier()


def test_a_handler_that_raises_ends_the_wait_for_others_to_be_told_of_a_refusal() -> None:
    run_ranks(2, end_a_refusal, make_world(2, 6, [7, 4]))


class InterruptedComm:
    """An mpi4py communicator that is interrupted as it waits."""

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 2

    def allgather(self, _mine: bytes) -> list[bytes]:
        raise KeyboardInterrupt


def test_ctrl_c_while_a_group_is_created() -> None:
    with pytest.raises(KeyboardInterrupt):
        ferry.Group(comm=InterruptedComm(), device="cpu")


def call_its_own_group(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60, latency_bytes=1 << 20)

    def send(split: bool) -> ferry.LatencyDispatched:
        return group.latency_dispatch(
            world.x[rank].clone(),  # no other reference keeps it
            world.topk_idx[rank],
            num_experts=world.num_experts,
            max_tokens=8,
            zero_padding=True,
            split=split,
        )

    sent = send(True)
    if rank == 0:
        refused: list[str] = []

        def call(_signal: int, _frame: object) -> None:
            for wanted in (group.destroy, sent.receive, group.trim):
                with pytest.raises(ferry.InvalidArgument) as error:
                    wanted()
                refused.append(str(error.value))
            dist.barrier()  # the other rank's call waits for this handler

        arm(call)
    else:
        dist.barrier()
    group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)
    if rank == 0:
        assert len(refused) == 3
        assert all("handler" in text for text in refused)
    sent.receive()
    assert torch.equal(sent.x, send(False).x)
    group.destroy()


def test_a_handler_cannot_call_the_group_that_waits() -> None:
    run_ranks(2, call_its_own_group, make_world(2, 6, [7, 4]))


def answer_and_go_on(rank: int, world: World) -> None:
    group = ferry.Group(dist.group.WORLD, timeout=60)
    if rank == 0:
        answered: list[int] = []

        def note(number: int, _frame: object) -> None:
            answered.append(number)
            dist.barrier()  # the other rank's call waits for this handler

        arm(note)
    else:
        dist.barrier()
    group.route(world.topk_idx[rank], world.topk_weights[rank], num_experts=world.num_experts)
    if rank == 0:
        assert answered == [signal.SIGALRM]
    group.destroy()


def test_a_handler_that_returns_leaves_the_call_alone() -> None:
    run_ranks(2, answer_and_go_on, make_world(2, 6, [7, 4]))


def destroy_its_own_buffer(rank: int, world: World) -> None:
    deep_ep = pytest.importorskip("deep_ep")
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 24, 0, device="cpu")

    def dispatch() -> None:
        ids = world.topk_idx[rank].long()
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, world.num_experts)
        buffer.dispatch(
            world.x[rank].bfloat16(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=world.topk_weights[rank],
        )

    if rank == 0:

        def destroy(_signal: int, _frame: object) -> None:
            with pytest.warns(UserWarning, match="handler"):
                buffer.destroy()
            dist.barrier()  # the other rank's call waits for this handler

        arm(destroy)
    else:
        dist.barrier()
    dispatch()
    dispatch()
    buffer.destroy()


def test_a_handler_cannot_destroy_the_buffer_that_waits() -> None:
    run_ranks(2, destroy_its_own_buffer, make_world(2, 6, [7, 4]))
