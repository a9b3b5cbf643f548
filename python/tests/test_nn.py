"""Gradients against the same layer without ranks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, run_ranks
from torch.utils.checkpoint import checkpoint
from world import World, make_world

import ferry
import ferry.nn
from ferry import _native

HIDDEN = 16


def make_experts(num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_experts, HIDDEN, HIDDEN, generator=generator) / HIDDEN


def dense(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for k in range(idx.shape[1]):
        chosen = experts[idx[:, k].clamp(min=0)]
        y = torch.tanh(torch.einsum("th,thg->tg", x, chosen)) * weights[:, k : k + 1]
        out = out + torch.where(idx[:, k : k + 1] >= 0, y, torch.zeros_like(y))
    return out


def check_layer(rank: int, world: World, alignment: int, kind: str, ranks_per_node: int = 0) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device, ranks_per_node=ranks_per_node)
    layer = ferry.nn.ExpertParallel(group, world.num_experts, expert_alignment=alignment)
    x = world.x[rank].clone().requires_grad_()
    weights = world.topk_weights[rank].clone().requires_grad_()
    first = world.first_expert(rank)
    mine = make_experts(world.num_experts)[first : first + world.num_local(rank)].to(device).requires_grad_()

    def experts(rows: torch.Tensor, offsets: list[int]) -> torch.Tensor:
        parts = [torch.tanh(rows[a:b] @ mine[e]) for e, (a, b) in enumerate(itertools.pairwise(offsets))]
        return torch.cat([*parts, rows[offsets[-1] :]])

    out = layer(x, world.topk_idx[rank], weights, experts)
    seeds = [torch.Generator().manual_seed(9 + r) for r in range(world.num_ranks)]
    grad = [torch.randn(t.shape, generator=seed).to(device) for t, seed in zip(world.x, seeds)]
    out.backward(grad[rank])

    all_experts = make_experts(world.num_experts).to(device).requires_grad_()
    all_x = [t.clone().requires_grad_() for t in world.x]
    all_weights = [w.clone().requires_grad_() for w in world.topk_weights]
    outs = [dense(all_x[r], world.topk_idx[r], all_weights[r], all_experts) for r in range(world.num_ranks)]
    sum((o * g).sum() for o, g in zip(outs, grad)).backward()

    torch.testing.assert_close(out, outs[rank])
    torch.testing.assert_close(x.grad, all_x[rank].grad)
    torch.testing.assert_close(weights.grad, all_weights[rank].grad)
    torch.testing.assert_close(mine.grad, all_experts.grad[first : first + world.num_local(rank)])
    group.destroy()


@pytest.mark.parametrize("alignment", [1, 4])
def test_layer_and_its_gradients(alignment: int, device: str) -> None:
    run_ranks(3, check_layer, make_world(3, 7, [6, 0, 9], hidden=HIDDEN, dtype=torch.float32), alignment, device)


def check_fp8_gradients(rank: int, world: World, by_operators: bool, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    idx, weights, num_experts = world.topk_idx[rank], world.topk_weights[rank], world.num_experts
    routing = group.route(idx, weights, num_experts=num_experts)
    handle = ferry.ops.route(idx, weights, group.key, num_experts) if by_operators else None
    rows = group.dispatch(routing, world.x[rank], tables=False).x
    sums, gradients = [], []
    for wire_format in (None, "fp8"):
        y = rows.clone().requires_grad_()
        if handle is not None:
            out = ferry.ops.combine(handle, y, routing.num_tokens, wire_format=wire_format)
        else:
            out = ferry.nn.combine(routing, y, wire_format=wire_format)
        (out * world.x[rank]).sum().backward()
        sums.append(out.detach())
        gradients.append(y.grad)
    assert torch.equal(sums[1], group.combine(routing, rows, wire_format="fp8").x)
    assert not torch.equal(*sums)
    # Backward is a dispatch of the sums' gradients, which are not quantised.
    assert torch.equal(*gradients)
    assert torch.equal(gradients[0], rows)
    group.destroy()


@pytest.mark.parametrize("by_operators", [False, True])
def test_fp8_on_the_wire_leaves_gradients_as_they_are(by_operators: bool, device: str) -> None:
    world = make_world(2, 6, [5, 7], hidden=128, dtype=torch.float32)
    run_ranks(2, check_fp8_gradients, world, by_operators, device)


def penalised(out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """A loss with a gradient penalty, whose gradients are of second order."""
    loss = out.square().sum()
    return loss + sum(grad.square().sum() for grad in torch.autograd.grad(loss, inputs, create_graph=True))


def check_second_order(rank: int, world: World, kind: str, by_operators: bool) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    layer = ferry.nn.ExpertParallel(group, world.num_experts)
    run = layer._compiled if by_operators else layer
    first = world.first_expert(rank)
    all_experts = make_experts(world.num_experts).to(device).requires_grad_()
    mine = all_experts.detach()[first : first + world.num_local(rank)].clone().requires_grad_()

    def experts(rows: torch.Tensor, offsets: list[int]) -> torch.Tensor:
        parts = [torch.tanh(rows[a:b] @ mine[e]) for e, (a, b) in enumerate(itertools.pairwise(offsets))]
        return torch.cat([*parts, rows[offsets[-1] :]])

    x = world.x[rank].clone().requires_grad_()
    weights = world.topk_weights[rank].clone().requires_grad_()
    penalised(run(x, world.topk_idx[rank], weights, experts), x, weights).backward()
    for source in range(world.num_ranks):
        dense_x = world.x[source].clone().requires_grad_()
        dense_weights = world.topk_weights[source].clone().requires_grad_()
        out = dense(dense_x, world.topk_idx[source], dense_weights, all_experts)
        penalised(out, dense_x, dense_weights).backward()
        if source == rank:
            torch.testing.assert_close(x.grad, dense_x.grad)
            torch.testing.assert_close(weights.grad, dense_weights.grad)
    torch.testing.assert_close(mine.grad, all_experts.grad[first : first + world.num_local(rank)])
    group.destroy()


@pytest.mark.parametrize("by_operators", [False, True])
def test_gradients_of_gradients(by_operators: bool, device: str) -> None:
    world = make_world(3, 7, [6, 0, 9], hidden=HIDDEN, dtype=torch.float32)
    run_ranks(3, check_second_order, world, device, by_operators)


# Seven experts on three ranks, three homes each: the first and the fourth have two, then others.
HOMES = [[0, 1, 2, 3, 4, 0, 5, 6, 3], [6, 5, 4, 3, 2, 1, 0, 6, 5]]


def check_placed(rank: int, world: World, kind: str) -> None:
    """The layer gives the same wherever experts live, and their homes' gradients add up to theirs."""
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    layer = ferry.nn.ExpertParallel(group, world.num_experts, placement=ferry.Placement(HOMES[0]))
    size = len(HOMES[0]) // world.num_ranks
    outs = []
    for homes in (HOMES[0], HOMES[1], None):
        layer.placement = None if homes is None else ferry.Placement(homes, choice="round_robin")
        local = range(world.first_expert(rank), world.first_expert(rank + 1))
        logical = list(local) if homes is None else homes[rank * size : (rank + 1) * size]
        mine = make_experts(world.num_experts)[logical].to(device).requires_grad_()

        def experts(rows: torch.Tensor, offsets: list[int], mine: torch.Tensor = mine) -> torch.Tensor:
            assert len(offsets) == len(mine) + 1
            parts = [torch.tanh(rows[a:b] @ mine[e]) for e, (a, b) in enumerate(itertools.pairwise(offsets))]
            return torch.cat([*parts, rows[offsets[-1] :]])

        x = world.x[rank].clone().requires_grad_()
        out = layer(x, world.topk_idx[rank], world.topk_weights[rank], experts)
        out.square().sum().backward()
        grads = torch.zeros(world.num_experts, HIDDEN, HIDDEN, device=device).index_add(
            0, torch.tensor(logical, device=device), mine.grad
        )
        dist.all_reduce(grads)
        outs.append((out.detach(), x.grad, grads))
    for placed in outs[:2]:
        for one, without in zip(placed, outs[2], strict=True):
            torch.testing.assert_close(one, without)
    with pytest.raises(ferry.InvalidArgument, match="ExpertParallel: placement is a list"):
        layer.placement = HOMES[0]
    assert layer.placement is None
    group.destroy()


def test_a_layer_whose_experts_move(device: str) -> None:
    run_ranks(3, check_placed, make_world(3, 7, [6, 0, 9], hidden=HIDDEN, dtype=torch.float32), device)


def check_tokens(rank: int, world: World, kind: str) -> None:
    """Layout "tokens": the weights of experts on other ranks are constants, even if a program uses them."""
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    weights = world.topk_weights[rank].clone().requires_grad_()
    x = world.x[rank].clone().requires_grad_()
    routing = group.route(world.topk_idx[rank], weights.detach(), num_experts=world.num_experts)
    rows, idx, received = ferry.nn.dispatch(routing, x, weights)
    assert not idx.requires_grad
    out = ferry.nn.combine(routing, rows * received.exp().sum(dim=1, keepdim=True))
    penalised(out, x, weights).backward()

    # The same by hand: a token's factor on each of its ranks.
    y = world.x[rank].clone().requires_grad_()
    v = world.topk_weights[rank].clone().requires_grad_()
    total = torch.zeros_like(y)
    for token, ids in enumerate(world.topk_idx[rank].tolist()):
        for there in world.ranks_of(rank, token):
            local = torch.tensor([e >= 0 and world.owner(e) == there for e in ids], device=device)
            factor = torch.where(local, v[token], torch.zeros((), device=device)).exp().sum()
            total = total.index_add(0, torch.tensor([token], device=device), (y[token] * factor).unsqueeze(0))
    penalised(total, y, v).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weights.grad, v.grad, rtol=1e-4, atol=1e-4)
    group.destroy()


def check_failures(rank: int, world: World, kind: str) -> None:
    """An error in the layer of one rank leaves no other rank waiting."""
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device, timeout=20)
    layer = ferry.nn.ExpertParallel(group, world.num_experts)
    idx, good = world.topk_idx[rank], {"x": world.x[rank], "topk_weights": world.topk_weights[rank]}

    def failing(rows: torch.Tensor, offsets: list[int]) -> torch.Tensor:
        raise RuntimeError("out of experts")

    for wrong, error, match in (
        ({"experts": failing}, RuntimeError, "out of experts"),
        ({"experts": lambda rows, _: None}, TypeError, "NoneType"),
        ({"experts": lambda rows, _: rows[:-1]}, RuntimeError, "must match"),
        ({"experts": lambda rows, _: rows.T}, (RuntimeError, ferry.InvalidArgument), None),
        ({"topk_weights": None}, ferry.InvalidArgument, "ExpertParallel: topk_weights is a NoneType"),
        ({"x": None}, ferry.InvalidArgument, "dispatch: x: expected a torch.Tensor of rows, got NoneType"),
        ({"x": world.x[rank][1:]}, ferry.InvalidArgument, "dispatch"),
    ):
        given = {"experts": lambda rows, _: rows, **good} | (wrong if rank == 1 else {})
        with pytest.raises(error if rank == 1 else ferry.InvalidArgument, match=match if rank == 1 else "rank 1: "):
            layer(given["x"], idx, given["topk_weights"], given["experts"])
            group.wait()  # where GPUs learn of others' errors
    out = layer(good["x"], idx, good["topk_weights"], lambda rows, _: rows)
    chosen = torch.where(idx >= 0, world.topk_weights[rank], 0.0).sum(1, keepdim=True)
    once = torch.tensor([len(set(ids)) == len(ids) for ids in idx.tolist()], device=device)
    torch.testing.assert_close(out[once], (good["x"] * chosen)[once])
    group.destroy()


def test_a_layer_that_fails_on_one_rank(device: str) -> None:
    run_ranks(3, check_failures, make_world(3, 7, [6, 5, 9], hidden=HIDDEN, dtype=torch.float32), device)


def check_checkpointed(rank: int, world: World, kind: str) -> None:
    """Checkpointing ends the second forward pass before combine, by an exception: that is no failure."""
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    layer = ferry.nn.ExpertParallel(group, world.num_experts)
    refused = []
    _native.Calls.refuse_combine = lambda *given: refused.append(given)
    grads = []
    for run in (lambda function, x: function(x), functools.partial(checkpoint, use_reentrant=False)):
        x = world.x[rank].clone().requires_grad_()
        out = run(lambda x: layer(x, world.topk_idx[rank], world.topk_weights[rank], lambda r, _: torch.tanh(r)), x)
        out.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])
    assert not refused
    group.destroy()


def test_a_layer_under_activation_checkpointing(device: str) -> None:
    run_ranks(2, check_checkpointed, make_world(2, 4, [6, 9], hidden=HIDDEN, dtype=torch.float32), device)


def check_num_sms(rank: int, world: World, kind: str) -> None:
    device = device_of(rank, kind)
    world = world.to(device)
    group = ferry.Group(dist.group.WORLD, device=device)
    found = []

    def watch(name: str) -> None:
        call = getattr(group, name)

        def watched(*arguments: object, num_sms: int = 0, **options: object) -> object:
            found.append((name, num_sms))
            return call(*arguments, num_sms=num_sms, **options)

        setattr(group, name, watched)

    watch("dispatch")
    watch("combine")
    x = world.x[rank].clone().requires_grad_()
    routing = group.route(world.topk_idx[rank], num_experts=world.num_experts)
    rows, _, _ = ferry.nn.dispatch(routing, x, num_sms=2)
    out = ferry.nn.combine(routing, rows, num_sms=4)
    out.sum().backward()
    assert found == [("dispatch", 2), ("combine", 4), ("dispatch", 4), ("combine", 2)]
    num_ranks = torch.tensor([len(world.ranks_of(rank, t)) for t in range(len(x))], dtype=x.dtype, device=device)
    torch.testing.assert_close(x.grad, num_ranks.unsqueeze(1).expand_as(x))
    group.destroy()


def test_backward_uses_as_many_multiprocessors(device: str) -> None:
    run_ranks(2, check_num_sms, make_world(2, 4, [6, 9], hidden=HIDDEN, dtype=torch.float32), device)


def test_gradients_of_dispatch_and_combine(device: str) -> None:
    run_ranks(3, check_tokens, make_world(3, 7, [6, 2, 9], hidden=HIDDEN, dtype=torch.float32), device)
