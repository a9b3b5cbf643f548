"""Latency mode: the bits of route, dispatch and combine in one call each, whole or in two halves."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, run_ranks
from slabs import (
    as_bytes,
    check_ranges,
    check_slab,
    make_group,
    options_of,
    run_experts,
    weighted_sums,
    with_short_weights,
)
from world import World, make_world

import ferry

MODES: list[Any] = ["fp8", "fp8_power_of_two", "fp8_ue8m0", "int8"]


def check_results(rank: int, world: World, most: int, kind: str, ranks_per_node: int = 0) -> None:
    """ranks_per_node: all ranks, or 1, so that a node rounds the same sums as its rank."""
    group = make_group(rank, kind, world, most, ranks_per_node=ranks_per_node)
    rounds_early = ranks_per_node == 1
    world = world.to(group.device)
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    options = options_of(world, most)
    capacity, first = world.num_ranks * most, world.first_expert(rank)
    routing = group.route(ids, weights, num_experts=world.num_experts, layout="slab", slab_capacity=capacity)
    expected = group.dispatch(routing, x, zero_padding=True)
    shape = (world.num_local(rank), capacity, x.shape[1])
    for split in (False, True):
        sent = group.latency_dispatch(x, ids, weights, zero_padding=True, split=split, **options)
        assert (sent.x.shape, sent.x.dtype, sent.scales) == (shape, x.dtype, None)
        if split:
            sent.receive()
        assert torch.equal(sent.x.view(-1, shape[2]), expected.x)
        check_slab(sent.x, world, rank, world.x)
        check_ranges(sent.routing.source_ranges.tolist(), world, rank)
        assert torch.equal(sent.routing.source, routing.source)
        assert torch.equal(sent.routing.slots, routing.slots)
        assert torch.equal(sent.routing.local_expert_counts, routing.local_expert_counts)
        assert routing.source_ranges is None
        y = run_experts(sent.x, first)
        for order in ("exact", "rank_sums"):
            out = torch.full_like(x, 7.0) if split else None
            combined = group.latency_combine(y, sent, order=order, split=split, out=out)
            if split:
                combined.receive()
                assert combined.x is out
            assert torch.equal(combined.x, weighted_sums(world, rank, rank_sums=rounds_early or order == "rank_sums"))
            if order == "exact":
                assert torch.equal(combined.x, group.combine(routing, y.view(-1, shape[2]), weighted=True).x)
        other = weights.flip(1).contiguous()
        combined = group.latency_combine(y.view(-1, shape[2]), sent.routing, other)
        assert torch.equal(combined.x, weighted_sums(world, rank, rank_sums=rounds_early, weights=other))
        combined = group.latency_combine(y.float(), sent)
        assert torch.equal(combined.x, group.combine(routing, y.float().view(-1, shape[2]), weighted=True).x)
    check_scales(group, world, most)
    # Parameters and activations of a model that is not in no_grad.
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    sent = group.latency_dispatch(x, ids, weights.clone().requires_grad_(), split=True, **options)
    sent.receive()
    check_slab(sent.x, world, rank, world.x)
    assert torch.equal(group.latency_combine(y, sent, weights).x, group.latency_combine(y.detach(), sent).x)
    group.destroy()


def check_scales(group: ferry.Group, world: World, most: int) -> None:
    rank, options = group.rank, options_of(world, most)
    x, ids = world.x[rank], world.topk_idx[rank]
    num_local, capacity = world.num_local(rank), world.num_ranks * most
    for mode in MODES:
        rows = [ferry.quantize(one, mode) for one in world.x]
        width = rows[rank].scales.shape[1]
        for given in (False, True):
            for column_major in (False, True):
                how = {"scales": rows[rank].scales} if given else {"quantize": mode}
                sent = group.latency_dispatch(
                    rows[rank].x if given else x, ids, column_major_scales=column_major, **how, **options
                )
                assert (sent.x.dtype, sent.scales.dtype) == (rows[rank].x.dtype, rows[rank].scales.dtype)
                strides = (width * capacity, 1, capacity) if column_major else (width * capacity, width, 1)
                assert (sent.scales.shape, sent.scales.stride()) == ((num_local, capacity, width), strides)
                check_slab(sent.x, world, rank, [one.x for one in rows])
                check_slab(sent.scales, world, rank, [one.scales for one in rows])
    out = group.empty(num_local * capacity, x.shape[1], dtype=torch.int8)
    out_scales = torch.zeros(2 * capacity * num_local, width, device=group.device)[::2]
    sent = group.latency_dispatch(x, ids, quantize="int8", out=out, out_scales=out_scales, split=True, **options)
    assert sent.x is out
    assert sent.scales is out_scales
    sent.receive()
    check_slab(out.view(num_local, capacity, -1), world, rank, [one.x for one in rows])
    check_slab(out_scales.unflatten(0, (num_local, capacity)), world, rank, [one.scales for one in rows])


@pytest.mark.parametrize(("num_experts", "num_tokens"), [(6, [5]), (7, [5, 0, 9])])
def test_the_bits_of_throughput_mode(num_experts: int, num_tokens: list[int], device: str) -> None:
    """Fewer tokens than allowed, none on a rank, ids that repeat or are -1, experts that do not divide by the ranks."""
    world = with_short_weights(make_world(len(num_tokens), num_experts, num_tokens, hidden=272))
    run_ranks(len(num_tokens), check_results, world, max(num_tokens) + 2, device)


def check_micro_batches(rank: int, worlds: list[World], most: int, kind: str) -> None:
    group = make_group(rank, kind, worlds[0], most)
    worlds = [world.to(group.device) for world in worlds]

    def dispatch(which: int) -> ferry.LatencyDispatched:
        world = worlds[which]
        return group.latency_dispatch(
            world.x[rank], world.topk_idx[rank], world.topk_weights[rank], split=True, **options_of(world, most)
        )

    def combine(which: int, sent: ferry.LatencyDispatched) -> ferry.LatencyCombined:
        check_slab(sent.x, worlds[which], rank, worlds[which].x)
        y = run_experts(sent.x, worlds[which].first_expert(rank))
        return group.latency_combine(y, sent, order="rank_sums", split=True)

    def check(which: int, combined: ferry.LatencyCombined) -> None:
        assert torch.equal(combined.x, weighted_sums(worlds[which], rank, rank_sums=True)), which

    # Both are sent before either is received, in the same order or in the other.
    for order in ((0, 1), (1, 0)):
        sent = [dispatch(0), dispatch(1)]
        for which in order:
            sent[which].receive()
        back = [combine(0, sent[0]), combine(1, sent[1])]
        for which in order:
            back[which].receive()
            check(which, back[which])
    # One batch's combine is on its way while the other is dispatched, and other calls come between.
    first, second = dispatch(0), dispatch(1)
    first.receive()
    first_back = combine(0, first)
    second.receive()
    x, ids = worlds[0].x[rank], worlds[0].topk_idx[rank]
    routing = group.route(ids, num_experts=worlds[0].num_experts)
    received = group.dispatch(routing, x).x
    second_back = combine(1, second)
    next_first = dispatch(0)
    first_back.receive()
    check(0, first_back)
    assert torch.equal(group.combine(routing, received).x, group.combine(routing, received).x)
    next_first.receive()
    second_back.receive()
    check(1, second_back)
    next_back = combine(0, next_first)
    hook = next_back.receive
    hook()
    check(0, next_back)
    # Tensors of a call in flight stay in memory, even if the program drops them, until the call is made with the next
    # one.
    forgotten = [weakref.ref(dispatch(which).x) for which in (1, 0)]
    gc.collect()
    assert all(x() is not None for x in forgotten)
    with pytest.raises(ferry.InvalidArgument, match="2 split calls are sent and not received"):
        dispatch(1)
    whole = group.latency_dispatch(x, ids, worlds[0].topk_weights[rank], **options_of(worlds[0], most))
    check_slab(whole.x, worlds[0], rank, worlds[0].x)
    assert all(x() is None for x in forgotten)
    group.destroy()


def interrupt_dispatch(group: ferry.Group, dispatch: Callable[[], object]) -> weakref.ref[torch.Tensor]:
    """Interrupts a dispatch right after it was sent. Gives a weak reference to its output."""
    found: list[weakref.ref[torch.Tensor]] = []

    def interrupt(sent: Any, _: object) -> None:
        found.append(weakref.ref(sent.kept[-1]))
        raise KeyboardInterrupt

    group._made = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        dispatch()
    del group._made
    return found[0]


def check_interrupt(rank: int, world: World, most: int, kind: str) -> None:
    group = make_group(rank, kind, world, most)
    world = world.to(group.device)
    ids = world.topk_idx[rank]

    def dispatch() -> ferry.LatencyDispatched:
        return group.latency_dispatch(
            world.x[rank], ids, world.topk_weights[rank], split=True, **options_of(world, most)
        )

    received_into = interrupt_dispatch(group, dispatch)
    gc.collect()
    assert received_into() is not None
    group.route(ids, num_experts=world.num_experts)
    assert received_into() is None
    group.destroy()


def test_an_interrupt_frees_nothing_before_the_next_call(device: str) -> None:
    """Once a call is sent, its outputs stay in memory until the next collective call."""
    run_ranks(3, check_interrupt, with_short_weights(make_world(3, 6, [4, 0, 7], hidden=128)), 8, device)


def test_two_micro_batches_in_flight(device: str) -> None:
    worlds = [
        with_short_weights(make_world(3, 6, [4, 0, 7], hidden=128, seed=1)),
        with_short_weights(make_world(3, 6, [0, 8, 3], hidden=128, seed=2)),
    ]
    run_ranks(3, check_micro_batches, worlds, 8, device)


def check_counts(rank: int, world: World, kind: str) -> None:
    group = make_group(rank, kind, world, 8)
    world = world.to(group.device)
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    options = options_of(world, 8) | {"zero_padding": True}
    count = torch.zeros(1, dtype=torch.int32, device=group.device)
    for wanted in (0, 3, len(x), -2, len(x) + 1):
        count.fill_(wanted)
        num_counted = min(max(wanted, 0), len(x))
        only_first = ids.clone()
        only_first[num_counted:] = -1
        expected = group.latency_dispatch(x, only_first, weights, **options)
        any_ids = ids.clone()
        any_ids[num_counted:] = 1 << 40
        for one, split in ((count, False), (count[0], True)):
            sent = group.latency_dispatch(x, any_ids, weights, num_tokens=one, split=split, **options)
            if split:
                sent.receive()
            assert torch.equal(as_bytes(sent.x), as_bytes(expected.x))
            assert torch.equal(sent.routing.slots, expected.routing.slots)
            y = run_experts(sent.x, world.first_expert(rank))
            sums = group.latency_combine(y, sent).x
            assert torch.equal(sums, group.latency_combine(y, expected).x)
            assert not sums[num_counted:].any()
    group.destroy()


def test_only_the_first_tokens_count(device: str) -> None:
    run_ranks(3, check_counts, make_world(3, 6, [5, 8, 6], hidden=128), device)


def check_placement(rank: int, world: World, kind: str) -> None:
    group = make_group(rank, kind, world, 8)
    world = world.to(group.device)
    owners = [1, 0, 1, 0, 1]
    ids, x = world.topk_idx[rank], world.x[rank]
    sent = group.latency_dispatch(x, ids, expert_to_rank=owners, slab_capacity=16, **options_of(world, 8))
    assert sent.routing.local_expert_ids == [e for e, owner in enumerate(owners) if owner == rank]
    for local, expert in enumerate(sent.routing.local_expert_ids):
        rows = torch.stack([world.x[s][t] for s, t in world.rows_of_expert(expert)])
        assert torch.equal(as_bytes(sent.x[local, : len(rows)]), as_bytes(rows))
    with pytest.raises(ferry.CapacityExceeded, match="slab_capacity"):
        group.latency_dispatch(x, torch.zeros_like(ids), slab_capacity=3, **options_of(world, 8))
        group.wait()
    group.destroy()


def test_placed_experts_and_small_slabs(device: str) -> None:
    run_ranks(2, check_placement, make_world(2, 5, [8, 8]), device)


BAD_RANK = 1


def check_lost(rank: int, world: World) -> None:
    group = make_group(rank, "cpu", world, 8, timeout=20)
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    first = group.latency_dispatch(x, ids, weights, split=True, **options_of(world, 8))
    first.receive()
    second = group.latency_dispatch(x, ids, weights, split=True, **options_of(world, 8))
    combined = group.latency_combine(run_experts(first.x, world.first_expert(rank)), first, split=True)
    if rank == BAD_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    for hook in (combined.receive, second.receive):
        with pytest.raises((ferry.PeerLost, ferry.Timeout)) as caught:
            hook()
        assert caught.value.peer == BAD_RANK


def test_a_rank_that_dies_between_the_halves_is_named() -> None:
    run_ranks(3, check_lost, make_world(3, 6, [4, 5, 6]), lost=(BAD_RANK,))


def check_masked(rank: int, world: World, kind: str) -> None:
    """A rank dies; calls of the others return without it."""
    group = make_group(rank, kind, world, 8, mask_lost_ranks=True, mask_timeout=60)
    world = world.to(group.device)
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]

    def check_layer(left: World) -> None:
        sent = group.latency_dispatch(x, ids, weights, split=True, **options_of(world, 8))
        sent.receive()
        check_slab(sent.x, left, rank, left.x)
        check_ranges(sent.routing.source_ranges.tolist(), left, rank)
        combined = group.latency_combine(run_experts(sent.x, left.first_expert(rank)), sent)
        assert torch.equal(combined.x, weighted_sums(left, rank, rank_sums=False))

    def mask() -> list[int]:
        return group.latency_query_mask().tolist()

    check_layer(world)
    assert mask() == [0, 0, 0]
    group.wait()
    dist.barrier()
    if rank == BAD_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        check_layer(world.without(BAD_RANK))
    out = torch.full((3,), 7, dtype=torch.int32, device=group.device)
    assert group.latency_query_mask(out) is out
    assert out.tolist() == [0, 1, 0]
    group.latency_clear_mask()
    assert mask() == [0, 0, 0]
    group.latency_update_mask(BAD_RANK)
    assert mask() == [0, 1, 0]
    check_layer(world.without(BAD_RANK))
    with pytest.raises(ferry.InvalidArgument, match="other than this one"):
        group.latency_update_mask(rank)
    with pytest.raises(ferry.InvalidArgument, match="latency_query_mask: out"):
        group.latency_query_mask(torch.zeros(2, dtype=torch.int32, device=group.device))
    with pytest.raises(ferry.InvalidArgument, match="latency_query_mask: out"):
        group.latency_query_mask(torch.zeros(3, device=group.device))


def test_calls_go_on_without_a_rank_that_dies(device: str) -> None:
    run_ranks(3, check_masked, with_short_weights(make_world(3, 6, [4, 5, 6])), device, lost=(BAD_RANK,))


def check_refused(rank: int, world: World) -> None:
    group = make_group(rank, "cpu", world, 8)
    bad = rank == BAD_RANK
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    good: dict[str, Any] = {"x": x, "topk_idx": ids, "topk_weights": weights, **options_of(world, 8)}

    def refused(call: Any, match: str, kind: type[Exception] = ferry.InvalidArgument) -> None:
        with pytest.raises(kind, match=match if bad else None):
            call()

    wrong_arguments: list[tuple[dict[str, Any], str]] = [
        ({"x": x.to("meta")}, "x: the tensor is on meta"),
        ({"x": "x"}, "expected a torch.Tensor, got str"),
        ({"x": None}, "x"),
        ({"x": x[:, ::2]}, "strides|contiguous"),
        ({"x": x[:-1]}, "rows|tokens"),
        ({"x": x.float(), "quantize": "int8"}, "f32|bf16"),
        ({"x": x.half(), "quantize": "fp8"}, "bf16"),
        ({"quantize": "fp4"}, "quantize is 'fp4'"),
        ({"topk_idx": None}, "topk_idx is absent"),
        ({"topk_idx": ids.float()}, "topk_idx"),
        ({"topk_idx": ids.t().contiguous().t()}, "contiguous"),
        ({"topk_idx": ids + world.num_experts}, "expert"),
        ({"topk_weights": weights.double()}, "topk_weights: dtype is torch.float64"),
        ({"topk_weights": weights[:-1]}, "topk_weights"),
        ({"num_tokens": 3}, "num_tokens: expected a torch.Tensor, got int"),
        ({"num_tokens": torch.ones(1, dtype=torch.int64)}, "num_tokens_view"),
        ({"num_tokens": torch.ones(2, dtype=torch.int32)}, "num_tokens_view"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 1 << 40}, "num_experts is 1099511627776"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1 << 30}, "slab_capacity|rows"),
        ({"slab_capacity": -1}, "slab_capacity"),
        ({"expert_to_rank": [0]}, "expert_to_rank"),
        ({"expert_to_rank": [0, "x"]}, "x"),
        ({"scales": weights, "quantize": "fp8"}, "scales"),
        ({"out": torch.empty(1, 16, 64, dtype=torch.bfloat16)}, "out"),
        ({"out": torch.empty(3, 16, 32, dtype=torch.bfloat16)}, "out"),
        ({"out_scales": torch.empty(3, 16, 1)}, "scales"),
        ({"out": x}, "out"),
        ({"wait_times_ns": [0, 0]}, "wait_times_ns: expected a torch.Tensor, got list"),
        ({"wait_times_ns": torch.zeros(2, dtype=torch.int32)}, "wait_times_ns has dtype i32"),
        ({"wait_times_ns": torch.zeros(3, dtype=torch.int64)}, "wait_times_ns is"),
        ({"wait_times_ns": torch.zeros(4, dtype=torch.int64)[::2]}, "wait_times_ns"),
    ]
    for wrong, match in wrong_arguments:
        kind = ValueError if match == "x" else ferry.InvalidArgument
        refused(lambda wrong=wrong: group.latency_dispatch(**good | (wrong if bad else {})), match, kind)
    refused(
        lambda: group.latency_dispatch(**good | ({"max_tokens": 2, "slab_capacity": 16} if bad else {})),
        "max_tokens",
        ferry.FerryError,
    )
    # Found by the receive half on the ranks whose own arguments are good; later calls are as if it had not been.
    if bad:
        with pytest.raises(ferry.InvalidArgument, match="meta"):
            group.latency_dispatch(**good | {"x": x.to("meta")}, split=True)
    else:
        sent = group.latency_dispatch(**good, split=True)
        with pytest.raises(ferry.InvalidArgument, match="rank 1"):
            sent.receive()
        with pytest.raises(ferry.InvalidArgument, match="received before"):
            sent.receive()

    sent = group.latency_dispatch(**good, split=True)
    with pytest.raises(ferry.InvalidArgument, match="latency_combine: the Routing's dispatch is sent and not received"):
        group.latency_combine(sent.x, sent)
    sent.receive()
    with pytest.raises(ferry.InvalidArgument, match="received before"):
        sent.receive()
    whole = group.latency_dispatch(**good)
    with pytest.raises(ferry.InvalidArgument, match="not split"):
        whole.receive()
    y = run_experts(whole.x, world.first_expert(rank))
    wrong_combines: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((y.to("meta"), whole), {}, "meta"),
        ((y.half(), whole), {}, "f16"),
        ((y[:1], whole), {}, "rows"),
        ((y.transpose(0, 1), whole), {}, "strides|contiguous|rows"),
        ((None, whole), {}, "x"),
        ((y, "whole"), {}, "routing is a str"),
        ((y, whole, weights[:, :1]), {}, "topk_weights"),
        ((y, whole), {"order": "fast"}, "order is 'fast'"),
        ((y, whole), {"out": x.float()}, "out"),
        ((y, whole), {"num_sms": 1 << 40}, "num_sms"),
        ((y, whole), {"wait_times_ns": torch.zeros(2, dtype=torch.int32)}, "wait_times_ns has dtype i32"),
        ((y, whole), {"wait_times_ns": torch.zeros(2, 2, dtype=torch.int64)}, "wait_times_ns is"),
    ]
    for given, options, match in wrong_combines:
        refused(
            lambda given=given, options=options: (
                group.latency_combine(*(given if bad else (y, whole)), **options)
                if bad
                else group.latency_combine(y, whole)
            ),
            match,
        )
    routing = group.route(ids, weights, num_experts=world.num_experts)
    with pytest.raises(ferry.InvalidArgument, match="was not made by latency_dispatch"):
        group.latency_combine(y, routing)
    assert torch.equal(group.latency_combine(y, whole).x, weighted_sums(world, rank, rank_sums=False))
    pending = group.latency_combine(y, whole, split=True)
    group.destroy()
    for call in (pending.receive, lambda: group.latency_combine(y, whole), lambda: group.latency_dispatch(**good)):
        with pytest.raises(ferry.InvalidArgument, match="destroyed"):
            call()


def test_wrong_arguments_are_exceptions_on_all_ranks() -> None:
    run_ranks(2, check_refused, with_short_weights(make_world(2, 6, [5, 8])))


def test_bytes_required() -> None:
    shape = {"num_ranks": 8, "max_tokens": 128, "num_topk": 8, "dispatch_row_bytes": 7392, "combine_row_bytes": 14336}
    assert ferry.latency_bytes_required(backend="cpu", **shape) == 0
    with pytest.raises(ferry.InvalidArgument, match="max_tokens"):
        ferry.latency_bytes_required(backend="cpu", **shape | {"max_tokens": -1})
    with pytest.raises(ferry.Unsupported, match="abacus"):
        ferry.latency_bytes_required(backend="abacus", **shape)
    with pytest.raises(ferry.InvalidArgument, match="latency_bytes is -1"):
        ferry.Group(object(), device="cpu", latency_bytes=-1)


def check_other_group(rank: int, world: World) -> None:
    group, other = (make_group(rank, "cpu", world, 8) for _ in range(2))
    device_of(rank, "cpu")
    x, ids, weights = world.x[rank], world.topk_idx[rank], world.topk_weights[rank]
    sent = [g.latency_dispatch(x, ids, weights, split=True, **options_of(world, 8)) for g in (group, other)]
    sent[1].receive()
    sent[0].receive()
    assert torch.equal(sent[0].x[0, 0], sent[1].x[0, 0])
    for mine, theirs in ((group, sent[1]), (other, sent[0])):
        with pytest.raises(ferry.InvalidArgument, match="another group"):
            mine.latency_combine(theirs.x, theirs)
    tables = sent[0].routing.source_ranges, sent[0].routing.local_expert_counts
    kept = [table.clone() for table in tables]
    group.destroy()
    del group, mine
    x, ids = sent.pop(0).x, None
    gc.collect()
    assert all(torch.equal(table, copy) for table, copy in zip(tables, kept, strict=True))
    other.destroy()


def test_groups_are_independent() -> None:
    run_ranks(2, check_other_group, make_world(2, 4, [8, 8]))
