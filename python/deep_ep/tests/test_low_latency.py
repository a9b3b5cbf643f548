"""Latency mode of the first generation, as clients call it, against plain torch and throughput mode."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clients import dispatch, inputs_of, make_buffer
from network import skip_without_network
from ranks import all_ranks, device_of, run_ranks
from slabs import check_ranges, check_slab, rows_of_experts, run_experts, weighted_sums, with_short_weights
from world import World, make_world

import deep_ep
import ferry

MODES: list[tuple[dict[str, bool], Any]] = [
    ({"use_fp8": False}, None),
    ({}, "fp8"),
    ({"round_scale": True}, "fp8_power_of_two"),
    ({"round_scale": True, "use_ue8m0": True}, "fp8_ue8m0"),
]


def make_latency_buffer(rank: int, kind: str, world: World, most: int, **options: Any) -> deep_ep.Buffer:
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        most, world.x[rank].shape[1], world.num_ranks, world.num_experts
    )
    return make_buffer(rank, kind, num_rdma_bytes=num_bytes, low_latency_mode=True, **options)


def check_received(
    world: World, rank: int, most: int, received: Any, count: torch.Tensor, handle: tuple, mode: Any
) -> torch.Tensor:
    """Everything that a dispatch returned. Gives the rows in bf16."""
    num_local, capacity, hidden = world.num_local(rank), world.num_ranks * most, world.x[rank].shape[1]
    if mode is None:
        rows = received
        check_slab(rows, world, rank, world.x)
    else:
        rows, scales = received
        expected = [ferry.quantize(x, mode) for x in world.x]
        width = expected[rank].scales.shape[1]
        assert (scales.shape, scales.stride()) == ((num_local, capacity, width), (width * capacity, 1, capacity))
        assert scales.dtype == (torch.int32 if mode == "fp8_ue8m0" else torch.float32)
        check_slab(rows, world, rank, [one.x for one in expected])
        check_slab(scales, world, rank, [one.scales for one in expected])
    assert rows.shape == (num_local, capacity, hidden)
    sources = rows_of_experts(world, rank)
    assert (count.dtype, count.tolist()) == (torch.int32, [len(of_expert) for of_expert in sources])
    src_info, layout_range, *rest = handle
    assert rest == [most, hidden, world.num_experts]
    assert (src_info.dtype, src_info.shape) == (torch.int32, (num_local, capacity))
    for local, of_expert in enumerate(sources):
        assert src_info[local, : len(of_expert)].tolist() == [token for _, token in of_expert]
        assert (src_info[local, len(of_expert) :] == -1).all()
    assert (layout_range.dtype, layout_range.shape) == (torch.int64, (num_local, world.num_ranks))
    check_ranges([[(pair & 0xFFFFFFFF, pair >> 32) for pair in row] for row in layout_range.tolist()], world, rank)
    if mode is None:
        return rows
    flat = scales.reshape(-1, width).contiguous()
    return ferry.dequantize(rows.view(-1, hidden), flat).view(rows.shape)


LATE_RANK = 0
LATE_SECONDS = 0.002
# In at least one of this many calls every other rank arrives before the late one, even on a busy machine.
MOST_CALLS = 400


def check_calls(rank: int, world: World, most: int, kind: str, ranks_per_node: int = 0) -> None:
    """ranks_per_node: all ranks, or 1, so that a node rounds the same sums as its rank."""
    buffer = make_latency_buffer(rank, kind, world, most, ranks_per_node=ranks_per_node)
    world = world.to(buffer.device)
    mine = inputs_of(world, rank, buffer.device)
    first, num_local = world.first_expert(rank), world.num_local(rank)
    total = torch.zeros(num_local, dtype=torch.int32, device=buffer.device)
    waits = torch.zeros(world.num_ranks, dtype=torch.int64, device=buffer.device)
    waited_ns = buffer._member.group.wait_times_ns
    num_calls = 0
    for options, mode in MODES:
        for how in ({}, {"async_finish": True}, {"return_recv_hook": True}):
            before = total.clone()
            if rank == LATE_RANK:
                time.sleep(LATE_SECONDS)
            received, count, handle, event, hook = buffer.low_latency_dispatch(
                mine.x,
                mine.idx,
                most,
                world.num_experts,
                cumulative_local_expert_recv_stats=total,
                dispatch_wait_recv_cost_stats=waits,
                **options,
                **how,
            )
            assert (hook is None) == ("return_recv_hook" not in how)
            assert (event.event is None) == ("async_finish" not in how)
            if hook is not None:
                assert torch.equal(total, before)
                hook()
            event.current_stream_wait()
            num_calls += 1
            rows = check_received(world, rank, most, received, count, handle, mode)
            assert torch.equal(total - before, count)
            y = run_experts(rows, first)
            y[:, :, :] = y.where(handle[0].unsqueeze(2) >= 0, torch.nan)  # rows without a token are not read
            if mode is not None:
                continue
            expected = weighted_sums(world, rank, rank_sums=True)
            out = torch.full_like(mine.x, 7.0)
            for out_option in ({}, {"out": out}):
                combined, event, hook = buffer.low_latency_combine(
                    y, mine.idx, mine.weights, handle, combine_wait_recv_cost_stats=waits, **how, **out_option
                )
                if hook is not None:
                    hook()
                event.current_stream_wait()
                assert torch.equal(combined, expected)
            assert combined is out
            # Rows are in the buffer's own memory; the argument x is not read.
            memory = buffer.get_next_low_latency_combine_buffer(handle)
            assert (memory.shape, memory.dtype) == (y.shape, torch.bfloat16)
            memory[:] = y
            assert buffer.get_next_low_latency_combine_buffer(handle).data_ptr() == memory.data_ptr()
            combined, event, hook = buffer.low_latency_combine(
                torch.zeros_like(y),
                mine.idx,
                mine.weights,
                handle,
                zero_copy=True,
                combine_wait_recv_cost_stats=waits,
                **how,
            )
            if hook is not None:
                hook()
            event.current_stream_wait()
            assert torch.equal(combined, expected)
    for _ in range(MOST_CALLS):
        if all_ranks(rank == LATE_RANK or bool(waits[LATE_RANK] > 0)):
            break
        if rank == LATE_RANK:
            time.sleep(LATE_SECONDS)
        buffer.low_latency_dispatch(
            mine.x, mine.idx, most, world.num_experts, use_fp8=False, dispatch_wait_recv_cost_stats=waits
        )
    else:
        raise AssertionError(f"not every rank has waited for the late one: {waits.tolist()}")
    # All calls since were given them. On GPUs the group's numbers lack the end of some waits.
    if buffer.device.type == "cpu":
        now_ns = buffer._member.group.wait_times_ns
        assert waits.tolist() == [now - then for now, then in zip(now_ns, waited_ns, strict=True)]
    assert waits[rank] == 0
    buffer.clean_low_latency_buffer(most, mine.x.shape[1], world.num_experts)
    # Throughput mode on the same buffer, in between.
    x, *_, handle, _ = dispatch(buffer, world, mine)
    received, count, latency_handle, _, _ = buffer.low_latency_dispatch(
        mine.x, mine.idx, most, world.num_experts, use_fp8=False
    )
    assert buffer.combine(x, handle)[0].shape == mine.x.shape
    check_received(world, rank, most, received, count, latency_handle, None)
    # Activations of a model that is not in no_grad, and a handle that was taken apart, with integers of another kind.
    received, _, latency_handle, _, hook = buffer.low_latency_dispatch(
        mine.x.clone().requires_grad_(), mine.idx, most, world.num_experts, use_fp8=False, return_recv_hook=True
    )
    hook()
    src_info, layout_range, *sizes = latency_handle
    y = run_experts(received, first).requires_grad_()
    combined, *_ = buffer.low_latency_combine(
        y, mine.idx, mine.weights, [src_info, layout_range, *torch.tensor(sizes).numpy()]
    )
    assert not combined.requires_grad
    assert torch.equal(combined, weighted_sums(world, rank, rank_sums=True))
    buffer.destroy()


@pytest.mark.parametrize(("num_experts", "num_tokens"), [(5, [6]), (6, [4, 0, 9])])
def test_calls(num_experts: int, num_tokens: list[int], device: str) -> None:
    """Fewer tokens than allowed, none on a rank, ids that repeat or are -1, one rank."""
    world = with_short_weights(make_world(len(num_tokens), num_experts, num_tokens, hidden=512))
    run_ranks(len(num_tokens), check_calls, world, max(num_tokens) + 1, device)


def test_calls_over_nodes(device: str) -> None:
    skip_without_network()
    world = with_short_weights(make_world(3, 6, [4, 0, 9], hidden=512))
    run_ranks(3, check_calls, world, 10, device, 1)


class Batch:
    """A micro-batch on its way through a layer."""

    def __init__(self, buffer: deep_ep.Buffer, world: World, rank: int, most: int) -> None:
        self.buffer, self.world, self.rank, self.most = buffer, world, rank, most

    def dispatch(self) -> None:
        mine = inputs_of(self.world, self.rank, self.buffer.device)
        self.x, self.count, self.handle, _, self.hook = self.buffer.low_latency_dispatch(
            mine.x.clone(), mine.idx.clone(), self.most, self.world.num_experts, use_fp8=False, return_recv_hook=True
        )

    def receive(self) -> None:
        self.hook()
        check_received(self.world, self.rank, self.most, self.x, self.count, self.handle, None)

    def combine(self, *, zero_copy: bool = False) -> None:
        mine = inputs_of(self.world, self.rank, self.buffer.device)
        y = run_experts(self.x, self.world.first_expert(self.rank))
        if zero_copy:
            self.buffer.get_next_low_latency_combine_buffer(self.handle)[:] = y
            y = torch.zeros_like(y)
        self.sums, _, self.hook = self.buffer.low_latency_combine(
            y, mine.idx, mine.weights.clone(), self.handle, zero_copy=zero_copy, return_recv_hook=True
        )
        self.x = self.handle = None  # clients drop objects that they have passed on

    def end(self) -> None:
        self.hook()
        assert torch.equal(self.sums, weighted_sums(self.world, self.rank, rank_sums=True))


def check_micro_batches(rank: int, worlds: list[World], most: int, kind: str) -> None:
    buffer = make_latency_buffer(rank, kind, worlds[0], most)
    other = make_latency_buffer(rank, kind, worlds[0], most)
    worlds = [world.to(buffer.device) for world in worlds]

    def pair(second: deep_ep.Buffer = buffer) -> tuple[Batch, Batch]:
        return Batch(buffer, worlds[0], rank, most), Batch(second, worlds[1], rank, most)

    for zero_copy in (False, True, True):
        a, b = pair()
        for step in (a.dispatch, b.dispatch, a.receive, b.receive):
            step()
        for batch in (a, b):
            batch.combine(zero_copy=zero_copy)
        gc.collect()
        for step in (a.end, b.end):
            step()
    a, b = pair()
    steps = (a.dispatch, a.receive, b.dispatch, a.combine, b.receive, a.end, a.dispatch, b.combine, a.receive, b.end)
    for step in (*steps, a.combine, a.end):
        step()
    # The halves in another order than the calls.
    a, b = pair()
    for step in (a.dispatch, b.dispatch, b.receive, a.receive, a.combine, b.combine, b.end, a.end):
        step()
    # A batch on each buffer.
    a, b = pair(other)
    for step in (a.dispatch, b.dispatch, b.receive, a.receive, b.combine, a.combine, a.end, b.end):
        step()
    other.destroy()
    # A throughput call between the halves.
    a, b = pair()
    for step in (a.dispatch, b.dispatch):
        step()
    mine = inputs_of(worlds[0], rank, buffer.device)
    x, *_, handle, _ = dispatch(buffer, worlds[0], mine)
    for step in (a.receive, a.combine, b.receive):
        step()
    assert buffer.combine(x, handle)[0].shape == mine.x.shape
    for step in (b.combine, a.end, b.end):
        step()
    buffer.destroy()


def test_two_micro_batches_in_flight(device: str) -> None:
    worlds = [
        with_short_weights(make_world(3, 6, [4, 0, 7], hidden=128, seed=1)),
        with_short_weights(make_world(3, 6, [0, 8, 3], hidden=128, seed=2)),
    ]
    run_ranks(3, check_micro_batches, worlds, 8, device)


BAD_RANK = 1


def check_refused(rank: int, world: World) -> None:
    most, bad = 8, rank == BAD_RANK
    buffer = make_latency_buffer(rank, "cpu", world, most)
    mine = inputs_of(world, rank, device_of(rank, "cpu"))
    stats, waits = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)

    def refused(call: Any, match: str, kind: Any = ferry.FerryError) -> None:
        with pytest.raises(kind if bad else ferry.FerryError, match=match if bad else None):
            call()

    good: dict[str, Any] = {
        "x": mine.x,
        "topk_idx": mine.idx,
        "num_max_dispatch_tokens_per_rank": most,
        "num_experts": world.num_experts,
    }
    wrong_arguments: list[tuple[dict[str, Any], str, Any]] = [
        ({"x": mine.x.float()}, "bfloat16", ferry.InvalidArgument),
        ({"x": mine.x[:, ::2]}, "contiguous", ferry.InvalidArgument),
        ({"x": mine.x.to("meta")}, "meta", ferry.InvalidArgument),
        ({"x": mine.x[:, :5].contiguous()}, "16 bytes", ferry.InvalidArgument),
        ({"x": None}, "NoneType", ferry.InvalidArgument),
        ({"topk_idx": mine.idx.int()}, "int64", ferry.InvalidArgument),
        ({"topk_idx": mine.idx[:-1]}, "shape", ferry.InvalidArgument),
        ({"topk_idx": mine.idx + world.num_experts}, "expert", ferry.InvalidArgument),
        ({"num_experts": 7}, "multiple of 2", ferry.InvalidArgument),
        ({"num_max_dispatch_tokens_per_rank": 2}, "2", ferry.FerryError),
        ({"num_max_dispatch_tokens_per_rank": 0}, "max_tokens", ferry.InvalidArgument),
        ({"num_max_dispatch_tokens_per_rank": "8 tokens"}, "8 tokens", ValueError),
        ({"cumulative_local_expert_recv_stats": stats.long()}, "int32", ferry.InvalidArgument),
        ({"cumulative_local_expert_recv_stats": stats[:2]}, "shape", ferry.InvalidArgument),
        ({"dispatch_wait_recv_cost_stats": waits.int()}, "int64", ferry.InvalidArgument),
        ({"use_ue8m0": True}, "round_scale", ferry.InvalidArgument),
        ({"async_finish": True, "return_recv_hook": True}, "at most one", ferry.InvalidArgument),
        ({"use_nvfp4": True}, "use_nvfp4", NotImplementedError),
    ]
    for wrong, match, kind in wrong_arguments:
        refused(lambda wrong=wrong: buffer.low_latency_dispatch(**good | (wrong if bad else {})), match, kind)
    assert not stats.any()

    x, _, handle, _, hook = buffer.low_latency_dispatch(
        **good, use_fp8=False, return_recv_hook=True, cumulative_local_expert_recv_stats=stats
    )
    with pytest.raises(ferry.InvalidArgument, match="sent and not received"):
        buffer.low_latency_combine(x, mine.idx, mine.weights, handle)
    assert not stats.any()
    hook()
    counted = stats.clone()
    with pytest.raises(ferry.InvalidArgument, match="received before"):
        hook()
    assert torch.equal(stats, counted)
    y = run_experts(x, world.first_expert(rank))
    good = {"x": y, "topk_idx": mine.idx, "topk_weights": mine.weights, "handle": handle}
    src_info, *rest = handle
    wrong_arguments = [
        ({"x": y.float()}, "bfloat16", ferry.InvalidArgument),
        ({"x": y[:, :-1]}, "shape", ferry.InvalidArgument),
        ({"x": y.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous", ferry.InvalidArgument),
        ({"topk_idx": mine.idx[:-1]}, "shape", ferry.InvalidArgument),
        ({"topk_weights": mine.weights.double()}, "float32", ferry.InvalidArgument),
        ({"out": mine.x.float()}, "bfloat16", ferry.InvalidArgument),
        ({"out": mine.x[:-1]}, "shape", ferry.InvalidArgument),
        ({"combine_wait_recv_cost_stats": stats}, "int64", ferry.InvalidArgument),
        ({"handle": (src_info.clone(), *rest)}, "copy", ferry.InvalidArgument),
        ({"handle": handle[:4]}, "4 values", ferry.InvalidArgument),
        ({"handle": None}, "NoneType", ferry.InvalidArgument),
        ({"handle": (1, 2, 3, 4, 5)}, "int", ferry.InvalidArgument),
        ({"handle": (src_info, rest[0], most, "wide", 6)}, "hidden", ferry.InvalidArgument),
        ({"handle": (src_info, rest[0], most, -1, 6)}, "hidden", ferry.InvalidArgument),
        ({"zero_copy": True}, "get_next_low_latency_combine_buffer", ferry.InvalidArgument),
        ({"use_logfmt": True}, "use_logfmt=True is not implemented", NotImplementedError),
        ({"async_finish": True, "return_recv_hook": True}, "at most one", ferry.InvalidArgument),
    ]
    for wrong, match, kind in wrong_arguments:
        refused(lambda wrong=wrong: buffer.low_latency_combine(**good | (wrong if bad else {})), match, kind)
    assert torch.equal(buffer.low_latency_combine(**good)[0], weighted_sums(world, rank, rank_sums=True))
    # A handle is five values that are found again by the first: a tuple that was taken apart works.
    again = buffer.low_latency_combine(y, mine.idx, mine.weights, [src_info.view(src_info.shape), *rest])[0]
    assert torch.equal(again, weighted_sums(world, rank, rank_sums=True))
    with pytest.raises(ferry.InvalidArgument, match="multiple of 2"):
        buffer.clean_low_latency_buffer(most, 64, 7)
    with pytest.raises(ferry.InvalidArgument, match="hidden"):
        buffer.clean_low_latency_buffer(most, 0, 6)

    check_other_buffers(rank, world, buffer, good)


def check_other_buffers(rank: int, world: World, buffer: deep_ep.Buffer, good: dict[str, Any]) -> None:
    plain = make_buffer(rank, "cpu")
    for call in (
        lambda: plain.low_latency_dispatch(good["x"][0], good["topk_idx"], 8, 6),
        lambda: plain.low_latency_combine(**good),
        lambda: plain.clean_low_latency_buffer(8, 64, 6),
        lambda: plain.get_next_low_latency_combine_buffer(good["handle"]),
    ):
        with pytest.raises(ferry.InvalidArgument, match="low_latency_mode=False"):
            call()
    plain.destroy()
    replaced = make_latency_buffer(rank, "cpu", world, 8)
    for call in (
        lambda: replaced.low_latency_combine(**good),
        lambda: replaced.get_next_low_latency_combine_buffer(good["handle"]),
    ):
        with pytest.raises(ferry.InvalidArgument, match=r"another buffer|rank"):
            call()
    x, topk_idx = world.x[rank], good["topk_idx"]
    *_, hook = replaced.low_latency_dispatch(x, topk_idx, 8, 6, return_recv_hook=True)
    replaced.destroy()
    with pytest.raises(ferry.InvalidArgument, match="destroyed"):
        hook()
    buffer.destroy()
    for call in (
        lambda: buffer.low_latency_dispatch(x, topk_idx, 8, 6),
        lambda: buffer.low_latency_combine(**good),
        lambda: buffer.clean_low_latency_buffer(8, 64, 6),
        lambda: buffer.get_next_low_latency_combine_buffer(good["handle"]),
    ):
        with pytest.raises(ferry.InvalidArgument, match="destroyed"):
            call()


def test_wrong_arguments_are_exceptions_on_all_ranks() -> None:
    run_ranks(2, check_refused, with_short_weights(make_world(2, 6, [5, 8])))


LOST_RANK = 0


def check_shrink(rank: int, world: World, most: int, kind: str) -> None:
    """A rank dies; calls of the others return without it, and go on."""
    buffer = make_latency_buffer(rank, kind, world, most, enable_shrink=True)
    assert buffer.enable_shrink
    world = world.to(buffer.device)
    mine, first = inputs_of(world, rank, buffer.device), world.first_expert(rank)
    status = torch.full((world.num_ranks,), 7, dtype=torch.int32, device=buffer.device)

    def check_layer(left: World, split: bool) -> None:
        options = {"use_fp8": False, "return_recv_hook": split}
        received, count, handle, _, hook = buffer.low_latency_dispatch(
            mine.x, mine.idx, most, world.num_experts, **options
        )
        if hook is not None:
            hook()
        rows = check_received(left, rank, most, received, count, handle, None)
        y = run_experts(rows, first)
        out, _, hook = buffer.low_latency_combine(y, mine.idx, mine.weights, handle, return_recv_hook=split)
        if hook is not None:
            hook()
        assert torch.equal(out, weighted_sums(left, rank, rank_sums=True))

    def mask() -> list[int]:
        buffer.low_latency_query_mask_buffer(status)
        return status.tolist()

    check_layer(world, False)
    assert mask() == [0] * world.num_ranks
    dist.barrier()
    if rank == LOST_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = [int(other == LOST_RANK) for other in range(world.num_ranks)]
    for split in (True, False):
        check_layer(world.without(LOST_RANK), split)
        assert mask() == lost
    buffer.low_latency_clean_mask_buffer()
    assert mask() == [0] * world.num_ranks
    buffer.low_latency_update_mask_buffer(LOST_RANK, mask=True)
    assert mask() == lost
    buffer.low_latency_update_mask_buffer(LOST_RANK)
    assert mask() == [0] * world.num_ranks
    check_layer(world.without(LOST_RANK), False)


def test_a_buffer_that_shrinks(device: str) -> None:
    world = with_short_weights(make_world(3, 6, [4, 8, 6], hidden=128))
    run_ranks(3, check_shrink, world, 8, device, lost=(LOST_RANK,))


def check_no_shrink(rank: int, world: World) -> None:
    buffer = make_latency_buffer(rank, "cpu", world, 8)
    calls = (
        lambda: buffer.low_latency_update_mask_buffer(1 - rank, True),
        lambda: buffer.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32)),
        buffer.low_latency_clean_mask_buffer,
    )
    for call in calls:
        with pytest.raises(ferry.InvalidArgument, match="mask_buffer: the buffer was created with enable_shrink=False"):
            call()
    buffer.destroy()


def test_mask_calls_need_a_buffer_that_shrinks() -> None:
    run_ranks(2, check_no_shrink, make_world(2, 4, [3, 2]))
