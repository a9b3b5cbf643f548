"""torch.compile: the operators in one graph, with gradients; and methods in functions that are compiled."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, run_ranks
from world import World, make_world

import ferry
import ferry.nn
import ferry.ops

HIDDEN = 16


def factors(offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Each row's expert, counted from 1; rows after the last group belong to no expert.

    Not by searchsorted: torch 2.11 compiles that wrongly on GPUs where the borders are a slice as offsets[1:] is.
    """
    rows = torch.arange(num_rows, device=offsets.device).unsqueeze(1)
    return (rows >= offsets[1:]).sum(dim=1) + 1.0


def check_layer(
    rank: int,
    world: World,
    most: int,
    backend: str,
    kind: str,
    ranks_per_node: int = 0,
    homes: list[int] | None = None,
) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=ranks_per_node)
    placement = None if homes is None else ferry.Placement(homes, choice="round_robin")
    layer = ferry.nn.ExpertParallel(
        group, world.num_experts, expert_alignment=4, host_offsets=False, max_recv_rows=most, placement=placement
    )

    def experts(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows) * factors(offsets, rows.shape[0]).unsqueeze(1)

    def run(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return layer(x * 2, world.topk_idx[rank], weights, experts) + x

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend=backend)):
        x = world.x[rank].clone().requires_grad_()
        weights = world.topk_weights[rank].clone().requires_grad_()
        out = function(x, weights)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, weights.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    group.destroy()


@pytest.mark.parametrize("most", [0, 64])
def test_a_layer_in_one_graph(most: int, device: str) -> None:
    world = make_world(2, 6, [7, 5], hidden=HIDDEN, dtype=torch.float32)
    run_ranks(2, check_layer, world, most, "aot_eager", device)


@pytest.mark.parametrize("most", [0, 64])
def test_a_layer_with_replicas_in_one_graph(most: int, device: str) -> None:
    world = make_world(2, 6, [7, 5], hidden=HIDDEN, dtype=torch.float32)
    run_ranks(2, check_layer, world, most, "aot_eager", device, 0, [0, 1, 2, 3, 4, 5, 0, 1, 2, 0])


def check_many_placements(rank: int, world: World) -> None:
    """More than torch compiles one function for, and as many as a model has layers."""
    group = ferry.Group(dist.group.WORLD, device="cpu")
    homes = [[0, 1, 2, 3, 4, 5, i % 6, (i + 1) % 6] for i in range(12)]
    layer = ferry.nn.ExpertParallel(group, world.num_experts, host_offsets=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x, world.topk_idx[rank], world.topk_weights[rank], lambda rows, _: torch.tanh(rows))

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for one in homes:
        layer.placement = ferry.Placement(one, choice="round_robin")
        torch.testing.assert_close(compiled(world.x[rank]), run(world.x[rank]))
    group.destroy()


def test_a_layer_whose_placement_changes_often() -> None:
    run_ranks(2, check_many_placements, make_world(2, 6, [7, 5], hidden=HIDDEN, dtype=torch.float32))


def check_methods_compile_quietly(rank: int) -> None:
    group = ferry.Group(dist.group.WORLD, device="cpu")

    def run(x: torch.Tensor) -> torch.Tensor:
        routing = group.route(torch.zeros(2, 1, dtype=torch.int64), num_experts=1)
        return group.combine(routing, group.dispatch(routing, x * 2).x).x + 1

    x = torch.randn(2, HIDDEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(torch.compile(run, backend="eager")(x), x * 2 + 1)
    group.destroy()


def test_compiled_programs_call_methods_without_warnings() -> None:
    run_ranks(1, check_methods_compile_quietly)


def check_tokens(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    key, num_experts, idx = group.key, world.num_experts, world.topk_idx[rank]

    def by_operators(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        handle = ferry.ops.route(idx, None, key, num_experts)
        rows, ids, received = ferry.ops.dispatch(handle, x, weights)
        factor = torch.where(ids >= 0, received, 0.0).sum(dim=1, keepdim=True)
        return ferry.ops.combine(handle, rows * factor, x.shape[0])

    def by_methods(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routing = group.route(idx, num_experts=num_experts)
        rows, ids, received = ferry.nn.dispatch(routing, x * 1.0, weights)
        factor = torch.where(ids >= 0, received, 0.0).sum(dim=1, keepdim=True)
        return ferry.nn.combine(routing, rows * factor)

    results = []
    for function in (
        by_methods,
        by_operators,
        torch.compile(by_operators, fullgraph=True, backend="aot_eager"),
        torch.compile(by_methods, backend="aot_eager"),
    ):
        x = world.x[rank].clone().requires_grad_()
        weights = world.topk_weights[rank].clone().requires_grad_()
        out = function(x, weights)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, weights.grad))
    for result in results[1:]:
        for other, first in zip(result, results[0], strict=True):
            torch.testing.assert_close(other, first)
    with pytest.raises(ferry.InvalidArgument, match="not a tensor that ferry"):
        ferry.ops.dispatch(torch.empty(1, dtype=torch.uint8, device=device), world.x[rank])
    with pytest.raises(ferry.InvalidArgument, match="of this process that still exists"):
        ferry.ops.route(idx, None, 10**6, num_experts)
    with pytest.raises(ferry.InvalidArgument, match="placement is 1000000, expected the key"):
        ferry.ops.route(idx, None, key, num_experts, placement=torch.tensor(10**6))
    group.destroy()


def test_operators_and_methods_agree(device: str) -> None:
    run_ranks(2, check_tokens, make_world(2, 6, [7, 5], hidden=HIDDEN, dtype=torch.float32), device)


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU, for which inductor writes kernels in Triton")
@pytest.mark.parametrize("most", [0, 64])
def test_a_layer_that_inductor_compiles(most: int) -> None:
    world = make_world(2, 6, [7, 5], hidden=HIDDEN, dtype=torch.float32)
    run_ranks(2, check_layer, world, most, "inductor", "cuda")
