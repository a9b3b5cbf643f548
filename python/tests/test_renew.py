"""Groups that are renewed: ranks are lost, others take their place, and decoding goes on in the same group."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, run_ranks
from test_membership import SECRET, TIMEOUT_S, Alone

import ferry

NUM_RANKS = 4
EXPERTS_PER_RANK = 2
NUM_EXPERTS = NUM_RANKS * EXPERTS_PER_RANK
TOKENS, HIDDEN, TOPK = 7, 32, 3
ALL = tuple(range(NUM_RANKS))


def inputs(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=generator).float()
    topk_idx = torch.randint(-1, NUM_EXPERTS, (TOKENS, TOPK), generator=generator)
    return x, topk_idx, torch.randint(1, 5, (TOKENS, TOPK), generator=generator).float()


def reference(step: int, rank: int, present: tuple[int, ...]) -> torch.Tensor:
    x, topk_idx, weights = inputs(step, rank)
    is_there = torch.isin(topk_idx // EXPERTS_PER_RANK, torch.tensor(present)) & (topk_idx >= 0)
    return (torch.where(is_there, weights * (topk_idx + 2), 0)).sum(1, keepdim=True) * x  # expert e multiplies by e + 2


class Decoder:
    """A layer in latency mode."""

    def __init__(self, members: ferry.Membership, kind: str, num_ranks: int | None = None, masks: bool = True) -> None:
        self.masks = masks
        self.rank = members.view.ids[members.view.rank]
        self.group = members.group(
            num_ranks=num_ranks,
            device=device_of(self.rank, kind),
            timeout=TIMEOUT_S,
            mask_lost_ranks=masks,
            mask_timeout=TIMEOUT_S,
            latency_bytes=ferry.latency_bytes_required(
                num_ranks=NUM_RANKS,
                max_tokens=TOKENS,
                num_topk=TOPK,
                dispatch_row_bytes=4 * HIDDEN,
                combine_row_bytes=4 * HIDDEN,
                backend=kind,
            ),
        )
        assert (self.group.rank, self.group.num_ranks) == (self.rank, NUM_RANKS)

    def dispatch(self, step: int) -> ferry.LatencyDispatched:
        given = [tensor.to(self.group.device) for tensor in inputs(step, self.rank)]
        return self.group.latency_dispatch(*given, num_experts=NUM_EXPERTS, max_tokens=TOKENS)

    def combine(self, sent: ferry.LatencyDispatched) -> torch.Tensor:
        experts = torch.tensor(sent.routing.local_expert_ids, device=self.group.device)
        out = self.group.latency_combine((experts[:, None, None] + 2) * sent.x, sent).x
        self.group.wait()
        return out

    def check(self, step: int, present: tuple[int, ...]) -> None:
        out = self.combine(self.dispatch(step))
        if self.masks:
            assert self.group.latency_query_mask().tolist() == [int(rank not in present) for rank in ALL]
        assert torch.equal(out.cpu(), reference(step, self.rank, present))


def go_on(rank: int, kind: str, lost: int) -> None:
    others = tuple(one for one in ALL if one != lost)
    founders, left, told = (dist.new_group(ranks) for ranks in (ALL, others, [others[0], NUM_RANKS]))
    address = [""]
    if rank < NUM_RANKS:
        members = ferry.Membership(founders, secret=SECRET, timeout=TIMEOUT_S)
        decoder = Decoder(members, kind)
        decoder.check(0, ALL)
        dispatched = decoder.dispatch(1)
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        decoder.combine(dispatched)  # each has masked the lost rank in this call or the next
        decoder.combine(decoder.dispatch(2))
        dist.barrier(left)  # a rank that is suspended earlier is masked by the others, too
        assert decoder.group.suspend() == (lost,)
        for call in (decoder.group.suspend, lambda: decoder.dispatch(3), decoder.group.wait):
            with pytest.raises(ferry.InvalidArgument, match="suspended"):
                call()
        view = members.next_view(silent_ids=(lost,))
        assert (view.ids, view.lost_ids) == (others, (lost,))
        with pytest.raises(ferry.InvalidArgument, match="renew: members is a str"):
            decoder.group.renew("all")  # type: ignore[arg-type]
        decoder.group.renew(members)
        with pytest.raises(ferry.InvalidArgument, match="group"):
            decoder.combine(dispatched)  # on all ranks
        for step in range(3, 6):
            decoder.check(step, others)
        if rank == others[0]:
            dist.broadcast_object_list([members.address], rank, group=told)
            while members.num_waiting == 0:
                os.sched_yield()
        assert members.next_view().joined_ids == (lost,)
        decoder.group.renew(members)  # between calls, without suspend
    else:
        dist.broadcast_object_list(address, others[0], group=told)
        members = ferry.Membership.join(address, secret=SECRET, id=lost, timeout=TIMEOUT_S)
        decoder = Decoder(members, kind, NUM_RANKS)
    assert members.view.ids == ALL
    for step in range(6, 9):
        decoder.check(step, ALL)
    decoder.group.destroy()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_group_goes_on_without_a_killed_rank_and_with_a_new_one(device: str, lost: int) -> None:
    run_ranks(NUM_RANKS + 1, go_on, device, lost, lost=(lost,))


def fail_and_go_on(rank: int, kind: str, lost: int) -> None:
    others = tuple(one for one in ALL if one != lost)
    founders, told = (dist.new_group(ranks) for ranks in (ALL, [others[0], NUM_RANKS]))
    address = [""]
    if rank < NUM_RANKS:
        members = ferry.Membership(founders, secret=SECRET, timeout=TIMEOUT_S)
        decoder = Decoder(members, kind, masks=False)
        decoder.check(0, ALL)
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ferry.PeerLost):
            decoder.check(1, ALL)
        # Others may have been faster: one of them has left the group then, and the lost one is found anyway.
        assert decoder.group.suspend() in ((), (lost,))
        view = members.next_view()
        assert (view.ids, view.lost_ids) == (others, (lost,))
        decoder.group.renew(members)
        for step in range(1, 4):
            decoder.check(step, others)
        with pytest.raises(ferry.InvalidArgument, match=f"rank {lost} is absent"):
            decoder.group.route(inputs(0, rank)[1].to(decoder.group.device), num_experts=NUM_EXPERTS)
        decoder.check(4, others)
        if rank == others[0]:
            dist.broadcast_object_list([members.address], rank, group=told)
            while members.num_waiting == 0:
                os.sched_yield()
        assert members.next_view().joined_ids == (lost,)
        decoder.group.renew(members)
    else:
        dist.broadcast_object_list(address, others[0], group=told)
        members = ferry.Membership.join(address, secret=SECRET, id=lost, timeout=TIMEOUT_S)
        decoder = Decoder(members, kind, NUM_RANKS, masks=False)
    for step in range(5, 8):
        decoder.check(step, ALL)
    decoder.group.destroy()


def test_a_group_that_does_not_mask_goes_on_too(device: str) -> None:
    run_ranks(NUM_RANKS + 1, fail_and_go_on, device, 1, lost=(1,))


def stay_silent(rank: int) -> None:
    members = ferry.Membership(dist.group.WORLD, timeout=10 * TIMEOUT_S)  # nothing here waits so long
    if rank < 2:
        assert members.next_view(silent_ids=[2, rank, 77]).lost_ids == (2,)
    dist.barrier()  # until then rank 2 lives


def test_a_silent_member_counts_as_lost() -> None:
    run_ranks(3, stay_silent)


def alone(**options: object) -> tuple[ferry.Membership, ferry.Group]:
    """A group of two ranks of which one is present."""
    members = ferry.Membership(comm=Alone(), secret=SECRET)
    return members, members.group(num_ranks=2, mask_lost_ranks=True, timeout=TIMEOUT_S, **options)


def test_a_renewed_group_forgets_split_calls() -> None:
    members, group = alone()
    x, topk_idx, weights = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    buffer = group.empty(3, 8, dtype=torch.float32).fill_(5)
    options = {"num_experts": 2, "max_tokens": 2, "split": True}
    dropped = group.latency_dispatch(x, topk_idx, weights, **options)
    kept = weakref.ref(x)
    del x, dropped
    assert kept() is not None  # until the call is made
    received_late = group.latency_dispatch(torch.ones(2, 8), topk_idx, weights, **options)
    group.renew(members)
    assert kept() is None
    with pytest.raises(ferry.InvalidArgument):
        received_late.receive()
    assert torch.equal(buffer, torch.full((3, 8), 5.0))
    assert group.latency_query_mask().tolist() == [0, 1]
    sent = group.latency_dispatch(torch.ones(2, 8), topk_idx, weights, num_experts=2, max_tokens=2)
    assert torch.equal(group.latency_combine(sent.x, sent).x, torch.ones(2, 8))


def test_a_suspended_group_may_be_destroyed() -> None:
    _, group = alone()
    assert group.suspend() == ()  # an absent rank is not silent
    group.destroy()
    with pytest.raises(ferry.InvalidArgument, match="destroyed"):
        group.suspend()


def test_a_member_whose_id_is_no_rank_is_refused() -> None:
    members, group = alone()
    refused: list[str] = []

    def join() -> None:
        joined = ferry.Membership.join(members.address, secret=SECRET, id=5)
        with pytest.raises(ferry.InvalidArgument) as error:
            joined.group(num_ranks=2, mask_lost_ranks=True)
        refused.append(str(error.value))

    thread = threading.Thread(target=join)
    thread.start()
    while members.num_waiting == 0:
        os.sched_yield()
    assert members.next_view().ids == (0, 5)
    with pytest.raises(ferry.InvalidArgument, match=r"^Group: view.ids of members= is \[0, 5\]"):
        group.renew(members)
    thread.join()
    assert "[0, 5]" in refused[0]
    with pytest.raises(ferry.InvalidArgument, match="suspended"):
        group.wait()


def test_wrong_arguments() -> None:
    members = ferry.Membership(comm=Alone())
    for call, match in (
        (lambda: ferry.Group(comm=Alone(), num_ranks=2), "num_ranks is 2 without members="),
        (lambda: members.group(num_ranks=0), "num_ranks is 0, expected at least 1"),
        (lambda: alone(ranks_per_node=3), "ranks_per_node is 3"),
    ):
        with pytest.raises(ferry.InvalidArgument, match=match):
            call()
    for masks in (True, False):
        with pytest.raises(ferry.Unsupported, match="nodes"):
            members.group(num_ranks=2, ranks_per_node=1, mask_lost_ranks=masks, timeout=TIMEOUT_S)
    with pytest.raises(TypeError):
        members.next_view(silent_ids=["one"])  # type: ignore[list-item]
    assert members.group(num_ranks=1).num_ranks == 1
