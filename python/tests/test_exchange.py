"""Values, order and shapes, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from network import skip_without_network
from ranks import device_of, run_ranks
from world import World, make_world

import ferry


def stack(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows) if rows else like.new_empty(0, like.shape[-1])


def check_tokens(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    assert (group.rank, group.num_ranks, group.backend) == (rank, world.num_ranks, kind)
    idx, weights, x = world.topk_idx[rank], world.topk_weights[rank], world.x[rank]
    routing = group.route(idx, weights, num_experts=world.num_experts)
    rows = world.rows_of(rank)
    assert routing.num_recv_rows == routing.num_used_rows == len(rows)
    assert routing.source.tolist() == [list(row) for row in rows]
    assert routing.num_rows_from_rank == [sum(s == source for s, _ in rows) for source in range(world.num_ranks)]
    assert torch.equal(routing.topk_idx, idx)
    assert torch.equal(routing.topk_weights, weights)
    assert routing.local_expert_ids == [world.first_expert(rank) + i for i in range(world.num_local(rank))]

    assert routing.local_expert_counts.tolist() == routing.num_rows_per_local_expert

    source = torch.empty(len(rows), 2, dtype=torch.int32, device=device)
    received = group.dispatch(routing, x, out_source=source)
    assert torch.equal(received.x, stack([world.x[s][t] for s, t in rows], x))
    assert torch.equal(source, routing.source)
    assert received.scales is None
    for row, (source, token) in enumerate(rows):
        for k, expert in enumerate(world.topk_idx[source][token].tolist()):
            here = expert >= 0 and world.owner(expert) == rank
            assert received.topk_idx[row, k] == (expert - world.first_expert(rank) if here else -1)
            assert received.topk_weights[row, k] == (world.topk_weights[source][token, k] if here else 0.0)

    # Each rank scales its rows, so that the sum shows which ranks took part.
    y = (received.x.float() * (rank + 1)).to(x.dtype)
    bias = torch.ones_like(x)
    combined = group.combine(routing, y, weights=received.topk_weights, bias=bias)
    for token in range(len(x)):
        total = bias[token].float()
        for other in world.ranks_of(rank, token):
            total = total + (x[token].float() * (other + 1)).to(x.dtype).float()
        assert torch.equal(combined.x[token], total.to(x.dtype)), token
    assert torch.equal(combined.weights, torch.where(idx >= 0, weights, 0.0))
    group.destroy()


@pytest.mark.parametrize("num_tokens", [[5], [4, 9, 0], [0, 0], [7, 7, 7, 7]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_by_token(num_tokens: list[int], dtype: torch.dtype, device: str) -> None:
    world = make_world(len(num_tokens), 7, num_tokens, dtype=dtype)
    run_ranks(len(num_tokens), check_tokens, world, device)


def check_experts(rank: int, world: World, alignment: int, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    x = world.x[rank]
    routing = group.route(
        world.topk_idx[rank],
        world.topk_weights[rank],
        num_experts=world.num_experts,
        layout="experts",
        expert_alignment=alignment,
    )
    received = group.dispatch(routing, x, zero_padding=True)
    assert received.topk_idx is None
    offsets = routing.expert_row_offsets
    for local, expert in enumerate(routing.local_expert_ids):
        rows = world.rows_of_expert(expert)
        first = offsets[local]
        assert first % alignment == 0
        assert routing.num_rows_per_local_expert[local] == len(rows)
        assert torch.equal(received.x[first : first + len(rows)], stack([world.x[s][t] for s, t in rows], x))
        assert not received.x[first + len(rows) : offsets[local + 1]].any()
    combined = group.combine(routing, received.x, weighted=True)
    for token in range(len(x)):
        entries = [
            (e, w) for e, w in zip(world.topk_idx[rank][token].tolist(), world.topk_weights[rank][token]) if e >= 0
        ]
        total = torch.zeros(x.shape[-1], dtype=torch.float64, device=device)
        for _, weight in entries:
            total += weight.double() * x[token].double()
        torch.testing.assert_close(combined.x[token].double(), total, rtol=1e-2, atol=1e-2)
    group.destroy()


@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_by_expert(alignment: int, device: str) -> None:
    run_ranks(3, check_experts, make_world(3, 8, [6, 1, 11]), alignment, device)


def check_slab(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    capacity = 16
    routing = group.route(world.topk_idx[rank], num_experts=world.num_experts, layout="slab", slab_capacity=capacity)
    received = group.dispatch(routing, world.x[rank], zero_padding=True)
    slab = received.x.view(routing.num_local_experts, capacity, -1)
    for local, expert in enumerate(routing.local_expert_ids):
        rows = world.rows_of_expert(expert)
        assert torch.equal(slab[local, : len(rows)], stack([world.x[s][t] for s, t in rows], world.x[rank]))
    with pytest.raises(ferry.CapacityExceeded, match="slab_capacity"):
        ids = torch.zeros(9, 1, dtype=torch.int64, device=device)
        group.route(ids, num_experts=world.num_experts, layout="slab", slab_capacity=capacity)
        group.wait()  # rows are bounded: on a GPU nothing waits for the counts before this
    group.destroy()


def check_bounds(rank: int, world: World, kind: str, ranks_per_node: int) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=ranks_per_node)
    idx, x = world.topk_idx[rank], world.x[rank]
    bounds = {"max_recv_rows": 20, "max_tokens": 8}
    routing = group.route(idx, num_experts=world.num_experts, **bounds)
    exact = group.route(idx, num_experts=world.num_experts)
    rows = group.dispatch(exact, x).x
    assert torch.equal(group.dispatch(routing, x).x[: len(rows)], rows)
    assert torch.equal(routing.slots, exact.slots)
    with pytest.raises(ferry.InvalidArgument, match="max_recv_rows"):
        group.route(idx, num_experts=world.num_experts, max_tokens=8)
    with pytest.raises(ferry.CapacityExceeded, match="max_tokens"):
        group.route(idx, num_experts=world.num_experts, **bounds | {"max_tokens": len(idx) - 1})
    group.destroy()


@pytest.mark.parametrize("ranks_per_node", [0, 1])
def test_routes_of_bounded_tokens(ranks_per_node: int, device: str) -> None:
    if ranks_per_node:
        skip_without_network()
    run_ranks(2, check_bounds, make_world(2, 4, [8, 8], num_topk=2), device, ranks_per_node)


def test_slabs(device: str) -> None:
    run_ranks(2, check_slab, make_world(2, 4, [8, 8], num_topk=2), device)


def check_fp8(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    routing = group.route(world.topk_idx[rank], num_experts=world.num_experts)
    count = len(world.x[rank])
    payload = world.x[rank].float().clamp(-8, 8).to(torch.float8_e4m3fn)
    scales = (
        torch.arange(count * 2, dtype=torch.float32, device=device).view(2, count).t() + 100 * rank
    )  # column by column
    received = group.dispatch(routing, payload, scales=scales, tables=False)
    assert received.topk_idx is None
    assert received.topk_weights is None
    for row, (source, token) in enumerate(world.rows_of(rank)):
        sent = world.x[source][token].float().clamp(-8, 8).to(torch.float8_e4m3fn)
        assert torch.equal(received.x[row].view(torch.uint8), sent.view(torch.uint8))
        tokens_there = len(world.x[source])
        assert received.scales[row].tolist() == [token + 100.0 * source, tokens_there + token + 100.0 * source]
    group.destroy()


def test_fp8_rows_with_strided_scales(device: str) -> None:
    run_ranks(2, check_fp8, make_world(2, 6, [5, 8]), device)


def check_fp8_on_the_wire(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    routing = group.route(world.topk_idx[rank], num_experts=world.num_experts)
    y = group.dispatch(routing, world.x[rank], tables=False).x * (rank + 1)
    bias = torch.ones_like(world.x[rank])
    combined = group.combine(routing, y, bias=bias, wire_format="fp8")
    for token, row in enumerate(world.x[rank]):
        total = bias[token].float()
        for other in world.ranks_of(rank, token):
            quantized = ferry.quantize((row * (other + 1)).unsqueeze(0), "fp8")
            scales = quantized.scales.repeat_interleave(128, dim=1)
            total = total + (quantized.x.float() * scales)[0]
        assert torch.equal(combined.x[token], total.to(row.dtype)), token
    as_given = group.combine(routing, y, bias=bias)
    assert len(bias) == 0 or not torch.equal(as_given.x, combined.x)
    with pytest.raises(ferry.InvalidArgument, match="wire_format is 'int8', expected None or 'fp8'"):
        group.combine(routing, y, wire_format="int8")
    with pytest.raises(ferry.InvalidArgument, match="ranks disagree on wire_format"):
        group.combine(routing, y, wire_format="fp8" if rank == 0 else None)
    narrow = y[:, :64].contiguous()
    with pytest.raises(ferry.InvalidArgument, match="multiple of 128"):
        group.combine(routing, narrow, wire_format="fp8")
    group.destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_combine_quantises_on_the_wire(dtype: torch.dtype, device: str) -> None:
    run_ranks(3, check_fp8_on_the_wire, make_world(3, 6, [5, 0, 8], hidden=256, dtype=dtype), device)


def check_cached(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    first = group.route(world.topk_idx[rank], num_experts=world.num_experts)
    second = group.route(world.topk_idx[rank][:2].contiguous(), num_experts=world.num_experts)
    rows = world.rows_of(rank)
    for scale in (1, 2):
        received = group.dispatch(first, world.x[rank] * scale)
        assert torch.equal(received.x, stack([world.x[s][t] * scale for s, t in rows], world.x[rank]))
    assert len(group.dispatch(second, world.x[rank][:2]).x) == second.num_recv_rows
    out = group.empty(first.num_recv_rows, world.x[rank].shape[1])
    assert group.dispatch(first, world.x[rank], out=out).x is out
    assert torch.equal(out, stack([world.x[s][t] for s, t in rows], out))
    group.destroy()


def test_a_routing_is_used_many_times(device: str) -> None:
    run_ranks(2, check_cached, make_world(2, 6, [5, 8]), device)


def check_trim(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    expected = stack([world.x[s][t] for s, t in world.rows_of(rank)], world.x[rank])
    for _ in range(3):
        routing = group.route(world.topk_idx[rank], num_experts=world.num_experts)
        assert torch.equal(group.dispatch(routing, world.x[rank]).x, expected)
        group.trim()
        if kind == "cpu":  # on a GPU the tables of the Routing are counted too
            assert group._native.memory_usage()[1] == 0
    group.destroy()
    with pytest.raises(ferry.InvalidArgument, match="destroyed"):
        group.trim()


def test_trim_gives_staging_back(device: str) -> None:
    run_ranks(2, check_trim, make_world(2, 6, [5, 8]), device)


def check_lifetimes(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    other = ferry.Group(dist.group.WORLD, device=device)
    kept = ferry.empty((3, 16), group=group, dtype=torch.float32)
    routing = group.route(world.topk_idx[rank], num_experts=world.num_experts)
    slots = routing.slots
    expected = slots.clone()
    group.destroy()
    with pytest.raises(ferry.InvalidArgument, match="destroy"):
        group.dispatch(routing, world.x[rank])
    with pytest.raises(ferry.InvalidArgument):
        other.dispatch(routing, world.x[rank])
    del group, routing
    kept.fill_(1.0)
    assert kept.sum() == 48
    assert torch.equal(slots, expected)
    other.route(world.topk_idx[rank], num_experts=world.num_experts)  # never destroyed


def test_memory_outlives_its_group(device: str) -> None:
    run_ranks(2, check_lifetimes, make_world(2, 4, [3, 3]), device)
