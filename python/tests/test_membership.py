"""Ranks are lost, leave and join, and those that are left go on with right results."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import DEADLINE_S, device_of, run_ranks
from test_signals import Answered, answer, arm

import ferry

NUM_RANKS = 3
EXPERTS_PER_MEMBER = 2
NUM_EXPERTS = NUM_RANKS * EXPERTS_PER_MEMBER
LOST_STEP, NUM_STEPS = 3, 6
SECRET = "of this test"
TIMEOUT_S = 60
LOSSES = (ferry.PeerLost, ferry.Timeout, ferry.TransportError)


class Alone:
    """A communicator of one rank, with the methods of mpi4py's."""

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 1

    def allgather(self, value: bytes) -> list[bytes]:
        return [value]


def inputs(step: int, member: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Small integers: their sums are exact, so that results are the same bits in any order of the ranks."""
    generator = torch.Generator().manual_seed(100 * step + member)
    x = torch.randint(-8, 9, (7, 16), generator=generator).float()
    topk_idx = torch.randint(-1, NUM_EXPERTS, (7, 3), generator=generator)
    weights = torch.randint(1, 5, (7, 3), generator=generator).float()
    return x.to(device), topk_idx.to(device), weights.to(device)


def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
    return (number + 2) * rows


def homes_left(topk_idx: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
    """The choices without those of experts whose home is gone."""
    homes = topk_idx // EXPERTS_PER_MEMBER
    return torch.where(torch.isin(homes, torch.tensor(ids, device=homes.device)), topk_idx, -1)


def reference(step: int, member: int, ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    x, topk_idx, weights = inputs(step, member, device)
    out = torch.zeros_like(x)
    for number in range(NUM_EXPERTS):
        gate = torch.where(homes_left(topk_idx, ids) == number, weights, 0).sum(1, keepdim=True)
        out += gate * expert(number, x)
    return out


class Layer:
    """A layer over a group of the members' view."""

    def __init__(self, members: ferry.Membership, kind: str) -> None:
        ids = members.view.ids
        self.ids, self.member = ids, ids[members.view.rank]
        self.group = members.group(device=device_of(self.member, kind), timeout=TIMEOUT_S)
        assert (self.group.rank, self.group.num_ranks) == (members.view.rank, len(ids))
        homes = [number // EXPERTS_PER_MEMBER for number in range(NUM_EXPERTS)]
        self.expert_to_rank = [ids.index(home) if home in ids else 0 for home in homes]

    def run(self, step: int, ends: bool = False) -> None:
        """Runs a step and checks its result. ends: this process is killed in the middle of it."""
        x, topk_idx, weights = inputs(step, self.member, self.group.device)
        routing = self.group.route(
            homes_left(topk_idx, self.ids),
            weights,
            num_experts=NUM_EXPERTS,
            layout="experts",
            expert_to_rank=self.expert_to_rank,
        )
        rows = self.group.dispatch(routing, x).x
        offsets = routing.expert_row_offsets
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        for number, first, end in zip(routing.local_expert_ids, offsets, offsets[1:]):
            rows[first:end] = expert(number, rows[first:end])
        out = self.group.combine(routing, rows, weighted=True).x
        self.group.wait()
        assert torch.equal(out, reference(step, self.member, self.ids, self.group.device))


def run_until_lost(members: ferry.Membership, kind: str, lost: int) -> Layer:
    """Runs steps until member ``lost`` is killed, and returns a layer of the others."""
    layer = Layer(members, kind)
    for step in range(LOST_STEP):
        layer.run(step)
        members.complete_steps(step + 1)
    with pytest.raises(LOSSES) as caught:
        layer.run(LOST_STEP, ends=layer.member == lost)
    view = members.next_view(caught.value)
    others = tuple(number for number in range(NUM_RANKS) if number != lost)
    expected = ferry.MembershipView(1, others.index(layer.member), others, others, (lost,), (), LOST_STEP)
    assert view == members.view == expected
    assert view.num_ranks == NUM_RANKS - 1
    return Layer(members, kind)


def survive(rank: int, kind: str, lost: int) -> None:
    members = ferry.Membership(dist.group.WORLD, secret=SECRET, timeout=TIMEOUT_S)
    assert members.view == ferry.MembershipView(0, rank, (0, 1, 2), (), (), (), 0)
    layer = run_until_lost(members, kind, lost)
    for step in range(members.view.num_complete_steps, NUM_STEPS):
        layer.run(step)
        members.complete_steps(step + 1)
    layer.group.destroy()


@pytest.mark.parametrize("lost", range(NUM_RANKS))
def test_the_others_go_on_without_a_killed_rank(device: str, lost: int) -> None:
    run_ranks(NUM_RANKS, survive, device, lost, lost=(lost,))


def replace(rank: int, kind: str, lost: int, contact: int) -> None:
    founders = dist.new_group(range(NUM_RANKS))
    told = dist.new_group([contact, NUM_RANKS])
    addresses: list[str] = [""] * NUM_RANKS
    if rank < NUM_RANKS:
        members = ferry.Membership(founders, secret=SECRET, timeout=TIMEOUT_S)
        dist.all_gather_object(addresses, members.address, group=founders)
        layer = run_until_lost(members, kind, lost)
        layer.run(LOST_STEP)
        members.complete_steps(LOST_STEP + 1)
        if rank == contact:
            dist.broadcast_object_list(addresses, contact, group=told)
            while members.num_waiting == 0:
                os.sched_yield()
        view = members.next_view()
        assert (view.joined_ids, view.kept_ranks, view.lost_ids) == ((lost,), (0, 1), ())
    else:
        dist.broadcast_object_list(addresses, contact, group=told)
        members = ferry.Membership.join([addresses[lost], addresses[contact]], secret=SECRET, id=lost)
        view = members.view
        assert view.rank == lost
        assert not (view.kept_ranks or view.lost_ids)
    assert (view.epoch, view.ids, view.num_complete_steps) == (2, (0, 1, 2), LOST_STEP + 1)
    layer = Layer(members, kind)
    for step in range(view.num_complete_steps, NUM_STEPS):
        layer.run(step)
    layer.group.destroy()


@pytest.mark.parametrize(("lost", "contact"), [(1, 2), (0, 1)])
def test_a_process_takes_the_place_of_a_killed_rank(device: str, lost: int, contact: int) -> None:
    run_ranks(NUM_RANKS + 1, replace, device, lost, contact, lost=(lost,))


def leave(rank: int) -> None:
    members = ferry.Membership(dist.group.WORLD, timeout=TIMEOUT_S)
    leaves = rank == 1
    view = members.next_view(leave=leaves)
    assert (view.ids, view.lost_ids, view.rank) == ((0, 2), (1,), (0, -1, 1)[rank])
    if leaves:
        assert repr(members) == "ferry.Membership(has left)"
        for call in (members.next_view, members.group):
            with pytest.raises(ferry.PeerLost):
                call()
    else:
        assert repr(members) == f"ferry.Membership(id {rank} of [0, 2], view 1)"
        Layer(members, "cpu").run(0)
    dist.barrier()


def test_a_rank_leaves() -> None:
    run_ranks(NUM_RANKS, leave)


def accuse(rank: int) -> None:
    members = ferry.Membership(dist.group.WORLD, timeout=10 * DEADLINE_S)  # nothing here waits so long
    if rank < 2:
        view = members.next_view(ferry.Timeout("rank 2 did not come", peer=2))
        assert (view.ids, view.lost_ids) == ((0, 1), (2,))
    dist.barrier()  # until then rank 2 lives
    if rank < 2:
        for reason in (ferry.PeerLost("a rank was lost", peer=1), ValueError("of the program")):
            assert members.next_view(reason).ids == (0, 1)


def test_only_a_timeout_says_which_rank_is_lost() -> None:
    run_ranks(NUM_RANKS, accuse)


def interrupt(rank: int) -> None:
    members = ferry.Membership(dist.group.WORLD, timeout=TIMEOUT_S)
    if rank == 0:
        refused: list[str] = []

        def call_and_raise(number: int, frame: object) -> None:
            for wanted in (members.next_view, lambda: members.num_waiting, members.group):
                with pytest.raises(ferry.InvalidArgument) as error:
                    wanted()
                refused.append(str(error.value))
            answer(number, frame)

        arm(call_and_raise)
        with pytest.raises(Answered):
            members.next_view()  # the other rank comes only after it
        assert len(refused) == 3
        assert all("handler" in text for text in refused)
        assert members.view.epoch == 0
    dist.barrier()
    assert members.next_view().ids == (0, 1)


def test_a_handler_that_raises_ends_the_wait_for_a_view() -> None:
    run_ranks(2, interrupt)


def test_a_handler_that_raises_ends_the_wait_to_be_let_in() -> None:
    members = ferry.Membership(comm=Alone(), secret=SECRET)
    before = signal.getsignal(signal.SIGALRM)
    arm(answer)
    try:
        with pytest.raises(Answered):
            ferry.Membership.join(members.address, secret=SECRET)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_another_secret_is_refused() -> None:
    members = ferry.Membership(comm=Alone(), secret=SECRET)
    errors: list[ferry.FerryError] = []

    def join() -> None:
        try:
            ferry.Membership.join(members.address, secret="another one", admission_timeout=1)
        except ferry.FerryError as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    while thread.is_alive():
        assert members.num_waiting == 0
    thread.join()
    assert isinstance(errors[0], ferry.Timeout)
    assert "secret" in str(errors[0])
    assert members.next_view().ids == (0,)


def test_a_process_joins_a_single_one() -> None:
    members = ferry.Membership(comm=Alone(), secret=SECRET)
    joined: list[ferry.Membership] = []
    thread = threading.Thread(target=lambda: joined.append(ferry.Membership.join([members.address], secret=SECRET)))
    thread.start()
    while members.num_waiting == 0:
        os.sched_yield()
    assert members.next_view().joined_ids == (1,)
    thread.join()
    assert (joined[0].view.ids, joined[0].view.rank) == ((0, 1), 1)
    assert members.num_awaiting == 0
    views: list[ferry.MembershipView] = []
    thread = threading.Thread(target=lambda: views.append(joined[0].next_view()))
    thread.start()
    while members.num_awaiting == 0:
        os.sched_yield()
    view = members.next_view()
    thread.join()
    assert views == [dataclasses.replace(view, rank=1)]


SLOW_TO_END = """
import ctypes, os, sys, ferry
from test_membership import Alone
members = ferry.Membership(comm=Alone())
libc = ctypes.CDLL(None)
for _ in range(20):  # each of these takes the kernel some milliseconds to close, like those of a GPU
    libc.inotify_add_watch(libc.inotify_init(), b"/", 1)
last = os.open("/dev/null", os.O_RDONLY)
os.dup2(int(sys.argv[1]), last)  # closed before these
os.close(int(sys.argv[1]))
print(members.address, flush=True)
sys.stdin.read()
"""


def test_the_port_of_a_killed_process_refuses_before_others_of_its_descriptors_are_closed() -> None:
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-c", SLOW_TO_END, str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, **pipes) as process:
        theirs.close()
        host, port = process.stdout.readline().strip().rsplit(":", 1)
        process.kill()
        mine.settimeout(TIMEOUT_S)
        assert mine.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), TIMEOUT_S)
    mine.close()


def test_wrong_arguments() -> None:
    members = ferry.Membership(comm=Alone())
    group = members.group(timeout=TIMEOUT_S)
    assert group.device.type == "cpu"
    group.destroy()
    for call, match in (
        (lambda: ferry.Group(members="all"), "members is a str, expected a ferry.Membership"),
        (lambda: members.group(comm=Alone()), "not several"),
        (lambda: ferry.Membership("world"), "Membership: group is a str"),
        (lambda: ferry.Membership(comm=Alone(), timeout=0), "Membership: timeout is 0.0 s"),
        (lambda: members.complete_steps(-1), "num_steps is -1"),
        (lambda: members.complete_steps("3"), "Membership.complete_steps: num_steps is '3', expected an integer"),
        (lambda: ferry.Membership.join(members.address, secret=SECRET, id=-1), "id is -1"),
        (lambda: ferry.Membership.join(members.address, secret=SECRET, id="0"), "id is '0', expected an integer"),
        (lambda: ferry.Membership.join([], secret=SECRET), "no contacts"),
        (lambda: ferry.Membership.join("here", secret=SECRET), "is no address"),
        (lambda: ferry.Membership.join(members.address, secret=""), "secret is empty"),
    ):
        with pytest.raises(ferry.InvalidArgument, match=match):
            call()
