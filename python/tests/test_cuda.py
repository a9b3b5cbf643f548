"""Behaviour that only GPUs have: streams, memory that is reused in stream order, graphs, and errors that appear
late.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, run_ranks
from world import World, make_world

import ferry

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

NUM_RANKS = 2
# Clock ticks of a kernel that keeps a stream busy for about half a second: long after a call has returned.
BUSY = 800_000_000


def make_group(rank: int, **options) -> ferry.Group:
    return ferry.Group(dist.group.WORLD, device=device_of(rank, "cuda"), **options)


def expected_rows(world: World, rank: int) -> torch.Tensor:
    return torch.stack([world.x[source][token] for source, token in world.rows_of(rank)])


def check_streams(rank: int, world: World) -> None:
    group = make_group(rank)
    expected = expected_rows(world, rank).to(group.device)
    idx = world.topk_idx[rank].to(group.device)
    source = world.x[rank].to(group.device)
    routing = group.route(idx, num_experts=world.num_experts)
    group.combine(routing, group.dispatch(routing, source).x)  # one-time setup of the first calls
    torch.cuda.synchronize()
    late = torch.zeros_like(source)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY)
        busy = side.record_event()
        late.copy_(source)
        received = group.dispatch(routing, late)
        combined = group.combine(routing, received.x)
        kept = received.x.clone()
        assert not busy.query(), "a call waited for the GPU"
    # Memory of the side stream is reused in stream order, although the host did not wait.
    del received
    with torch.cuda.stream(side):
        for _ in range(3):
            again = group.dispatch(routing, torch.zeros_like(late)).x
    side.synchronize()
    assert torch.equal(kept, expected)
    assert not again.any()
    ranks_of = [len(world.ranks_of(rank, token)) for token in range(len(source))]
    factor = torch.tensor(ranks_of, device=group.device).unsqueeze(1)
    assert torch.equal(combined.x.float(), source.float() * factor)
    group.wait()
    group.destroy()


def test_calls_follow_the_current_stream_and_do_not_wait() -> None:
    run_ranks(NUM_RANKS, check_streams, make_world(NUM_RANKS, 6, [40, 30]))


def check_reuse(rank: int, world: World) -> None:
    group = make_group(rank, arena_bytes=256 << 20)
    expected = expected_rows(world, rank).to(group.device)
    idx, x = world.topk_idx[rank].to(group.device), world.x[rank].to(group.device)
    routing = group.route(idx, num_experts=world.num_experts)
    used = []
    for step in range(50):
        received = group.dispatch(routing, x * (step % 2))
        assert torch.equal(received.x, expected * (step % 2))
        used.append(group._native.memory_usage()[2])
    assert len(set(used)) == 1, "outputs of earlier calls are reused"
    # Larger and larger tensors, in total more than the arena holds: unused memory is freed.
    for mib in (60, 90, 120, 150):
        assert group.empty(mib << 20, dtype=torch.uint8).numel() == mib << 20
    # Memory that torch frees can be allocated again, and tensors outlive their group.
    kept = group.empty(4, 16)
    kept.fill_(3.0)
    del received
    torch.cuda.empty_cache()
    assert torch.equal(group.dispatch(routing, x).x, expected)
    group.destroy()
    del group, routing
    assert torch.equal(kept.cpu(), torch.full((4, 16), 3.0, dtype=torch.bfloat16))


def test_outputs_are_reused() -> None:
    run_ranks(NUM_RANKS, check_reuse, make_world(NUM_RANKS, 6, [40, 30]))


def check_many_at_once(rank: int, world: World) -> None:
    """A program that queues calls ahead: memory grows in few steps, and memory in use is not overwritten."""
    group = make_group(rank)
    idx, x = world.topk_idx[rank].to(group.device), world.x[rank].to(group.device)
    routing = group.route(idx, num_experts=world.num_experts)
    expected = expected_rows(world, rank).to(group.device)
    used, held = [], []
    for step in range(24):
        held.append(group.dispatch(routing, x + step).x)
        used.append(group._native.memory_usage()[2])
    assert held[0].nbytes > 12 << 20, "each takes a segment of torch's allocator"
    assert len(set(used)) <= 7
    # In stream order: memory that is freed here serves the next call, even while earlier work runs.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    sums = []
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY // 4)
        while held:
            held[-1].record_stream(side)
            sums.append(held.pop().float().sum())
    for _ in range(24):
        group.dispatch(routing, torch.zeros_like(x))
    side.synchronize()
    for step, total in zip(reversed(range(24)), sums, strict=True):
        assert torch.equal(total, (expected + step).float().sum())
    group.wait()
    group.destroy()


def test_many_outputs_at_once() -> None:
    run_ranks(NUM_RANKS, check_many_at_once, make_world(NUM_RANKS, 6, [600, 500], hidden=8192))


def check_new_routes(rank: int) -> None:
    """Each route brings a few more rows than any before it, as those of a program may at any time."""
    group = make_group(rank)
    most = 4350
    idx = torch.tensor([[0, 1]], device=group.device).expand(most, 2).contiguous()  # each token goes to both ranks
    x = torch.randn(most, 8192, device=group.device).to(torch.bfloat16)
    used = []
    for num_tokens in range(4200, most + 1, 30):
        routing = group.route(idx[:num_tokens], num_experts=NUM_RANKS)
        received = group.dispatch(routing, x[:num_tokens])
        assert received.x.shape == (2 * num_tokens, 8192)
        assert torch.equal(received.x[num_tokens * rank :][:num_tokens], x[:num_tokens])
        del received
        torch.cuda.synchronize()
        used.append(group._native.memory_usage()[2])
    assert len(set(used)) == 1, f"a few more rows take new memory, which all ranks map: {used}"
    group.destroy()


def test_a_few_more_rows_need_no_new_memory() -> None:
    run_ranks(NUM_RANKS, check_new_routes)


def check_graph(rank: int, worlds: list[World]) -> None:
    group = make_group(rank)
    most = 2 * len(worlds[0].x[0])
    idx = worlds[0].topk_idx[rank].to(group.device)
    x = worlds[0].x[rank].to(group.device)
    out = group.empty(most, x.shape[1])

    def layer(given: torch.Tensor | None) -> tuple[ferry.Routing, ferry.Received, ferry.Combined]:
        routing = group.route(idx, num_experts=worlds[0].num_experts, max_recv_rows=most)
        received = group.dispatch(routing, x, out=given)
        return routing, received, group.combine(routing, received.x)

    for given in (out, None):
        layer(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, received, combined = layer(given)
        for world in worlds:
            idx.copy_(world.topk_idx[rank])
            x.copy_(world.x[rank])
            graph.replay()
            group.wait()
            expected = expected_rows(world, rank).to(group.device)
            assert torch.equal(received.x[: len(expected)], expected)
            assert (received.topk_idx[len(expected) :] == -1).all()
            factor = torch.tensor([len(world.ranks_of(rank, token)) for token in range(len(x))], device=group.device)
            assert torch.equal(combined.x.float(), x.float() * factor.unsqueeze(1))
    group.destroy()


def test_graphs_route_anew() -> None:
    worlds = [make_world(NUM_RANKS, 6, [24, 24], seed=seed) for seed in range(3)]
    run_ranks(NUM_RANKS, check_graph, worlds)


def check_errors(rank: int, world: World) -> None:
    group = make_group(rank, timeout=20, arena_bytes=64 << 20)
    idx, x = world.topk_idx[rank].to(group.device), world.x[rank].to(group.device)
    with pytest.raises(ferry.CapacityExceeded, match="arena_bytes"):
        group.empty(256 << 20, dtype=torch.uint8)
    with pytest.raises(ferry.InvalidArgument, match="the tensor is on cpu" if rank == 0 else None):
        group.route(world.topk_idx[rank] if rank == 0 else idx, num_experts=world.num_experts)
    # Reported on request: the calls never waited for the host.
    group.route(idx, num_experts=world.num_experts, max_recv_rows=1)
    with pytest.raises(ferry.CapacityExceeded):
        group.wait()
    too_few = group.route(idx, num_experts=world.num_experts, max_recv_rows=1)
    if rank == 0:  # one rank makes an invalid call that no rank takes part in
        with pytest.raises(ferry.InvalidArgument):
            group.dispatch(too_few, x[:-1])
    else:
        assert (group.dispatch(too_few, x).topk_idx == -1).all()
    torch.cuda.synchronize()
    with pytest.raises(ferry.CapacityExceeded):
        group.poll()
    routing = group.route(idx, num_experts=world.num_experts)
    assert torch.equal(group.dispatch(routing, x).x, expected_rows(world, rank).to(group.device))
    group.wait()
    group.destroy()


def test_errors_surface_on_all_ranks() -> None:
    run_ranks(NUM_RANKS, check_errors, make_world(NUM_RANKS, 6, [8, 9]))


def die(rank: int, world: World) -> None:
    group = make_group(rank, timeout=5)
    idx, x = world.topk_idx[rank].to(group.device), world.x[rank].to(group.device)
    routing = group.route(idx, num_experts=world.num_experts)
    group.dispatch(routing, x)
    group.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((ferry.PeerLost, ferry.Timeout)) as caught:
        for _ in range(1000):
            group.dispatch(routing, x)
            group.wait()
    assert caught.value.peer == 1
    assert torch.ones(4, device=group.device).sum() == 4, "the GPU goes on"


def test_a_dead_rank_is_named() -> None:
    run_ranks(NUM_RANKS, die, make_world(NUM_RANKS, 6, [8, 9]), lost=(1,))
