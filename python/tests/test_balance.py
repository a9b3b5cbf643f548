"""Experts to ranks by load."""

from __future__ import annotations

import numpy
import pytest
import torch

import ferry

SHAPE = {"num_replicas": 12, "num_groups": 4, "num_nodes": 2, "num_ranks": 4}


def uneven_loads(num_layers: int = 3, num_experts: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 1000, (num_layers, num_experts), generator=generator)


def rank_loads(load: torch.Tensor, placement: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """[layers, R]."""
    layers = []
    for loads, experts in zip(load.double(), placement.long()):
        counts = torch.bincount(experts, minlength=len(loads))
        layers.append((loads / counts)[experts].view(num_ranks, -1).sum(1))
    return torch.stack(layers)


def test_places_every_expert_and_says_how_well() -> None:
    load = uneven_loads()
    placed = ferry.balance(load, **SHAPE)
    assert placed.physical_to_logical.shape == (3, 12) and placed.physical_to_logical.dtype == torch.int32
    assert placed.policy == "hierarchical"
    for layer in range(3):
        experts = placed.physical_to_logical[layer]
        assert torch.bincount(experts, minlength=8).tolist() == placed.replica_counts[layer].tolist()
        for expert in range(8):
            homes = placed.logical_to_physical[layer, expert]
            assert homes[homes >= 0].tolist() == (experts == expert).nonzero().flatten().tolist()
            assert len({home // 6 for home in homes[homes >= 0].tolist()}) == 1  # a node has six places
    loads = rank_loads(load, placed.physical_to_logical, 4)
    torch.testing.assert_close(placed.max_load, loads.amax(1))
    torch.testing.assert_close(placed.mean_load, loads.mean(1))
    contiguous = rank_loads(load, torch.arange(8).expand(3, 8), 4).amax(1)
    assert (placed.max_load < contiguous).all()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_takes_tensors_and_arrays_of_any_numbers(dtype: torch.dtype) -> None:
    load = (uneven_loads() // 8).to(dtype)  # exact in bf16
    expected = ferry.balance(load.long(), **SHAPE).physical_to_logical
    assert ferry.balance(load, **SHAPE).physical_to_logical.equal(expected)
    assert ferry.balance(load.t().contiguous().t(), **SHAPE).physical_to_logical.equal(expected)
    if dtype != torch.bfloat16:
        assert ferry.balance(load.numpy(), **SHAPE).physical_to_logical.equal(expected)


def test_results_outlive_the_call() -> None:
    tables = [ferry.balance(uneven_loads(), **SHAPE).physical_to_logical for _ in range(50)]
    assert all(table.equal(tables[0]) for table in tables)


def test_moves_no_more_than_allowed_and_the_plan_gets_there() -> None:
    load = uneven_loads()
    first = ferry.balance(load, **SHAPE).physical_to_logical
    assert ferry.balance(load, **SHAPE, previous=first).physical_to_logical.equal(first)
    later = load.flip(1)
    second = ferry.balance(later, **SHAPE, previous=first.numpy(), max_moves=2)
    assert (second.num_moves <= 2).all() and second.num_moves.any()
    assert (second.max_load <= rank_loads(later, first, 4).amax(1)).all()

    third = ferry.balance(later, **SHAPE, policy="global").physical_to_logical
    plan = ferry.plan_moves(first, third, num_experts=8, num_ranks=4, num_nodes=2)
    now = first.clone()
    staging: dict[tuple[int, int], int] = {}
    for wave in plan.waves:
        for copy in wave:
            key = copy.from_rank, copy.source
            content = staging[key] if copy.from_staging else int(now[copy.layer, copy.source])
            assert content == copy.expert
            if copy.to_staging:
                assert copy.target < plan.num_staging[copy.to_rank]
                staging[copy.to_rank, copy.target] = content
            else:
                now[copy.layer, copy.target] = content
    assert now.equal(third)
    assert plan.num_remote + plan.num_local == sum(map(len, plan.waves))
    assert 0 < plan.num_between_nodes <= plan.num_remote
    assert ferry.plan_moves(first, first, num_experts=8, num_ranks=4).waves == []


def test_refuses_in_words() -> None:
    load = uneven_loads()
    for bad, said in (
        ({"num_replicas": 7}, "num_replicas is 7, expected 8"),
        ({"num_ranks": 5}, "^balance: num_ranks is 5"),
        ({"num_ranks": "four"}, "^balance: num_ranks is 'four', expected an integer"),
        ({"num_nodes": 1 << 40}, r"num_nodes is 1099511627776, expected less than 2\*\*31"),
        ({"max_steps": None}, "max_steps is None"),
        ({"move_weight": "0.1"}, "move_weight is '0.1', expected a number"),
        ({"num_groups": 3}, "num_groups is 3"),
        ({"policy": "best"}, "policy is 'best'"),
        ({"max_moves": -5}, "max_moves is -5"),
        ({"previous": torch.zeros(3, 11, dtype=torch.int32)}, r"previous is \[3, 11\], expected \[3, 12\]"),
        ({"previous": torch.full((3, 12), 1 << 40)}, r"previous\[0, 0\] is 2147483647"),
        ({"previous": torch.zeros(3, 12)}, "previous is torch.float32"),
    ):
        with pytest.raises(ferry.InvalidArgument, match=said):
            ferry.balance(load, **{**SHAPE, **bad})
    wrong = load.float()
    wrong[1, 2] = float("nan")
    for bad, said in (
        (None, "load is a NoneType"),
        (load[0], r"load is of shape \[8\]"),
        (load.to("meta"), "load is on meta"),
        (load.bool(), "load is torch.bool"),
        (-load, r"load\[0, 0\] is -"),
        (wrong, r"load\[1, 2\] is nan"),
        (numpy.zeros((0, 3, 2)), "load is of shape"),
    ):
        with pytest.raises(ferry.InvalidArgument, match=said):
            ferry.balance(bad, **SHAPE)
    with pytest.raises(ferry.InvalidArgument, match=r"^plan_moves: num_experts is 2\.5, expected an integer"):
        ferry.plan_moves([[0, 0, 1, 1]], [[0, 0, 1, 1]], num_experts=2.5, num_ranks=2)
    with pytest.raises(ferry.InvalidArgument, match="expected an expert that previous has"):
        ferry.plan_moves(
            torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64), num_experts=2, num_ranks=2
        )
