"""ElasticBuffer: values, order and shapes of the second generation, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clients import device_of, inputs_of, make_deferring, make_elastic, make_ep, tensors_read
from network import skip_without_network
from ranks import run_ranks
from world import World, make_world

import deep_ep
import reference
from reference import Expanded, align


def expected_rows(world: World, rank: int, alignment: int, wait: bool, num_topk: int) -> int:
    if wait:
        return Expanded(world, rank, alignment).num_rows
    num_local = world.num_local(rank)
    return align(world.num_ranks * 32 * min(num_topk, num_local) + (alignment - 1) * num_local, alignment)


def check_handle(handle: deep_ep.EPHandle, world: World, rank: int, alignment: int, wait: bool) -> None:
    rows, layout = world.rows_of(rank), Expanded(world, rank, alignment)
    num_topk = world.topk_idx[rank].shape[1]
    assert torch.equal(handle.topk_idx.cpu(), world.topk_idx[rank])
    assert (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank) == (
        world.num_experts,
        alignment,
        32,
    )
    assert handle.num_recv_tokens == (len(rows) if wait else world.num_ranks * 32)
    counts = [align(count, alignment) for count in layout.counts]
    assert handle.num_recv_tokens_per_expert_list == (counts if wait else [])
    assert all(type(count) is int for count in handle.num_recv_tokens_per_expert_list)
    from_ranks = [sum(source <= other for source, _ in rows) for other in range(world.num_ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == from_ranks
    if handle.do_expand:
        ends = [start + count for start, count in zip(layout.starts, layout.counts)]
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == layout.counts
    else:
        ends = [sum(counts[: local + 1]) for local in range(len(counts))]
        assert handle.num_unaligned_recv_tokens_per_expert is None and handle.num_expanded_tokens == 0
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    for tensor in (handle.psum_num_recv_tokens_per_scaleup_rank, handle.psum_num_recv_tokens_per_expert):
        assert tensor.dtype == torch.int32

    metadata = handle.recv_src_metadata
    assert metadata.dtype == torch.int32 and metadata.shape == (handle.num_recv_tokens, 2 + num_topk)
    for row, (source, token) in enumerate(rows):
        ids = reference.local_ids(world, rank, source, token)
        last = max(k for k, expert in enumerate(ids) if expert >= 0)
        slots = [
            layout.row_of(source, token, expert)
            if handle.do_expand and expert >= 0 and expert not in ids[k + 1 :]
            else -1
            for k, expert in enumerate(ids)
        ]
        assert metadata[row].tolist() == [source * 32 + token, source * num_topk + last, *slots]
    assert (metadata[len(rows) :] == -1).all()


MAKERS = [make_elastic, make_deferring]


def check_compact(
    rank: int,
    world: World,
    device: str,
    alignment: int,
    wait: bool,
    ranks_per_node: int = 0,
    make: Callable[..., Any] = make_elastic,
) -> None:
    """ranks_per_node: all ranks, or 1, so that a node rounds the same sums as its rank."""
    buffer = make(rank, device, ranks_per_node=ranks_per_node)
    mine = inputs_of(world, rank, device_of(rank, device))
    stats = torch.full((world.num_local(rank),), 100, dtype=torch.int32, device=buffer.device)
    x, idx, weights, handle, event = buffer.dispatch(
        mine.x,
        mine.idx,
        mine.weights,
        stats,
        num_experts=world.num_experts,
        expert_alignment=alignment,
        do_cpu_sync=wait,
    )
    assert event.event is None and not handle.do_expand
    check_handle(handle, world, rank, alignment, wait)
    assert stats.tolist() == [100 + count for count in Expanded(world, rank, 1).counts]
    expected = reference.received_rows(world, rank)
    count = len(expected)
    assert len(x) == len(idx) == len(weights) == handle.num_recv_tokens
    for scale in (1, 2):
        assert torch.equal(x[:count].cpu(), expected * scale)
        assert idx[:count].tolist() == reference.received_ids(world, rank)
        assert torch.equal(weights[:count].cpu(), reference.received_weights(world, rank) * scale)
        assert (idx[count:] == -1).all()
        y = reference.scaled(x, rank) / scale
        y[count:] = float("nan")
        bias = (torch.ones_like(mine.x), torch.full_like(mine.x, 0.25))
        out, sums, event = buffer.combine(y, handle, weights / scale, bias)
        assert event.event is None
        assert torch.equal(out.cpu(), reference.combined(world, rank, [b.cpu() for b in bias]))
        assert torch.equal(sums.cpu(), torch.where(world.topk_idx[rank] >= 0, world.topk_weights[rank], 0.0))
        x, idx, weights, again, _ = buffer.dispatch(mine.x * 2, topk_weights=mine.weights * 2, handle=handle)
        assert again is handle
    assert buffer.dispatch(mine.x, handle=handle)[2] is None
    assert buffer.combine(y, handle)[1] is None
    buffer.destroy()


@pytest.mark.parametrize("num_tokens", [[5], [4, 9, 0], [0, 0], [7, 7, 7, 7]])
@pytest.mark.parametrize(("alignment", "wait"), [(1, True), (8, True), (8, False)])
@pytest.mark.parametrize("make", MAKERS)
def test_rows_by_token(
    num_tokens: list[int], alignment: int, wait: bool, make: Callable[..., Any], device: str
) -> None:
    world = make_world(len(num_tokens), 12, num_tokens, num_topk=4)
    run_ranks(len(num_tokens), check_compact, world, device, alignment, wait, 0, make)


def expert_rows(x: torch.Tensor, layout: Expanded) -> torch.Tensor:
    """Each expert computes something different; gaps become NaN."""
    y = torch.full_like(x, float("nan"))
    for row, (_, _, local) in layout.rows.items():
        y[row] = (x[row].float() * (1.0 + local)).to(x.dtype)
    return y


def expected_combined(world: World, rank: int, bias: torch.Tensor, single_rounding: bool) -> torch.Tensor:
    out = torch.empty_like(world.x[rank])
    for token, x in enumerate(world.x[rank]):
        total = bias[token].float()
        for other in world.ranks_of(rank, token):
            ids = reference.local_ids(world, other, rank, token)
            part = torch.zeros(len(x))
            for k, local in enumerate(ids):
                if local >= 0 and local not in ids[k + 1 :]:
                    part = part + (x.float() * (1.0 + local)).to(x.dtype).float()
            total = total + (part if single_rounding else part.to(x.dtype).float())
        out[token] = total.to(x.dtype)
    return out


def check_expanded(
    rank: int,
    world: World,
    device: str,
    alignment: int,
    wait: bool,
    single_rounding: bool,
    ranks_per_node: int = 0,
    make: Callable[..., Any] = make_elastic,
) -> None:
    """ranks_per_node: as for :func:`check_compact`."""
    buffer = make(rank, device, allow_multiple_reduction=not single_rounding, ranks_per_node=ranks_per_node)
    mine = inputs_of(world, rank, device_of(rank, device))
    layout = Expanded(world, rank, alignment)
    x, idx, weights, handle, _ = buffer.dispatch(
        mine.x,
        mine.idx,
        mine.weights,
        num_experts=world.num_experts,
        expert_alignment=alignment,
        do_cpu_sync=wait,
        do_expand=True,
        do_zero_padding=True,
    )
    assert idx is None and handle.do_expand
    check_handle(handle, world, rank, alignment, wait)
    num_rows = expected_rows(world, rank, alignment, wait, mine.idx.shape[1])
    assert x.shape == (num_rows, mine.x.shape[1]) and weights.shape == (num_rows,)
    assert handle.num_expanded_tokens == num_rows
    bias = torch.full_like(mine.x, 0.5)
    for scale in (1.0, 2.0):
        gaps = torch.ones(num_rows, dtype=torch.bool)
        for row, (source, token, local) in layout.rows.items():
            gaps[row] = False
            assert torch.equal(x[row].cpu(), world.x[source][token] * scale)
            ids = torch.tensor(reference.local_ids(world, rank, source, token))
            torch.testing.assert_close(
                weights[row].cpu(), (world.topk_weights[source][token] * scale)[ids == local].sum()
            )
        assert not x[gaps.to(x.device)].any() and not weights[gaps.to(x.device)].any()
        out, _, _ = buffer.combine(expert_rows(x / scale, layout), handle, bias=bias)
        assert torch.equal(out.cpu(), expected_combined(world, rank, bias.cpu(), single_rounding))
        x, idx, weights, _, _ = buffer.dispatch(
            mine.x * 2, topk_weights=mine.weights * 2, handle=handle, do_expand=True, do_zero_padding=True
        )
        assert idx is None

    # Weights of an expert's row go back to every choice of it.
    values = torch.full((num_rows,), float("nan"))
    for row, (_, _, local) in layout.rows.items():
        values[row] = world.first_expert(rank) + local + 1.0
    ones = torch.zeros(num_rows, mine.x.shape[1], dtype=torch.bfloat16, device=x.device)
    _, sums, _ = buffer.combine(ones, handle, topk_weights=values.to(x.device))
    assert torch.equal(sums.cpu(), (world.topk_idx[rank] + 1).float())
    buffer.destroy()


@pytest.mark.parametrize("num_tokens", [[5], [4, 9, 0], [0, 0], [7, 7, 7, 7]])
@pytest.mark.parametrize(
    ("alignment", "wait", "single_rounding"), [(1, True, False), (8, True, True), (8, False, False), (1, False, False)]
)
@pytest.mark.parametrize("make", MAKERS)
def test_rows_by_expert(
    num_tokens: list[int], alignment: int, wait: bool, single_rounding: bool, make: Callable[..., Any], device: str
) -> None:
    world = make_world(len(num_tokens), 12, num_tokens, num_topk=4)
    run_ranks(len(num_tokens), check_expanded, world, device, alignment, wait, single_rounding, 0, make)


def check_ep(rank: int, world: World, device: str) -> None:
    check_compact(rank, world, device, 8, True, 0, make_ep)
    check_expanded(rank, world, device, 8, False, True, 0, make_ep)


def test_rows_of_ep_buffer(device: str) -> None:
    run_ranks(3, check_ep, make_world(3, 12, [4, 9, 0], num_topk=4), device)


def check_over_nodes(rank: int, world: World, device: str) -> None:
    for make in (*MAKERS, make_ep):
        check_compact(rank, world, device, 8, True, 1, make)
        for single_rounding in (False, True):
            check_expanded(rank, world, device, 8, True, single_rounding, 1, make)


def test_rows_over_nodes(device: str) -> None:
    skip_without_network()
    run_ranks(3, check_over_nodes, make_world(3, 12, [4, 9, 0], num_topk=4), device)


@pytest.mark.parametrize(("hidden", "num_topk", "num_experts"), [(7168, 8, 64), (64, 16, 64), (64, 8, 2)])
def test_shapes_of_clients(hidden: int, num_topk: int, num_experts: int, device: str) -> None:
    world = make_world(2, num_experts, [6, 3], hidden=hidden, num_topk=num_topk)
    run_ranks(2, check_expanded, world, device, 4, False, False)


def check_scales(
    rank: int, world: World, device: str, expand: bool, wait: bool, column_major: bool, make: Callable[..., Any]
) -> None:
    buffer = make(rank, device, use_fp8_dispatch=True)
    mine = inputs_of(world, rank, device_of(rank, device))
    payloads = [x.float().clamp(-8, 8).to(torch.float8_e4m3fn) for x in world.x]
    all_scales = [(x[:, :5].float() * 1000).to(torch.int32) for x in world.x]
    given = (payloads[rank].to(buffer.device), all_scales[rank].to(buffer.device).t().contiguous().t())
    options = {"use_tma_aligned_col_major_sf": column_major, "do_zero_padding": True}
    (x, scales), *_, handle, _ = buffer.dispatch(
        given,
        mine.idx,
        num_experts=world.num_experts,
        expert_alignment=8,
        do_expand=expand,
        do_cpu_sync=wait,
        **options,
    )
    if expand:
        places = {row: key[:2] for row, key in Expanded(world, rank, 8).rows.items()}
    else:
        places = dict(enumerate(world.rows_of(rank)))
    for _ in range(2):
        assert len(x) == len(scales)
        strides = (1, align(len(x), 4)) if column_major else (5, 1)
        assert scales.stride() == strides and scales.dtype == torch.int32
        for row in range(len(x)):
            if row in places:
                source, token = places[row]
                assert torch.equal(x[row].cpu().view(torch.uint8), payloads[source][token].view(torch.uint8))
                assert torch.equal(scales[row].cpu(), all_scales[source][token])
            else:
                assert not scales[row].any() and not x[row].view(torch.uint8).any()
        (x, scales), *_ = buffer.dispatch(given, handle=handle, **options)
    buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize(("wait", "column_major"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("make", MAKERS)
def test_fp8(expand: bool, wait: bool, column_major: bool, make: Callable[..., Any], device: str) -> None:
    run_ranks(2, check_scales, make_world(2, 6, [5, 8]), device, expand, wait, column_major, make)


def check_fleeting_biases(rank: int, world: World, device: str) -> None:
    """Biases that have no owner but the call."""
    for single_rounding in (False, True):
        buffer = make_elastic(rank, device, allow_multiple_reduction=not single_rounding)
        mine = inputs_of(world, rank, device_of(rank, device))
        made = [torch.full(mine.x.shape, 0.3, device=mine.x.device), torch.rand(mine.x.shape, device=mine.x.device)]
        kept = [tensor.bfloat16() for tensor in made]
        for expand in (False, True):
            x, _, _, handle, _ = buffer.dispatch(mine.x, mine.idx, num_experts=world.num_experts, do_expand=expand)
            expected, _, _ = buffer.combine(x, handle, bias=kept)
            with tensors_read() as read:
                for bias in (map(torch.Tensor.bfloat16, made), (tensor.bfloat16() for tensor in made)):
                    assert torch.equal(buffer.combine(x, handle, bias=bias)[0], expected)
            assert len(read) == 4, "the stream of the call is told of each"
        buffer.destroy()


def test_biases_of_iterators(device: str) -> None:
    run_ranks(2, check_fleeting_biases, make_world(2, 6, [5, 8]), device)


def check_events(rank: int, world: World, device: str) -> None:
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    for previous in (None, buffer.capture(), deep_ep.EventOverlap(deep_ep.EventHandle()), deep_ep.EventOverlap()):
        options = {
            "previous_event": previous,
            "previous_event_before_epilogue": previous,
            "async_with_compute_stream": True,
            "allocate_on_comm_stream": previous is not None,
        }
        x, _, _, handle, event = buffer.dispatch(mine.x, mine.idx, num_experts=world.num_experts, **options)
        assert isinstance(event, deep_ep.EventOverlap) and isinstance(event.event, deep_ep.EventHandle)
        event.current_stream_wait()
        out, _, event = buffer.combine(reference.scaled(x, rank), handle, **(options | {"previous_event": None}))
        event.current_stream_wait()
        assert torch.equal(out.cpu(), reference.combined(world, rank, []))
    for on_host in (False, True):
        buffer.barrier(with_cpu_sync=on_host)
    buffer.destroy()


def test_asynchronous_calls(device: str) -> None:
    run_ranks(2, check_events, make_world(2, 6, [5, 8]), device)
