"""Experts with several homes, and counters of their load."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, run_ranks
from world import World, make_world

import ferry

# Seven experts on two ranks: the first has a home on each, the last two on the second one; one is not in use.
HOMES = [0, 1, 2, 3, 4, 0, 5, 6, 6, -1]


def pick(world: World, rank: int) -> torch.Tensor:
    """The homes that a rank's tokens pick."""
    size = len(HOMES) // world.num_ranks
    picked = world.topk_idx[rank].clone()
    for token, ids in enumerate(world.topk_idx[rank].tolist()):
        for k, expert in enumerate(ids):
            homes = [p for p, logical in enumerate(HOMES) if logical == expert and expert >= 0]
            near = [p for p in homes if p // size == rank] or homes
            picked[token, k] = near[(token + rank) % len(near)] if near else -1
    return picked


def physical(world: World) -> World:
    ids = [pick(world, rank) for rank in range(world.num_ranks)]
    return World(world.num_ranks, len(HOMES), world.x, ids, world.topk_weights)


def counts(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Tokens that name each expert."""
    return torch.stack([(ids == expert).any(1).sum() for expert in range(size)])


def check(rank: int, world: World, kind: str, on_gpu: bool) -> None:
    device = device_of(rank, kind)
    homes = physical(world)
    group = ferry.Group(dist.group.WORLD, device=device)
    table = torch.tensor(HOMES, dtype=torch.int32, device=device) if on_gpu else HOMES
    placement = ferry.Placement(table)
    idx, weights, x = (one[rank].to(device) for one in (world.topk_idx, world.topk_weights, world.x))
    size = len(HOMES) // world.num_ranks
    counters = ferry.LoadCounters(
        logical=torch.zeros(world.num_experts, dtype=torch.int64, device=device),
        physical=torch.zeros(len(HOMES), dtype=torch.int32, device=device),
        received=torch.ones(size, dtype=torch.int64, device=device),
    )
    for call in (1, 2):
        routing = group.route(
            idx, weights, num_experts=world.num_experts, placement=placement, counters=counters, max_recv_rows=64
        )
        assert (routing.num_experts, routing.num_physical_experts) == (world.num_experts, len(HOMES))
        assert routing.local_expert_ids == list(range(rank * size, (rank + 1) * size))
        assert torch.equal(routing.topk_idx.cpu(), homes.topk_idx[rank])
        received = group.dispatch(routing, x)
        rows = homes.rows_of(rank)
        assert torch.equal(received.x[: len(rows)].cpu(), torch.stack([world.x[s][t] for s, t in rows]))
        total = sum(counts(ids, len(HOMES)) for ids in homes.topk_idx)
        assert torch.equal(routing.expert_counts.cpu(), total)
        assert torch.equal(counters.logical.cpu(), call * counts(world.topk_idx[rank], world.num_experts))
        assert torch.equal(counters.physical.cpu(), (call * counts(homes.topk_idx[rank], len(HOMES))).int())
        assert torch.equal(counters.received.cpu(), 1 + call * total[rank * size : (rank + 1) * size])
        combined = group.combine(routing, received.x).x
        num_ranks = torch.tensor([len(homes.ranks_of(rank, token)) for token in range(len(x))]).unsqueeze(1)
        assert torch.allclose(combined.cpu(), world.x[rank] * num_ranks)
    # Another one in the next call, or none.
    routing = group.route(idx, num_experts=world.num_experts, placement=ferry.Placement(list(range(world.num_experts))))
    assert torch.equal(routing.topk_idx, idx)
    assert torch.equal(group.route(idx, num_experts=world.num_experts).topk_idx, idx)
    group.destroy()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_experts_with_several_homes(device: str, on_gpu: bool) -> None:
    if on_gpu and device == "cpu":
        return  # tables in GPU memory are for groups on GPUs
    run_ranks(2, check, make_world(2, 7, [9, 5], dtype=torch.float32), device, on_gpu)


def check_survivors(rank: int, kind: str) -> None:
    device = device_of(rank, kind)
    group = ferry.Group(dist.group.WORLD, device=device)
    # Six experts on three ranks, of which the one in the middle is lost: 2 and 3 have no home.
    placement = ferry.surviving_placement(None, 6, 3, [0, 2])
    topk_idx = torch.tensor([[0, 2], [5, 3], [3, 3], [-1, 4]], device=device)
    weights = torch.full((4, 2), 0.5, device=device)
    x = torch.arange(16, dtype=torch.float32, device=device).reshape(4, 4)
    counters = ferry.LoadCounters(
        logical=torch.zeros(6, dtype=torch.int64, device=device),
        homeless=torch.zeros(1, dtype=torch.int32, device=device),
    )
    routing = group.route(topk_idx, weights, num_experts=6, placement=placement, counters=counters)
    assert routing.num_physical_experts == 4
    assert [placement.num_local_experts(one, 2) for one in range(2)] == [2, 2]
    assert routing.topk_idx.tolist() == [[0, -1], [3, -1], [-1, -1], [-1, 2]]
    received = group.dispatch(routing, x)
    combined = group.combine(routing, received.x)
    assert torch.equal(combined.x, x * torch.tensor([[1.0], [1.0], [0.0], [1.0]], device=device))
    assert counters.homeless.tolist() == [4]
    assert counters.logical.tolist() == [1, 0, 0, 0, 1, 1]
    with pytest.raises(ferry.InvalidArgument, match="allow_homeless"):
        group.route(topk_idx, num_experts=6, placement=ferry.Placement([0, 1, 4, 5, 5, 5]))
    with pytest.raises(ferry.InvalidArgument, match="allow_homeless: rank 0 has"):
        homes = ferry.Placement(list(range(6)), allow_homeless=rank == 1)
        group.route(topk_idx, num_experts=6, placement=homes)
    group.destroy()


def test_experts_without_a_home(device: str) -> None:
    run_ranks(2, check_survivors, device)


def test_survivors_of_a_placement() -> None:
    before = ferry.Placement([0, 1, 2, 0], [2, 0, 1, 1], choice="round_robin")
    left = ferry.surviving_placement(before, 3, 3, [1, 2])
    assert left.num_physical_experts == 3
    assert [left.num_local_experts(rank, 2) for rank in range(2)] == [2, 1]
    with pytest.raises(ferry.InvalidArgument, match=r"kept_ranks\[1\] is 1, expected more than 2"):
        ferry.surviving_placement(before, 3, 3, [2, 1])


def check_window(rank: int, kind: str) -> None:
    device = device_of(rank, kind)
    group = ferry.Group(dist.group.WORLD, device=device)
    window = ferry.LoadWindow(group, num_layers=2, num_experts=3, num_physical_experts=4)
    placement = ferry.Placement([0, 1, 2, 0])
    idx = torch.tensor([[0], [0], [2]] if rank == 0 else [[0], [1]], device=device)
    for _ in range(2):
        group.route(idx, num_experts=3, placement=placement, counters=window.counters(1))
    load = window.sum()
    assert load.logical.tolist() == [[0, 0, 0], [6, 2, 2]]
    assert load.physical.tolist() == [[0, 0, 0, 0], [4, 2, 2, 2]]
    assert json.loads(load.to_json())["logical"] == load.logical.tolist()
    assert load.wait_times_ns.diagonal().tolist() == [0, 0]
    assert json.loads(load.to_json())["wait_times_ns"] == load.wait_times_ns.tolist()
    window.reset()
    assert window.sum().logical.sum() == 0
    group.destroy()


def test_load_over_a_window_of_calls(device: str) -> None:
    run_ranks(2, check_window, device)


def check_latency(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    homes = physical(world)
    size = len(HOMES) // world.num_ranks
    rooms = {} if kind == "cpu" else {"latency_bytes": 1 << 22}
    group = ferry.Group(dist.group.WORLD, device=device, **rooms)
    counters = ferry.LoadCounters(received=torch.zeros(size, dtype=torch.int32, device=device))
    dispatched = group.latency_dispatch(
        world.x[rank].to(device),
        world.topk_idx[rank].to(device),
        num_experts=world.num_experts,
        max_tokens=9,
        placement=ferry.Placement(HOMES),
        counters=counters,
    )
    assert dispatched.x.shape[0] == size
    for local in range(size):
        rows = homes.rows_of_expert(rank * size + local)
        assert counters.received[local] == len(rows)
        expected = [world.x[s][t] for s, t in rows]
        assert all(torch.equal(dispatched.x[local, i].cpu(), row) for i, row in enumerate(expected))
    group.destroy()


def test_latency_mode(device: str) -> None:
    run_ranks(2, check_latency, make_world(2, 7, [9, 5], dtype=torch.float32), device)


def check_refusals(rank: int, kind: str) -> None:
    device = device_of(rank, kind)
    group = ferry.Group(dist.group.WORLD, device=device)
    idx = torch.zeros(3, 2, dtype=torch.int64, device=device)
    good = ferry.Placement([0, 1, 2, 0])
    with pytest.raises(ferry.InvalidArgument, match="rank 1: route: placement: no entry of physical_to_logical is"):
        group.route(idx, num_experts=3, placement=good if rank == 0 else ferry.Placement([0, 1, 1, 0]))
    with pytest.raises(ferry.InvalidArgument, match=r"physical_to_logical\[1\]: rank 0 has 1, rank 1 has 2"):
        group.route(idx, num_experts=3, placement=good if rank == 0 else ferry.Placement([0, 2, 1, 0]))
    with pytest.raises(ferry.InvalidArgument, match="rank 1"):
        short = torch.zeros(3, dtype=torch.int64, device=device)
        counters = ferry.LoadCounters(physical=short) if rank == 1 else None
        group.route(idx, num_experts=3, placement=good, counters=counters)
    with pytest.raises(ferry.FerryError, match="placement is a list" if rank == 1 else "rank 1"):
        group.route(idx, num_experts=3, placement=good if rank == 0 else [0, 1, 2, 0])
    assert group.route(idx, num_experts=3, placement=good).topk_idx.shape == (3, 2)
    group.destroy()


def test_wrong_placements_are_refused_on_every_rank(device: str) -> None:
    run_ranks(2, check_refusals, device)


def test_placements_are_of_numbers_and_known_choices() -> None:
    with pytest.raises(ferry.InvalidArgument, match="choice is 'best'"):
        ferry.Placement([0], choice="best")
    with pytest.raises(ferry.InvalidArgument, match="expected numbers of 32 bits"):
        ferry.Placement([1 << 40])
    for wrong in ("all", [0.5], [None], 3, None):
        with pytest.raises(ferry.InvalidArgument, match=r"physical_to_logical(\[0\])? is .*, expected "):
            ferry.Placement(wrong)
    with pytest.raises(ferry.InvalidArgument, match="surviving_placement: num_ranks is 'two', expected an integer"):
        ferry.surviving_placement(None, 4, "two", [0])
    with pytest.raises(ferry.InvalidArgument, match=r"surviving_placement: kept_ranks\[1\] is 1.5"):
        ferry.surviving_placement(None, 4, 2, [0, 1.5])
    with pytest.raises(ferry.InvalidArgument, match="float32"):
        ferry.Placement(torch.zeros(2))


def test_a_copy_of_a_placement_is_the_placement() -> None:
    placement = ferry.Placement([0, 1, 0])
    assert copy.copy(placement) is placement
    assert copy.deepcopy({"layer": placement})["layer"] is placement
